# SPDX-License-Identifier: Apache-2.0
"""Lists of prompts and several answers at a real vLLM: what its report means, and that predictions come true by it."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engine.chat_fleet import MODEL, Fleet, ask, chat_fleet, until
from tests.engine.chat_model import write_chat_model
from tests.engine.test_proxy_engine import raw_post

pytestmark = pytest.mark.engine

LISTS = 60
BLOCK = 16
WORDS = ("the", "cache", "of", "an", "engine", "keeps", "what", "it", "computed", "and", "a", "router", "sends", "each")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("lists")
    with chat_fleet(folder, write_chat_model(folder / "model"), servers=1) as running:
        yield running


def ids(rng: Random, tokens: int) -> list[int]:
    return [rng.randrange(10, 200) for _ in range(tokens)]


def decision(fleet: Fleet, answer: Any) -> dict[str, Any]:
    """Return the decision about a request, with its outcome."""

    def ended() -> Any:
        kept = fleet.router.request("GET", f"/decisions/{answer.headers['x-kvrouter-selection-id']}")
        return kept if kept["outcome"] is not None else None

    kept: dict[str, Any] = until(ended, "the request has an outcome")
    return kept


def hit(fleet: Fleet, prompt: list[int]) -> int:
    answer = fleet.router.request("POST", "/query", {"model": MODEL, "token_ids": prompt})
    return int(answer["instances"]["w0"]["longest_matched"])


def assert_well(fleet: Fleet) -> None:
    assert fleet.router.request("GET", "/health") == {"status": "ok", "reasons": []}
    findings = fleet.router.request("GET", "/diagnosis")["findings"]
    assert not [finding for finding in findings if finding["code"] == "KV402"]


def test_of_lists_the_last_prompts_reuse_comes_true(fleet: Fleet) -> None:
    rng = Random(31)
    held = [ids(rng, 300) for _ in range(5)]
    for prompt in held:
        ask(fleet, prompt=prompt)
    reused = 0
    for number in range(LISTS):
        fleet.settle()
        # No two prompts of a list begin alike, because one of them might reuse what the other has just computed.
        beginnings = rng.sample(held, rng.randint(2, 4))
        prompts = [[*prompt[: rng.randint(BLOCK, 300)], *ids(rng, 12)] for prompt in beginnings]
        hits = [hit(fleet, prompt) for prompt in prompts]
        answer = ask(fleet, prompt=prompts)
        usage = answer.parse().usage
        assert usage.prompt_tokens == sum(map(len, prompts))
        assert [choice.index for choice in answer.parse().choices] == list(range(len(prompts)))
        kept = decision(fleet, answer)
        assert (kept["num_prompts"], kept["num_tokens"]) == (len(prompts), usage.prompt_tokens)
        assert kept["overlap"]["longest_matched"] == sum(hits) == int(answer.headers["x-kvrouter-predicted-hit"])
        outcome = kept["outcome"]
        delivered = usage.prompt_tokens_details.cached_tokens
        assert (outcome["predicted_tokens"], outcome["delivered_tokens"]) == (hits[-1], delivered), number
        assert delivered == hits[-1], number
        reused += delivered
    assert reused > 0
    assert_well(fleet)


def test_texts_of_a_list_have_the_engines_tokens(fleet: Fleet) -> None:
    rng = Random(32)
    for _ in range(10):
        fleet.settle()
        texts = [" ".join(rng.choice(WORDS) for _ in range(rng.randint(20, 60))) for _ in range(3)]
        kept = decision(fleet, ask(fleet, prompt=texts))
        assert kept["proof"] == "exact"
        assert kept["num_tokens"] == kept["outcome"]["prompt_tokens"]
        assert kept["outcome"]["predicted_tokens"] == kept["outcome"]["delivered_tokens"]
    assert_well(fleet)


def test_streams_and_several_answers_are_not_compared(fleet: Fleet) -> None:
    """For a stream, vLLM reports the prompt that began first; for several answers, one that may reuse another's blocks."""
    rng = Random(33)
    for _ in range(10):
        prompts = [ids(rng, 200), ids(rng, 40)]
        options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        streamed = ask(fleet, prompt=prompts, **options)
        assert list(streamed.parse())[-1].usage.prompt_tokens == 240
        several = ask(fleet, prompt=ids(rng, 200), n=3, extra_body={"temperature": 0.8})
        assert several.parse().usage.prompt_tokens == 200
        for answer in (streamed, several):
            outcome = decision(fleet, answer)["outcome"]
            assert outcome["predicted_tokens"] is None
        beams = ask(fleet, prompt=ids(rng, 100), n=2, extra_body={"use_beam_search": True})
        kept = decision(fleet, beams)
        assert (kept["answers"], kept["outcome"]["predicted_tokens"]) == (2, None)
    assert_well(fleet)


@pytest.mark.parametrize("prompt", [[], [[]], [[1, 2], []], ["a", [1]], [[1], "a"], [1, "a"], [None], [[[1]], [[2]]]])
def test_what_the_engine_makes_of_a_wrong_list_is_passed_on(fleet: Fleet, prompt: Any) -> None:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 2}
    direct, through = (
        raw_post(f"{url}/v1/completions", body)
        for url in (fleet.engines["w0"].url, f"http://127.0.0.1:{fleet.router.port}")
    )
    assert direct[0] == through[0]
    if direct[0] != 200:
        assert direct == through
    assert_well(fleet)
