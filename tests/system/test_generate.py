# SPDX-License-Identifier: Apache-2.0
"""The engines' own paths through `kvrouter epp`: its proxy, and its endpoint picker behind a real Envoy.

Prompts of token ids are placed and predicted exactly; classes, pooling and speech pass.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from tests.support.envoy_process import EnvoyProcess
from tests.support.exchange import exchange
from tests.support.fleet import settle, until, wait_live
from tests.support.ports import free_port
from tests.support.replica_process import MODEL, replicas, worker_flags
from tests.support.router_process import RouterProcess

REPLICAS = 2
VLLM, SGLANG = "/inference/v1/generate", "/generate"
TURNS = 8
PREDICTED = "x-kvrouter-predicted-hit"


class Doors(NamedTuple):
    router: RouterProcess
    # The ports of the proxy and of Envoy.
    ports: dict[str, int]


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    folder, port = Path(tmp_path_factory.mktemp("generate")), free_port()
    with (
        replicas(REPLICAS, "--shape", "gemma3", "--blocks", "2500", "--instant") as endpoints,
        RouterProcess(folder / "router", ["--gateway-port", str(port), *worker_flags(endpoints)]) as router,
        EnvoyProcess(folder / "envoy", [endpoint["url"] for endpoint in endpoints], picker_port=port) as envoy,
    ):
        for number in range(REPLICAS):
            post(router.port, VLLM, asked(VLLM, [number + 1] * 100), {"x-kvrouter-worker": f"w{number}"})
        wait_live(router)
        text = {"text": "hello", "sampling_params": {"max_new_tokens": 1}}
        # The first texts come before the engines' tokens are verified.
        until(lambda: PREDICTED in post(router.port, SGLANG, text)[1], "the tokens of texts are known")
        yield Doors(router, {"proxy": router.port, "envoy": envoy.port})


def asked(path: str, ids: list[int], *, streams: bool = False) -> dict[str, Any]:
    """Return the body of a request with these ids, for vLLM's path or for SGLang's."""
    if path == SGLANG:
        return {"input_ids": ids, "sampling_params": {"max_new_tokens": 3}, "stream": streams}
    options = {"stream": True, "stream_options": {"include_usage": True}} if streams else {}
    return {"model": MODEL, "token_ids": ids, "sampling_params": {"max_tokens": 3}, **options}


def post(port: int, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[bytes, dict[str, str]]:
    answer = exchange(port, "POST", path, body, headers)
    assert answer.status == 200, (answer.status, answer.content[:500])
    return answer.content, answer.headers


def cached(path: str, content: bytes) -> int:
    """Return the tokens that the engine reports as reused, in an answer or in the last event with usage."""
    events = [line.removeprefix(b"data: ") for line in content.splitlines() if line not in (b"", b"data: [DONE]")]
    answer = json.loads(events[-1])
    if path == SGLANG:
        return int(answer["meta_info"]["cached_tokens"])
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def judged(router: RouterProcess) -> dict[str, float]:
    outcomes = {"exact": 0.0, "over": 0.0, "under": 0.0}
    for outcome in outcomes:
        for number in range(REPLICAS):
            labels = {"model": MODEL, "worker": f"w{number}", "outcome": outcome}
            outcomes[outcome] += router.metric("kvrouter_predictions_total", **labels)
    return outcomes


@pytest.mark.parametrize("door", ["proxy", "envoy"])
@pytest.mark.parametrize("path", [VLLM, SGLANG])
def test_ids_are_placed_and_predicted_exactly(doors: Doors, door: str, path: str) -> None:
    rng, reused = Random(f"{door} {path}"), 0
    chats: list[list[int]] = [[], []]
    before = judged(doors.router)
    for number in range(TURNS):
        chat = chats[number % 2]
        chat += [rng.randrange(1, 30_000) for _ in range(200)]
        settle(doors.router)
        content, headers = post(doors.ports[door], path, asked(path, list(chat), streams=number % 3 == 0))
        hit_tokens = cached(path, content)
        assert int(headers[PREDICTED]) == hit_tokens, (number, headers)
        reused += hit_tokens
    assert reused > 500
    settle(doors.router)
    after = judged(doors.router)
    assert {name: after[name] - before[name] for name in after} == {"exact": TURNS, "over": 0, "under": 0}


@pytest.mark.parametrize("door", ["proxy", "envoy"])
def test_a_text_for_sglang_is_placed_by_its_tokens(doors: Doors, door: str) -> None:
    body = {"text": f"{door} bada bede" * 200, "sampling_params": {"max_new_tokens": 2}}
    for turn in range(2):
        settle(doors.router)
        content, headers = post(doors.ports[door], SGLANG, body)
        assert int(headers[PREDICTED]) == cached(SGLANG, content)
        assert (cached(SGLANG, content) > 0) == (turn > 0)


@pytest.mark.parametrize("door", ["proxy", "envoy"])
@pytest.mark.parametrize("path", ["/pooling", "/classify", "/v1/audio/speech"])
def test_other_paths_pass_by_load(doors: Doors, door: str, path: str) -> None:
    content, headers = post(doors.ports[door], path, {"model": MODEL, "input": "hello " * 50})
    assert content.startswith(b"RIFF" if path.endswith("speech") else b"{")
    assert headers["x-kvrouter-worker"] in ("w0", "w1") and PREDICTED not in headers
    assert doors.router.request("GET", "/health")["status"] == "ok"
