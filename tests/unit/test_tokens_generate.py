# SPDX-License-Identifier: Apache-2.0
"""Prompts of the engines' own paths for token ids, and the fields beside them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvrouter.router.base.common.errors import BadQuestion
from kvrouter.router.model.kvcache.multimodal import MultimodalItem
from kvrouter.router.route.tokens.client_body import GENERATE_PATH, SGLANG_GENERATE_PATH, ClientBody, read_client_body
from kvrouter.router.route.tokens.prompt_tokens import Prompt, TokensUnknown
from kvrouter.router.route.tokens.token_request import TokenRequest, read
from kvrouter.router.route.tokens.without_cache import engines_without_cache
from kvrouter.router.serve.proxy.openai_body import openai_body

IDS = list(range(5, 60))


def body_of(path: str, **fields: Any) -> ClientBody:
    return read_client_body(path, msgspec.json.encode(fields))


def prompt(path: str, **fields: Any) -> Prompt:
    request = read(path, body_of(path, **fields))
    assert isinstance(request, Prompt)
    return request


@pytest.mark.parametrize(("path", "name"), [(GENERATE_PATH, "token_ids"), (SGLANG_GENERATE_PATH, "input_ids")])
def test_ids_are_the_prompt(path: str, name: str) -> None:
    known = prompt(path, **{name: IDS, "sampling_params": {"max_tokens": 3}})
    assert known.token_ids is not None and known.token_ids.tolist() == IDS
    assert (known.num_tokens, known.source, known.problem, known.known_tokens) == (len(IDS), "given", "", None)


@pytest.mark.parametrize(("path", "name"), [(GENERATE_PATH, "token_ids"), (SGLANG_GENERATE_PATH, "input_ids")])
@pytest.mark.parametrize("value", [None, [], "no ids", [-1], [1.5]])
def test_what_is_no_prompt_is_the_engines_error(path: str, name: str, value: Any) -> None:
    with pytest.raises(BadQuestion):
        read(path, body_of(path, **{name: value}))


@pytest.mark.parametrize("several", [{"input_ids": [IDS, [1, 2]]}, {"text": ["hello", "world"]}])
def test_several_prompts_of_sglang_go_by_load(several: dict[str, Any]) -> None:
    with pytest.raises(TokensUnknown, match="placed by load") as unknown:
        prompt(SGLANG_GENERATE_PATH, **several)
    assert unknown.value.num_prompts == 2


@pytest.mark.parametrize("text", ["hello", ["hello"]])
def test_a_text_of_sglang_is_that_of_a_completion(text: Any) -> None:
    request = read(SGLANG_GENERATE_PATH, body_of(SGLANG_GENERATE_PATH, text=text, sampling_params={"n": 2}))
    assert isinstance(request, TokenRequest)
    assert (request.kind, request.value("prompt"), set(request.fields)) == ("text", "hello", {"prompt"})


def test_the_places_of_media_are_part_of_a_prompt_of_vllm() -> None:
    features = {
        "mm_hashes": {"image": ["b", "a"]},
        "mm_placeholders": {"image": [{"offset": 9, "length": 2}, {"offset": 3, "length": 4}]},
    }
    known = prompt(GENERATE_PATH, token_ids=IDS, features=features)
    assert known.items == (MultimodalItem("a", 3, 4), MultimodalItem("b", 9, 2))
    for places in ([], [{"offset": 54, "length": 2}], [{"offset": 0, "length": 0}], "x"):
        wrong = {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": places}}
        with pytest.raises(BadQuestion, match="features cannot be read"):
            prompt(GENERATE_PATH, token_ids=IDS, features=wrong)


@pytest.mark.parametrize(
    ("path", "fields", "reason"),
    [
        (GENERATE_PATH, {"token_ids": IDS, "content_parts": [{"type": "image_url"}]}, "media"),
        *((SGLANG_GENERATE_PATH, {"input_ids": IDS, name: "x"}, "media") for name in ("image_data", "audio_data")),
        *(
            (SGLANG_GENERATE_PATH, {"input_ids": IDS, name: "x"}, "not_looked_up")
            for name in ("extra_key", "lora_path", "session_params", "input_embeds")
        ),
    ],
)
def test_blocks_that_are_not_those_of_the_ids_are_unknown(path: str, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(TokensUnknown) as unknown:
        read(path, body_of(path, **fields))
    assert unknown.value.reason == reason


@pytest.mark.parametrize(
    ("fields", "known_tokens"),
    [
        ({"return_logprob": True, "logprob_start_len": 0}, 0),
        ({"return_logprob": True, "logprob_start_len": 20}, 20),
        ({"return_logprob": [True], "logprob_start_len": [20]}, 20),
        ({"return_logprob": True, "logprob_start_len": 999}, None),
        ({"return_logprob": True, "logprob_start_len": -1}, None),
        ({"return_logprob": True}, None),
        ({"return_logprob": False, "logprob_start_len": 20}, None),
        ({"logprob_start_len": 20}, None),
    ],
)
def test_sglang_reuses_nothing_behind_the_first_wanted_logprob(
    fields: dict[str, Any], known_tokens: int | None
) -> None:
    known = prompt(SGLANG_GENERATE_PATH, input_ids=IDS, **fields)
    assert (known.num_tokens, known.known_tokens) == (len(IDS), known_tokens)
    assert known.token_ids is not None and known.token_ids.tolist() == IDS[:known_tokens]


@pytest.mark.parametrize(
    ("params", "skips"),
    [
        ({}, False),
        ({"prompt_logprobs": None}, False),
        ({"prompt_logprobs": 0}, True),
        ({"skip_reading_prefix_cache": True}, True),
        ({"skip_reading_prefix_cache": False, "prompt_logprobs": 1}, False),
        ([], False),
        (None, False),
    ],
)
def test_sampling_parameters_decide_whether_vllm_reads_its_cache(params: Any, skips: bool) -> None:
    body = body_of(GENERATE_PATH, token_ids=IDS, sampling_params=params)
    assert ("vllm" in engines_without_cache(body)) == skips
    # A chat has no such field at its top.
    assert not engines_without_cache(body_of("/v1/chat/completions", skip_reading_prefix_cache=True))


@pytest.mark.parametrize(
    ("params", "limit"),
    [({"max_tokens": 7}, 7), ({"max_new_tokens": 8}, 8), ({"max_tokens": "9"}, None), ([], None), (None, None)],
)
def test_the_length_of_an_answer_is_in_the_sampling_parameters(params: Any, limit: int | None) -> None:
    assert openai_body(body_of(GENERATE_PATH, token_ids=IDS, sampling_params=params)).limit_tokens == limit
