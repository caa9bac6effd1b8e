# SPDX-License-Identifier: Apache-2.0
"""Lists of prompts and several answers, through `kvrouter serve` to simulated replicas, as OpenAI's client sends them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from random import Random
from typing import Any

import httpx
import pytest

from tests.support.exchange import post
from tests.support.fleet import rows, settle, until, wait_live
from tests.support.replica_process import MODEL, STOP_S, replicas, worker_flags
from tests.support.router_process import RouterProcess

BODIES = 60
# Prompts that the replicas hold before each test, and their length.
HELD = 4
HELD_TOKENS = 800
PATH = "/v1/completions"


class Stage:
    """A router over two replicas, of which each holds some prompts."""

    def __init__(self, router: RouterProcess, urls: list[str]) -> None:
        self.router = router
        self.urls = urls
        self.rng = Random(5)
        self.held = [[self.new(HELD_TOKENS) for _ in range(HELD)] for _ in urls]
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{router.port}", timeout=STOP_S)

    def new(self, tokens: int) -> list[int]:
        """Return a prompt that nobody holds."""
        return [self.rng.randrange(10, 50_000) for _ in range(tokens)]

    def fill(self) -> None:
        for number, prompts in enumerate(self.held):
            for prompt in prompts:
                self.send(prompt, {"x-kvrouter-worker": f"w{number}"})
        wait_live(self.router)
        self.rest()

    def send(self, prompt: Any, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 2} | fields
        answer = self.client.post(PATH, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer

    def decision(self, answer: httpx.Response) -> dict[str, Any]:
        """Return the decision about a request whose answer has come, with its outcome."""
        selection = answer.headers["x-kvrouter-selection-id"]

        def ended() -> Any:
            decision = self.router.request("GET", f"/decisions/{selection}")
            return decision if decision["outcome"] is not None else None

        decision: dict[str, Any] = until(ended, "the request has an outcome")
        return decision

    def hits(self, prompt: list[int]) -> dict[str, int]:
        instances = self.router.request("POST", "/query", {"model": MODEL, "token_ids": prompt})["instances"]
        return {name: instance["longest_matched"] for name, instance in instances.items()}

    def rest(self) -> None:
        """Wait until the router shows all events, and no load: a report of an engine may be of a second ago."""
        settle(self.router)
        until(lambda: not any(self.load(worker)["active_requests"] for worker in ("w0", "w1")), "no load is left")

    def load(self, worker: str) -> dict[str, Any]:
        (model,) = self.router.request("GET", "/loads")
        return next(load for load in model["loads"] if load["worker_id"] == worker)

    def metric(self, name: str, **labels: str) -> float:
        lines = self.router.text("/metrics").splitlines()
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith(f"kvrouter_{name}{{")
            and all(f'{key}="{value}"' in line for key, value in labels.items())
        )


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    # Caches that never fill, so that hits alone decide.
    with replicas(2, "--shape", "gemma3", "--blocks", "100000") as endpoints:
        urls = [str(endpoint["url"]) for endpoint in endpoints]
        with RouterProcess(tmp_path_factory.mktemp("router"), worker_flags(endpoints)) as router:
            stage = Stage(router, urls)
            with stage.client:
                stage.fill()
                yield stage


def test_every_prompt_of_a_list_decides_where_it_goes(stage: Stage) -> None:
    """No replica holds the first prompt, so it alone could go to either."""
    for worker in (0, 1) * 4:
        held = stage.rng.choice(stage.held[worker])
        prompts = [stage.new(3), [*held, *stage.new(5)]]
        hits = [stage.hits(prompt) for prompt in prompts]
        decision = stage.decision(answer := stage.send(prompts))
        assert decision["worker_id"] == f"w{worker}", decision["reason"]
        assert decision["num_prompts"] == 2
        assert decision["num_tokens"] == sum(map(len, prompts))
        expected = sum(hit[f"w{worker}"] for hit in hits)
        assert decision["overlap"]["longest_matched"] == expected > 0
        assert answer.headers["x-kvrouter-predicted-hit"] == str(expected)
        assert decision["proof"] == "exact"
        assert f"of {decision['num_tokens']} tokens of 2 prompts" in decision["reason"]
        stage.rest()


def test_a_list_is_judged_by_its_last_prompt_and_nothing_is_found_wrong(stage: Stage) -> None:
    """Usage sums prompt_tokens in vLLM, and reports the cached tokens of the last prompt; so do the replicas."""
    judged = 0
    for number in range(BODIES):
        stage.rest()
        prompts = [
            [*stage.rng.choice(stage.rng.choice(stage.held))[: stage.rng.randint(0, HELD_TOKENS)], *stage.new(20)]
            for _ in range(stage.rng.randint(2, 9))
        ]
        if len({tuple(prompt[:16]) for prompt in prompts}) < len(prompts):
            # Prompts with the same beginning may reuse what another one of the list has just computed.
            continue
        last = stage.hits(prompts[-1])
        answer = stage.send(prompts, stream=False)
        usage = answer.json()["usage"]
        assert usage["prompt_tokens"] == sum(map(len, prompts))
        assert [choice["index"] for choice in answer.json()["choices"]] == list(range(len(prompts)))
        decision = stage.decision(answer)
        outcome = decision["outcome"]
        assert outcome["predicted_tokens"] == last[decision["worker_id"]], number
        assert outcome["delivered_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
        assert outcome["predicted_tokens"] == outcome["delivered_tokens"], (number, prompts)
        judged += 1
    assert judged > BODIES / 4
    assert stage.metric("token_count_mismatches_total") == 0
    assert stage.metric("predictions_total", outcome="less") == stage.metric("predictions_total", outcome="more") == 0
    assert stage.router.request("GET", "/health") == {"status": "ok", "reasons": []}
    findings = stage.router.request("GET", "/diagnosis")["findings"]
    assert not [finding for finding in findings if finding["code"] == "KV402"]


def test_a_streamed_list_is_not_judged(stage: Stage) -> None:
    """In a stream vLLM reports the cached tokens of the prompt whose first token came first."""
    before = stage.metric("predictions_unjudged_total", reason="several")
    for _ in range(20):
        prompts = [stage.new(40), [*stage.held[0][0], *stage.new(9)], stage.new(70)]
        answer = stage.send(prompts, stream=True, stream_options={"include_usage": True})
        decision = stage.decision(answer)
        assert decision["outcome"]["predicted_tokens"] is None
        assert decision["outcome"]["prompt_tokens"] == sum(map(len, prompts))
    assert stage.metric("predictions_unjudged_total", reason="several") == before + 20
    assert stage.router.request("GET", "/health") == {"status": "ok", "reasons": []}


def test_several_answers_are_not_judged(stage: Stage) -> None:
    """An answer may reuse what another answer to the same prompt has just computed."""
    for _ in range(10):
        answer = stage.send(stage.new(300), n=4)
        assert len(answer.json()["choices"]) == 4
        assert answer.json()["usage"]["prompt_tokens"] == 300
        decision = stage.decision(answer)
        assert (decision["num_prompts"], decision["answers"]) == (1, 4)
        assert decision["outcome"]["predicted_tokens"] is None
    assert stage.metric("predictions_total", outcome="more") == 0
    assert stage.metric("token_count_mismatches_total") == 0
    assert stage.router.request("GET", "/health") == {"status": "ok", "reasons": []}


@pytest.mark.parametrize(("prompts", "answers"), [(100, 1), (1, 8), (5, 3)])
def test_the_load_has_all_prompts_and_all_answers(stage: Stage, prompts: int, answers: int) -> None:
    for url in stage.urls:
        # Nothing of the answer comes until the load has been read.
        post(url, "/sim/faults", {"stall_s": 2.0})
    body = [stage.new(200) for _ in range(prompts)]
    sent = threading.Thread(target=stage.send, args=(body if prompts > 1 else body[0],), kwargs={"n": answers})
    sent.start()

    def loaded() -> Any:
        loads = [stage.load(worker) for worker in ("w0", "w1")]
        return next((load for load in loads if load["active_requests"]), None)

    load = until(loaded, "the request is counted")
    assert load["active_requests"] == prompts * answers
    assert load["potential_prefill_tokens"] == 200 * prompts
    # One token of an answer of two tokens is held on average.
    assert load["decode_tokens"] == answers * prompts * (200 + 1)
    sent.join()
    until(lambda: not loaded(), "the load ends with the answer")


@pytest.mark.parametrize(
    "prompt",
    [[], [[]], [[1, 2], []], ["a", [1]], [[1], "a"], [1, "a"], ["a", 1], [None], [[1], None], [[[1]], [[2]]], [[1.5], [2]],
     [{"prompt": "a"}], [[-1], [2]], [["a"], ["b"]], {"a": [1]}, True],
)  # fmt: skip
def test_wrong_lists_are_the_engines_to_refuse(stage: Stage, prompt: Any) -> None:
    answer = stage.client.post(PATH, json={"model": MODEL, "prompt": prompt, "max_tokens": 2})
    direct = httpx.post(f"{stage.urls[0]}{PATH}", json={"model": MODEL, "prompt": prompt, "max_tokens": 2})
    assert answer.status_code == direct.status_code == 400
    assert answer.content == direct.content
    assert "x-kvrouter-worker" in answer.headers
    assert stage.router.request("GET", "/health") == {"status": "ok", "reasons": []}


def test_select_takes_a_list_of_prompts(stage: Stage) -> None:
    stage.rest()
    prompts = [stage.new(30), [*stage.held[1][0], 7], [*stage.held[1][1], 8]]
    hits = [stage.hits(prompt)["w1"] for prompt in prompts]
    body = {"model": MODEL, "prompt": prompts, "n": 2, "explain": True}
    chosen = stage.router.request("POST", "/select_and_reserve", body)
    assert (chosen["worker_id"], chosen["num_prompts"]) == ("w1", 3)
    assert chosen["isl_tokens"] == sum(map(len, prompts))
    assert chosen["overlap"]["longest_matched"] == sum(hits)
    assert chosen["tokens"] == {
        "source": "given",
        "num_tokens": chosen["isl_tokens"],
        "known_tokens": chosen["isl_tokens"],
        "problem": "",
    }
    assert stage.load("w1")["active_requests"] == 6
    stage.router.request("DELETE", f"/reservations/{chosen['selection_id']}")
    assert stage.load("w1")["active_requests"] == 0


def test_texts_of_a_list_are_tokenized_each(stage: Stage) -> None:
    words = [f"word{number} " * 60 for number in range(3)]
    stage.send(words[1], {"x-kvrouter-worker": "w1"})
    stage.rest()
    decision = stage.decision(stage.send(words))
    assert (decision["num_prompts"], decision["worker_id"], decision["proof"]) == (3, "w1", "exact")
    assert decision["outcome"]["prompt_tokens"] == decision["num_tokens"]
    assert decision["overlap"]["longest_matched"] > 0


def test_a_list_of_a_hundred_prompts_is_looked_up_in_part(stage: Stage) -> None:
    stage.rest()
    prompts = [stage.new(50) for _ in range(99)] + [[*stage.held[1][2], 7]]
    decision = stage.decision(stage.send(prompts))
    assert (decision["num_prompts"], decision["proof"]) == (100, "assumed")
    assert decision["num_tokens"] == decision["outcome"]["prompt_tokens"] == sum(map(len, prompts))
    # The last prompt is always looked up.
    assert decision["worker_id"] == "w1", decision["reason"]
    assert decision["outcome"]["predicted_tokens"] == decision["outcome"]["delivered_tokens"] > 0


def test_rows_show_what_lists_reused(stage: Stage) -> None:
    before = rows(stage.router)["w0"]["reuse"]
    stage.decision(stage.send([stage.new(30), [*stage.held[0][0], *stage.new(4)]]))
    after = rows(stage.router)["w0"]["reuse"]
    # The last prompt of a list is judged.
    assert after["prompt_tokens"] - before["prompt_tokens"] == HELD_TOKENS + 4
    assert json.dumps(after)
