# SPDX-License-Identifier: Apache-2.0
"""Data-parallel ranks that do not begin at 0: two vLLM servers of two engine cores each, with hybrid load balancing.

The second one has the ranks 2 and 3, and the router knows its address alone. Its events, metrics and list of event
sources have these numbers, but a request must name the ranks by 0 and 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engine.chat_fleet import MODEL
from tests.engine.chat_model import write_chat_model
from tests.engine.chat_server import ChatServer, started_together
from tests.support.exchange import exchange, port_of
from tests.support.fleet import settle, until, wait_live
from tests.support.ports import free_port
from tests.support.router_process import RouterProcess

pytestmark = pytest.mark.engine

COMPLETIONS = "/v1/completions"
RANKS = 4
# With a single local rank, vLLM would change to external load balancing, which it refuses for this model.
LOCAL_RANKS = 2
START_RANK = RANKS - LOCAL_RANKS
REQUESTS = 24
WAIT_S = 60.0
NAMES = [f"w0@{rank}" for rank in range(START_RANK, RANKS)]


def _node(folder: Path, model: Path, rpc_port: int, start_rank: int) -> ChatServer:
    flags = {"size": RANKS, "size-local": LOCAL_RANKS, "start-rank": start_rank, "rpc-port": rpc_port}
    arguments = [part for name, value in flags.items() for part in (f"--data-parallel-{name}", str(value))]
    return ChatServer(folder, model, [*arguments, "--data-parallel-address", "127.0.0.1"], ranks=RANKS)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatServer]:
    """Yield the server of the ranks 2 and 3. The one of rank 0 has the coordinator, which all ranks need."""
    folder = tmp_path_factory.mktemp("ranks")
    model, rpc_port = write_chat_model(folder / "model"), free_port()
    nodes = [_node(folder, model, rpc_port, rank) for rank in (0, START_RANK)]
    with started_together(nodes):
        yield nodes[1]


@pytest.fixture
def router(engine: ChatServer, tmp_path: Path) -> Iterator[RouterProcess]:
    with RouterProcess(tmp_path / "router", ["--worker", f"w0={engine.url}"]) as started:
        until(lambda: len(started.request("GET", "/workers")["workers"]) == LOCAL_RANKS, "both ranks are found", WAIT_S)
        for name in NAMES:
            ask(started, [int(name[-1]) + 10] * 300, name)
        wait_live(started)
        yield started


def ask(router: RouterProcess, prompt: list[int], worker: str = "") -> tuple[int, int, str]:
    """Return the predicted hit, the tokens that the engine reused, and the worker with its rank."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 2}
    answer = exchange(router.port, "POST", COMPLETIONS, body, {"x-kvrouter-worker": worker} if worker else {})
    assert answer.status == 200, (worker, answer.content[:500])
    hit = answer.headers.get("x-kvrouter-predicted-hit")
    return int(hit or 0), reused_of(answer.json()), answer.headers["x-kvrouter-worker"]


def reused_of(answer: Any) -> int:
    return (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0


def test_requests_reach_the_rank_that_was_chosen(router: RouterProcess, seed: int) -> None:
    assert [row["dp_rank"] for row in router.request("GET", "/workers")["workers"]] == [2, 3]
    rng = Random(seed)
    prompts = [[rng.randrange(10, 900) for _ in range(300)] for _ in range(4)]
    reused, workers = 0, set()
    for number in range(REQUESTS):
        settle(router)
        # Each prompt begins on a rank that is named; later it finds its rank by what that holds.
        pin = NAMES[number % len(NAMES)] if number < len(prompts) else ""
        predicted, delivered, worker = ask(router, prompts[number % len(prompts)], pin)
        assert predicted == delivered and worker == (pin or worker)
        assert number < len(prompts) or (delivered > 0 and worker == NAMES[number % len(NAMES)])
        reused += delivered
        workers.add(worker)
    assert reused > 0 and workers == set(NAMES)
    health = router.request("GET", "/health")
    assert health == {"status": "ok", "reasons": []}


def test_a_client_that_sends_its_requests_itself_names_the_rank_as_the_engine_does(
    router: RouterProcess, engine: ChatServer, seed: int
) -> None:
    prompt = [Random(seed + 1).randrange(10, 900) for _ in range(400)]
    for place, name in enumerate(NAMES):
        ask(router, prompt, name)
        settle(router)
        question = {"model": MODEL, "token_ids": prompt, "dp_rank": START_RANK + place}
        choice = router.request("POST", "/select", question)
        assert choice["request_rank"] == place
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 2}
        headers = {"x-data-parallel-rank": str(choice["request_rank"])}
        answer = exchange(port_of(engine.url), "POST", COMPLETIONS, body, headers)
        assert reused_of(answer.json()) == choice["overlap"]["gpu"] > 0
