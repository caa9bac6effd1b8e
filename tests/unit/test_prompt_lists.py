# SPDX-License-Identifier: Apache-2.0
"""Lists of prompts and several answers: what is read of a body, the questions made of it, and their load."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.router.base.common.errors import BadQuestion
from kvrouter.router.index.matching.question import Question
from kvrouter.router.model.engines.known import ENGINES
from kvrouter.router.route.placement.placement_request import MAX_ANSWERS, PlacementRequest
from kvrouter.router.route.placement.reservations import USUAL_OUTPUT_TOKENS
from kvrouter.router.route.tokens.client_body import EMBEDDINGS_PATH, TEXT_PATH, read_client_body
from kvrouter.router.route.tokens.prompt_list import (
    MAX_BYTES_LOOKED_UP,
    MAX_PROMPTS_LOOKED_UP,
    SPLIT_PROMPTS,
    PromptList,
    prompts_of,
)
from kvrouter.router.route.tokens.prompt_tokens import Prompt, TokensUnknown
from kvrouter.router.route.tokens.token_request import ListRequest, TokenRequest, read
from kvrouter.router.route.tokens.tokenizer import given_list
from kvrouter.router.serve.proxy.openai_body import openai_body
from tests.support.placing_stage import Stage, hit
from tests.support.tokenizer_stage import MODEL, Here, case

IDS = st.lists(st.integers(0, 50_000), min_size=1, max_size=20)


def body(prompt: Any, path: str = TEXT_PATH, **fields: Any) -> Any:
    name = "input" if path == EMBEDDINGS_PATH else "prompt"
    return read(path, read_client_body(path, json.dumps({"model": "m", name: prompt} | fields).encode()))


@given(st.lists(IDS, min_size=2, max_size=100))
def test_ids_of_lists_are_read_and_counted_as_they_are(prompts: list[list[int]]) -> None:
    read_list = body(prompts)
    assert isinstance(read_list, ListRequest)
    prompt = given_list(read_list)
    assert (prompt.num_prompts, prompt.num_tokens) == (len(prompts), sum(map(len, prompts)))
    looked_up = (
        prompts if len(prompts) <= MAX_PROMPTS_LOOKED_UP else [*prompts[: MAX_PROMPTS_LOOKED_UP - 1], prompts[-1]]
    )
    assert [[] if part.token_ids is None else part.token_ids.tolist() for part in prompt.parts] == looked_up
    question = prompt.question("m", cache_salt="s", lora_name="l", worker_ids=frozenset({"w0"}))
    assert {(part.model, part.cache_salt, part.lora_name) for part in question.parts} == {("m", "s", "l")}
    assert question.worker_ids == frozenset({"w0"})
    assert question.is_counted and not question.is_blind
    assert question.is_whole == (len(prompts) <= MAX_PROMPTS_LOOKED_UP)
    assert question.known_tokens == sum(map(len, looked_up))


@pytest.mark.parametrize(
    "prompt", ["a", ["a"], [1, 2], [[1, 2]], ['x = "a"\n' * SPLIT_PROMPTS * 2], ["\\" * SPLIT_PROMPTS * 4]]
)
def test_one_prompt_is_one_prompt_however_it_is_wrapped(prompt: Any) -> None:
    assert isinstance(body(prompt), TokenRequest | np.ndarray)


def test_quotes_within_texts_are_no_further_prompts() -> None:
    read_list = body(['say "hi"' * SPLIT_PROMPTS, "b"])
    assert isinstance(read_list, ListRequest)
    assert (read_list.whole.num_prompts, len(read_list.prompts)) == (2, 2)


@pytest.mark.parametrize("prompt", [[1, 2, 3], [[1, 2, 3], [4, 5]], [[1]], "a", ["a", "b"]])
def test_inputs_that_the_engine_cuts_are_not_looked_up(prompt: Any) -> None:
    with pytest.raises(TokensUnknown, match="not looked up"):
        body(prompt, EMBEDDINGS_PATH, truncate_prompt_tokens=2)


@pytest.mark.parametrize(
    "prompt", [[], [[]], [[1], []], ["a", None], [[1], None], [1, "a"], [[[1]], [[2]]], [["a"], ["b"]], [None], {"a": 1}, 5]
)  # fmt: skip
def test_wrong_lists_are_bad_questions(prompt: Any) -> None:
    with pytest.raises(BadQuestion):
        body(prompt)


def test_texts_and_ids_may_be_mixed_because_the_engine_refuses_them() -> None:
    read_list = body(["a", [1, 2]])
    assert [type(prompt) for prompt in read_list.prompts] == [TokenRequest, np.ndarray]


def test_each_text_of_a_list_has_the_fields_of_the_body() -> None:
    read_list = body(["a", "b"], add_special_tokens=False, temperature=0)
    assert [prompt.value("prompt") for prompt in read_list.prompts] == ["a", "b"]
    assert [prompt.value("add_special_tokens") for prompt in read_list.prompts] == [False, False]
    assert not read_list.prompts[0].has("temperature")


def test_prompts_that_are_cut_are_left_to_the_engine() -> None:
    read_list = body([[1, 2], [3]], truncate_prompt_tokens=1)
    assert [prompt.value("prompt") for prompt in read_list.prompts] == [[1, 2], [3]]


def test_long_prompts_of_a_list_are_looked_up_within_bounds() -> None:
    item = b"[" + b",".join([b"12345"] * (MAX_BYTES_LOOKED_UP // 6 // 4)) + b"]"
    prompts = prompts_of(msgspec.Raw(b"[" + b",".join([item] * 20) + b"]"))
    assert isinstance(prompts, PromptList)
    # Four prompts fit into the bound, and the last one is always added.
    assert (prompts.num_prompts, len(prompts.prompts)) == (20, 5)
    assert prompts.num_tokens == 20 * (MAX_BYTES_LOOKED_UP // 6 // 4) and prompts.counted


@pytest.mark.parametrize(("item", "per_prompt"), [(b"[1,2]", 2), (b'"a"', 1)])
def test_a_list_of_very_many_prompts_is_not_split(item: bytes, per_prompt: int) -> None:
    raw = b'{"prompt": [' + b",".join([item] * (SPLIT_PROMPTS + 1)) + b"]}"
    read_list = read(TEXT_PATH, read_client_body(TEXT_PATH, raw))
    assert isinstance(read_list, ListRequest)
    prompt = given_list(read_list)
    assert (prompt.num_prompts, prompt.parts, prompt.reason) == (SPLIT_PROMPTS + 1, (), "not_looked_up")
    assert prompt.num_tokens >= per_prompt * SPLIT_PROMPTS
    question = prompt.question("m")
    assert question.is_blind and not question.is_counted and question.num_prompts == SPLIT_PROMPTS + 1


def test_inputs_of_embeddings_are_prompts_if_they_are_ids() -> None:
    read_list = body([[1, 2], [3]], EMBEDDINGS_PATH)
    assert given_list(read_list).num_tokens == 3
    with pytest.raises(TokensUnknown) as unknown:
        body(["a", "b", "c"], EMBEDDINGS_PATH)
    assert (unknown.value.reason, unknown.value.num_prompts) == ("not_looked_up", 3)
    with pytest.raises(TokensUnknown) as unknown:
        body("a", EMBEDDINGS_PATH)
    assert unknown.value.num_prompts == 1


def test_pairs_are_placed_by_load_as_one_request() -> None:
    raw = json.dumps({"text_1": "a", "text_2": ["b", "c"]}).encode()
    with pytest.raises(TokensUnknown) as unknown:
        read("/v1/score", read_client_body("/v1/score", raw))
    assert (unknown.value.reason, unknown.value.num_prompts) == ("not_looked_up", 1)


@pytest.mark.parametrize("local", [None, Here()])
async def test_texts_of_a_list_are_tokenized_each(local: Any) -> None:
    async with case(local=local) as stage:
        texts = ["one", "two words", "three words more"]
        alone = [await stage.text(text) for text in texts]
        prompt = await stage.text(texts)
        assert [part.token_ids.tolist() for part in prompt.parts] == [part.token_ids.tolist() for part in alone]  # type: ignore[union-attr]
        assert prompt.num_tokens == sum(part.num_tokens for part in alone)
        assert (prompt.token_ids, prompt.num_prompts, prompt.reason) == (None, 3, None)
        assert prompt.question("m").is_whole


@pytest.mark.parametrize(("workers", "looked_up"), [(1, 64), (64, 64), (65, 63), (256, 16), (4_096, 1), (100_000, 1)])
@pytest.mark.parametrize("path", [TEXT_PATH, EMBEDDINGS_PATH])
async def test_fewer_prompts_are_looked_up_among_more_workers(workers: int, looked_up: int, path: str) -> None:
    async with case() as stage:
        stage.workers = workers
        prompts = [[number, 1] for number in range(MAX_PROMPTS_LOOKED_UP)]
        raw = json.dumps({"prompt": prompts, "input": prompts}).encode()
        prompt = await stage.tokenizing.prompt(path, MODEL, read_client_body(path, raw))
        firsts = [part.token_ids[0] for part in prompt.parts]  # type: ignore[index]
        assert firsts == [*range(looked_up - 1), MAX_PROMPTS_LOOKED_UP - 1]
        # The load has all prompts, and the list is a prediction only if all were looked up.
        assert (prompt.num_tokens, prompt.num_prompts) == (2 * MAX_PROMPTS_LOOKED_UP, MAX_PROMPTS_LOOKED_UP)
        question = prompt.question(MODEL)
        assert question.is_counted and question.is_whole == (looked_up == MAX_PROMPTS_LOOKED_UP)


async def test_texts_beyond_the_bound_are_not_tokenized() -> None:
    async with case(local=Here()) as stage:
        stage.workers = 2_048
        prompt = await stage.text(["one", "two", "three", "four"])
        assert (len(prompt.parts), prompt.num_prompts) == (2, 4)
        assert not prompt.question(MODEL).is_counted


async def test_a_text_whose_tokens_are_not_found_leaves_the_others_known() -> None:
    async with case(local=Here()) as stage:

        async def found(model: str, request: TokenRequest, *_: Any, **__: Any) -> Any:
            if request.value("prompt") == "slow":
                raise TokensUnknown("timeout", "too late")
            await asyncio.sleep(0)
            return np.arange(5), "local", ()

        stage.tokenizing._found = found  # type: ignore[method-assign]
        prompt = await stage.text(["one", "slow", "two"])
        assert prompt.reason == "timeout"
        question = prompt.question("m")
        assert [part.is_blind for part in question.parts] == [False, True, False]
        assert not question.is_blind and not question.is_whole and not question.is_counted
        assert question.known_tokens == 10


def listed(*lengths: int, **fields: Any) -> PlacementRequest:
    rng = np.random.default_rng(1)
    parts = tuple(Prompt(length, rng.integers(0, 50_000, length), "given") for length in lengths)
    whole = Prompt(sum(lengths), None, "given", num_prompts=len(lengths), parts=parts, others_counted=True)
    return PlacementRequest(whole.question("m"), **fields)


@pytest.mark.parametrize("answers", [1, 3])
@pytest.mark.parametrize("max_tokens", [10, None])
def test_the_load_of_a_list_is_that_of_all_prompts_and_answers(answers: int, max_tokens: int | None) -> None:
    stage = Stage(hit("a"))
    placement = stage.placer.reserve(listed(100, 200, 300, answers=answers, max_tokens=max_tokens))
    half = (USUAL_OUTPUT_TOKENS if max_tokens is None else max_tokens) // 2
    assert stage.load("a") == (600, answers * (600 + 3 * half), 3 * answers)
    placement.first_token()
    # It is the first token of one prompt.
    assert stage.load("a")[0] == 600
    placement.done(30)
    assert stage.load("a") == (0, 0, 0)


def test_several_answers_to_one_prompt_end_its_prefill_with_the_first_token() -> None:
    stage = Stage(hit("a"))
    question = Question("m", 100, token_ids=np.arange(100))
    placement = stage.placer.reserve(PlacementRequest(question, answers=4, max_tokens=2))
    assert stage.load("a") == (100, 4 * 101, 4)
    placement.first_token()
    assert stage.load("a") == (0, 4 * 101, 4)
    placement.done(8)
    assert stage.load("a") == (0, 0, 0)


def test_a_claimed_selection_of_a_list_has_its_whole_load() -> None:
    stage = Stage(hit("a"))
    stage.placer.choose(listed(100, 200, answers=2, max_tokens=2), "mine")
    assert stage.load("a") == (0, 0, 0)
    placement = stage.placer.claim("mine", "m")
    assert stage.load("a") == (300, 2 * (300 + 2), 4)
    placement.done()


def test_lists_with_a_common_beginning_stay_together_while_they_are_computed() -> None:
    stage = Stage(hit("a"), hit("b"))
    first = listed(1_024, 1_024, 1_024)
    placement = stage.placer.reserve(first)
    choice = stage.placer.choose(msgspec.structs.replace(first, dry_run=True, keeps_comparison=True))
    assert choice.hit.worker == placement.worker
    assert choice.comparison is not None
    assert choice.comparison.pending[placement.worker] == 3 * 1_023
    placement.done()


@pytest.mark.parametrize(
    ("fields", "answers"),
    [
        ({}, 1),
        ({"n": 8}, 8),
        ({"n": None}, 1),
        ({"best_of": 4}, 4),
        ({"n": 2, "best_of": 4}, 4),
        ({"n": 3, "use_beam_search": True}, 3),
        ({"n": "8"}, 1),
        ({"n": True}, 1),
        ({"n": -1}, 1),
        ({"n": 0}, 1),
        ({"n": 2.5}, 1),
        ({"n": MAX_ANSWERS + 1}, 1),
        ({"n": [1]}, 1),
    ],
)
def test_answers_are_those_that_an_engine_would_generate(fields: dict[str, Any], answers: int) -> None:
    raw = json.dumps({"model": "m", "prompt": "a"} | fields).encode()
    assert openai_body(read_client_body(TEXT_PATH, raw)).answers == answers


def test_each_engine_says_what_its_report_of_a_list_means() -> None:
    assert {name: engine.sums_cached_tokens for name, engine in ENGINES.items()} == {"vllm": False, "sglang": True}
