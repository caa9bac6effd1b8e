# SPDX-License-Identifier: Apache-2.0
"""The tokens of a client's request that are known: texts, ids, pictures, and requests without tokens.

Requests go over real HTTP.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from kvrouter.router.base.common.errors import BadQuestion
from kvrouter.router.route.tokens.client_body import CHAT_PATH, RESPONSES_PATH, TEXT_PATH, read_client_body
from tests.support.token_engine import tokens_of
from tests.support.tokenizer_stage import CHAT, MODEL, RENDER_CHAT, Here, case, ids


async def test_an_engine_that_wants_a_key_gets_the_clients() -> None:
    async with case() as stage:
        await stage.tokenizing.prompt(
            CHAT_PATH, MODEL, read_client_body(CHAT_PATH, msgspec.json.encode(CHAT)), authorization="Bearer k"
        )
        assert stage.engines[0].headers[-1]["authorization"] == "Bearer k"


async def test_images_are_known_up_to_the_first() -> None:
    before = [{"role": "system", "content": "long ago " * 9}, {"role": "user", "content": "look:"}]
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}
    async with case() as stage:
        prompt = await stage.chat(messages=[*before, picture, {"role": "user", "content": "what?"}])
        whole = tokens_of({"messages": before, "continue_final_message": True})
        known_ids = ids(prompt)
        assert known_ids is not None and prompt.known_tokens == len(known_ids)
        assert (prompt.reason, prompt.source) == ("media", "render")
        # The role of the next message is known too, except for one token.
        assert known_ids == [*whole, *b"user"]
        assert prompt.num_tokens > len(known_ids)


async def test_an_engine_that_returns_its_items_makes_all_tokens_known() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:,x"}}
    picture = {"role": "user", "content": [part, {"type": "text", "text": "what?"}]}
    async with case() as stage:
        engine = stage.engines[0]
        engine.tokens = lambda body: [5] * 40 if "image_url" in str(body) else tokens_of(body)
        engine.features = {
            "mm_hashes": {"image": ["b", "a"]},
            "mm_placeholders": {"image": [{"offset": 30, "length": 2}, {"offset": 4, "length": 20}]},
        }
        for requests in (1, 1):
            prompt = await stage.chat(messages=[picture])
            assert (ids(prompt), prompt.reason, prompt.source) == ([5] * 40, None, "render")
            assert prompt.known_tokens is None and prompt.num_tokens == 40
            assert prompt.items == prompt.question(MODEL).items == (("a", 4, 20), ("b", 30, 2))
            bodies = [body for path, body in engine.asked if path == RENDER_CHAT and "image_url" in str(body)]
            # The second answer comes from memory, and the engine does not send the pictures back.
            assert len(bodies) == requests and bodies[0]["mm_payload"] == "none"
        tools = {"mm_hashes": {"image": ["c"]}, "mm_placeholders": {"image": [{"offset": 39, "length": 2}]}}
        for wrong in (None, {}, {"mm_hashes": {"image": ["c"]}, "mm_placeholders": {"audio": []}}, tools):
            engine.features = wrong
            prompt = await stage.chat(messages=[picture, {"role": "user", "content": repr(wrong)}])
            assert (prompt.reason, prompt.items) == ("media", ())


@pytest.mark.slow
async def test_an_engine_slow_with_pictures_leaves_time_for_the_text_before_them() -> None:
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}
    async with case() as stage:
        stage.engines[0].slow = "image_url"
        stage.engines[0].features = {
            "mm_hashes": {"image": ["a"]},
            "mm_placeholders": {"image": [{"offset": 0, "length": 1}]},
        }
        chat = [{"role": "system", "content": "long ago"}, picture]
        prompt = await stage.chat(messages=chat)
        assert prompt.reason == "media" and ids(prompt)
        stage.engines[0].go_on.set()
        # Items that came too late are known the next time.
        while not (prompt := await stage.chat(messages=chat)).items:
            await asyncio.sleep(0.01)
        assert prompt.reason is None


async def test_a_picture_is_not_counted_by_its_bytes_nor_its_stand_in_held_against_the_client() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:," + "x" * 500_000}}
    body = [{"role": "user", "content": [part, {"type": "text", "text": "what?"}]}]
    async with case() as stage:
        assert (await stage.chat(messages=body)).num_tokens < 5_000
        stage.engines[0].statuses = {RENDER_CHAT: 400}
        prompt = await stage.chat(messages=[{"role": "system", "content": "a"}, *body])
        assert (prompt.reason, prompt.refused, prompt.source) == ("media", False, "none")
        assert prompt.num_tokens < 5_000


async def test_responses_are_always_rendered() -> None:
    async with case(local=Here()) as stage:
        stage.engines[0].tokens = lambda body: [6] if "input" in body else tokens_of(body)
        prompt = await stage.tokenizing.prompt(
            RESPONSES_PATH, MODEL, read_client_body(RESPONSES_PATH, b'{"input":"Hi"}')
        )
        assert (ids(prompt), prompt.source) == ([6], "render")


async def test_ids_of_the_client_are_used_unchanged() -> None:
    async with case() as stage:
        assert ids(await stage.text([3, 4, 5])) == [3, 4, 5]
        for prompts, tokens in (([[3, 4], [5]], [[3, 4], [5]]), (["a", "b"], [[1, *b"a"], [1, *b"b"]])):
            assert [ids(part) for part in (await stage.text(prompts)).parts] == tokens
        prompt = await stage.chat(kv_transfer_params={"prompt_token_ids": [8, 9]})
        assert (ids(prompt), prompt.source) == ([8, 9], "given")
        assert stage.asked(RENDER_CHAT, "/tokenize") == 3  # probes


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        (TEXT_PATH, {"prompt": "a", "prompt_embeds": "AAAA"}, "embeds"),
        ("/v1/responses", {"input": "a", "previous_response_id": "r"}, "not_looked_up"),
        ("/v1/embeddings", {"input": "a"}, "not_looked_up"),
        (TEXT_PATH, {"prompt": [1, 2], "lora_path": "style"}, "not_looked_up"),
        (TEXT_PATH, {"prompt": "a", "extra_key": "x"}, "not_looked_up"),
        (CHAT_PATH, {"messages": [{"role": "user", "content": "a"}], "lora_path": "style"}, "not_looked_up"),
        ("/v1/audio/speech", {"input": "a"}, "not_looked_up"),
    ],
)
async def test_a_request_without_tokens_says_why(path: str, body: dict[str, Any], reason: str) -> None:
    async with case() as stage:
        prompt = await stage.tokenizing.prompt(path, MODEL, read_client_body(path, msgspec.json.encode(body)))
        assert (prompt.source, prompt.reason, prompt.token_ids) == ("none", reason, None)
        assert prompt.problem and stage.counted(reason) == 1


@pytest.mark.parametrize(
    ("path", "raw"),
    [
        (CHAT_PATH, b"x"),
        (CHAT_PATH, b"[]"),
        (CHAT_PATH, b"{}"),
        (CHAT_PATH, b'{"messages": []}'),
        (CHAT_PATH, b'{"messages": ["a"]}'),
        (CHAT_PATH, b'{"messages": {"role": "user"}}'),
        (TEXT_PATH, b"{}"),
        (TEXT_PATH, b'{"prompt": null}'),
        (TEXT_PATH, b'{"prompt": []}'),
        (TEXT_PATH, b'{"prompt": 3}'),
        (TEXT_PATH, b'{"prompt": [[["a"]]]}'),
        (TEXT_PATH, b'{"prompt": [-3]}'),
    ],
)
async def test_a_body_that_cannot_be_read_is_the_clients_fault(path: str, raw: bytes) -> None:
    async with case() as stage:
        with pytest.raises(BadQuestion):
            await stage.tokenizing.prompt(path, MODEL, read_client_body(path, raw))


async def test_long_bodies_do_not_hold_the_loop_and_are_the_same() -> None:
    async with case(local=Here()) as stage:
        long = "word " * 40_000
        prompt = await stage.chat(messages=[{"role": "user", "content": long}])
        assert ids(prompt) == tokens_of({"messages": [{"role": "user", "content": long}]})
