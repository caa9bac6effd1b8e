# SPDX-License-Identifier: Apache-2.0
"""Requests of agents to two real vLLM servers through `kvrouter serve`: every prediction equals the reuse.

The clients are OpenAI's and Anthropic's own, with bodies in zstd, gzip and plain. `make agents-proof` sends more requests,
through Envoy with the router as its endpoint picker too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.engine.agents import FLAGS, FOLLOW_UP, RENDER, STORE, Line, Tally, converse, door_at, own_tokenizer, warm_up
from tests.engine.chat_fleet import WAIT_S, Fleet, chat_fleet
from tests.engine.chat_model import write_chat_model

pytestmark = pytest.mark.engine

REQUESTS = 54


@pytest.fixture(scope="module", params=["render", "no render"])
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder: Path = tmp_path_factory.mktemp("agents")
    model = write_chat_model(folder / "model")
    flags, router_flags = (RENDER, ()) if request.param == "render" else ((), own_tokenizer(model))
    with chat_fleet(folder, model, (*FLAGS, *flags), environment=STORE, router_flags=router_flags) as running:
        yield running


def test_what_is_predicted_for_agents_is_delivered(
    fleet: Fleet, seed: int, table: Callable[..., None], request: pytest.FixtureRequest
) -> None:
    tally = Tally("proxy")
    with door_at("proxy", fleet.router.port) as door:
        warm_up(fleet, door, WAIT_S)
        decoded = fleet.router.metric("kvrouter_encoded_bodies_total", outcome="decoded")
        converse(fleet, door, REQUESTS, seed, tally)
        # Two of three bodies are compressed; requests that retrieve or cancel a response have no body.
        assert fleet.router.metric("kvrouter_encoded_bodies_total", outcome="decoded") - decoded >= REQUESTS // 2
    lines = tally.lines()
    for line in lines:
        table(
            f"Agents through the proxy ({request.node.callspec.id})",
            tuple(name.replace("_", " ") for name in Line._fields[1:]),
            tuple(map(str, line[1:])),
        )
    assert not tally.problems, "\n".join(tally.problems[:3])
    assert set(tally.workers) == set(fleet.engines)
    by_kind = {line.kind: line for line in lines}
    assert by_kind.keys() == {"whole input", "messages", "stored", "background", "cancelled", FOLLOW_UP}
    for kind in ("whole input", "messages"):
        assert by_kind[kind].delivered_tokens > 0
