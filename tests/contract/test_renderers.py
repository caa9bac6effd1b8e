# SPDX-License-Identifier: Apache-2.0
"""Renderers, which run no model: the requests whose tokens they make, and their failures.

Real HTTP servers answer as `vllm launch render` and engines do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvrouter.router.model.workers.allow_list import AllowList
from kvrouter.router.model.workers.engine_key import EngineKey
from kvrouter.router.route.tokens.client_body import MESSAGES_PATH, RESPONSES_PATH, read_client_body
from kvrouter.router.route.tokens.engine import renderers as module
from kvrouter.router.route.tokens.prompt_tokens import Prompt
from kvrouter.router.route.tokens.unknown_prompts import COUNTED_MIN
from tests.support.token_engine import TokenEngine, tokens_of
from tests.support.tokenizer_stage import CHAT, MODEL, RENDER_CHAT, RENDER_TEXT, Case, Here, case, ids, until

RENDER_RESPONSES = "/v1/responses/render"
# An engine behind a front end that shows its tokens only by running a prompt.
NOTHING = {RENDER_CHAT: 404, RENDER_TEXT: 404, "/tokenize": 404}
HIDING: dict[str, Any] = {"statuses": {**NOTHING, "/v1/messages/render": 404, "/v1/messages/count_tokens": 404}}


def way(stage: Case, engine: int = 0) -> str:
    return stage.tokenizing.status(MODEL, stage.engines[engine].url).way


def asked_of(server: TokenEngine, text: str) -> list[str]:
    return [path for path, body in server.asked if text in str(body)]


async def verified(stage: Case) -> None:
    await until(lambda: all(stage.tokenizing.status(MODEL, engine.url).way == "render" for engine in stage.engines))
    await until(lambda: not stage.tokenizing.renderer_problems())


async def test_a_renderer_makes_the_tokens_of_an_engine_that_shows_none() -> None:
    async with case(renderers=1, **HIDING) as stage:
        await verified(stage)
        prompt = await stage.chat()
        assert (ids(prompt), prompt.source, prompt.problem) == (tokens_of(CHAT), "render", "")
        assert ids(await stage.text("Hallo")) == [1, *b"Hallo"]
        assert asked_of(stage.renderers[0], "Hallo") == [RENDER_TEXT]
        assert stage.tokenizing.health() == [] and stage.shown(stage.metrics.renderers_unusable) == 0
        # The cache is that of engines' answers.
        await stage.text("Hallo")
        assert asked_of(stage.renderers[0], "Hallo") == [RENDER_TEXT]


async def test_local_tokens_come_before_a_renderer_and_a_renderer_before_engines() -> None:
    async with case(renderers=1) as stage:
        await verified(stage)
        assert (await stage.text("first")).source == "render"
        assert asked_of(stage.renderers[0], "first") and not asked_of(stage.engines[0], "first")
    async with case(renderers=1, local=Here()) as stage:
        await until(lambda: way(stage) == "local")
        assert (await stage.text("first")).source == "local"
        assert not asked_of(stage.renderers[0], "first")


@pytest.mark.parametrize("engine", [{}, HIDING], ids=["an engine renders", "no engine shows tokens"])
async def test_a_renderer_is_used_only_for_features_in_which_it_equals_every_engine(engine: dict[str, Any]) -> None:
    async with case(engines=2, renderers=1, **engine) as stage:
        # The other engine has another template for tools, as after an upgrade.
        stage.engines[1].tokens = lambda body: tokens_of(body) + [8] * ("tools" in body)
        await until(stage.tokenizing.renderer_problems)
        problem = stage.tokenizing.renderer_problems()[0]
        assert problem[:2] == (MODEL, stage.renderers[0].url)
        assert f"other tokens of a chat with tools than the engine at {stage.engines[1].url}" in problem[2]
        assert any("chat with tools" in text for text in stage.tokenizing.health())
        assert "chat with tools" in stage.tokenizing.status(MODEL, stage.engines[1].url).problem
        await until(lambda: stage.shown(stage.metrics.renderers_unusable) == 1)
        await stage.text("plain text")
        assert asked_of(stage.renderers[0], "plain text")
        prompt = await stage.chat(tools=[{"type": "function", "function": {"name": "forecast"}}])
        assert not asked_of(stage.renderers[0], "forecast")
        assert (prompt.source, prompt.reason) == (("none", "unverified") if engine else ("render", None))


async def test_engines_that_report_lengths_alone_are_compared_by_length() -> None:
    async with case(renderers=1, tells_ids=False, **HIDING) as stage:
        assert (await stage.chat()).source == "render"
    async with case(renderers=1, tells_ids=False, **HIDING) as stage:
        stage.renderers[0].tokens = lambda body: [5, *tokens_of(body)]
        assert (await stage.chat()).reason == "unverified"


async def test_only_the_engine_reads_fields_that_its_flags_decide() -> None:
    async with case(renderers=1) as stage:
        await verified(stage)
        await stage.chat(chat_template="of-the-client")
        await stage.text("cut short", truncate_prompt_tokens=2)
        media = [{"role": "user", "content": [{"type": "image_url"}, {"type": "text", "text": "picture"}]}]
        await stage.chat(messages=media)
        assert not [text for text in ("of-the-client", "cut short", "picture") if asked_of(stage.renderers[0], text)]


async def test_messages_and_responses_need_their_own_proof() -> None:
    messages = b'{"messages": [{"role": "user", "content": "a message"}], "max_tokens": 1}'
    response = read_client_body(RESPONSES_PATH, b'{"input": "a response"}')
    async with case(renderers=1, **HIDING) as stage:
        await verified(stage)
        prompt = await stage.tokenizing.prompt(MESSAGES_PATH, MODEL, read_client_body(MESSAGES_PATH, messages))
        assert prompt.source == "none" and not asked_of(stage.renderers[0], "a message")
    async with case(renderers=1) as stage:
        await verified(stage)
        prompt = await stage.tokenizing.prompt(MESSAGES_PATH, MODEL, read_client_body(MESSAGES_PATH, messages))
        assert prompt.source == "render" and asked_of(stage.renderers[0], "a message") == ["/v1/messages/render"]
        prompt = await stage.tokenizing.prompt(RESPONSES_PATH, MODEL, response)
        assert prompt.source == "render" and asked_of(stage.renderers[0], "a response") == [RENDER_RESPONSES]


THINKS: dict[str, dict[str, Any]] = {
    "switched on": {"thinking": {"type": "adaptive"}},
    "of an earlier turn": {
        "messages": [
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "so"}, {"type": "text", "text": "yes"}]},
            {"role": "user", "content": "a message"},
        ]
    },
    "with an effort": {"output_config": {"effort": "low"}},
}


async def message(stage: Case, **changes: Any) -> Prompt:
    body = {"messages": [{"role": "user", "content": "a message"}], "max_tokens": 1} | changes
    client_body = read_client_body(MESSAGES_PATH, msgspec.json.encode(body))
    return await stage.tokenizing.prompt(MESSAGES_PATH, MODEL, client_body)


@pytest.mark.parametrize("thinking", THINKS)
async def test_thinking_which_vllm_does_not_take_keeps_no_message_from_a_renderer(thinking: str) -> None:
    async with case(renderers=1) as stage:
        await verified(stage)
        assert (await message(stage, **THINKS[thinking])).source == "render"
        assert asked_of(stage.renderers[0], "a message") == ["/v1/messages/render"]


async def test_a_renderer_stays_in_use_after_a_message_that_switches_thinking_off() -> None:
    async with case(renderers=1) as stage:
        await verified(stage)
        assert (await message(stage, thinking={"type": "disabled"})).reason == "not_looked_up"
        assert not stage.tokenizing.renderer_problems()
        assert not [
            body for server in stage.renderers + stage.engines for _, body in server.asked if "thinking" in body
        ]


async def test_media_of_a_response_are_left_to_the_engine() -> None:
    image = {"type": "input_image", "image_url": "data:,"}
    for item in (
        {"role": "user", "content": [image, {"type": "input_text", "text": "picture"}]},
        {"type": "function_call_output", "call_id": "picture", "output": [image]},
    ):
        async with case(renderers=1) as stage:
            await verified(stage)
            await stage.response(input=[item])
            assert asked_of(stage.engines[0], "picture") and not asked_of(stage.renderers[0], "picture")


async def test_a_renderer_without_an_endpoint_for_responses_stays_in_use_for_others() -> None:
    async with case(renderers=1) as stage:
        # It runs them, as an engine does.
        stage.renderers[0].statuses["/v1/responses/render"] = 404
        await verified(stage)
        assert (await stage.response(input="a response")).source == "render"
        assert not stage.tokenizing.renderer_problems() and not asked_of(stage.renderers[0], "a response")


FAILURES: dict[str, Callable[[TokenEngine], None]] = {
    "errors": lambda renderer: renderer.statuses.update({RENDER_CHAT: 500, RENDER_TEXT: 500}),
    "nonsense": lambda renderer: renderer.answers.update({RENDER_CHAT: b"{}", RENDER_TEXT: b"{}"}),
    "no such endpoint": lambda renderer: renderer.statuses.update({RENDER_CHAT: 404, RENDER_TEXT: 404}),
    "wants a key": lambda renderer: renderer.statuses.update({RENDER_CHAT: 401, RENDER_TEXT: 401}),
}


@pytest.mark.parametrize("failure", FAILURES)
async def test_engines_answer_while_a_renderer_fails_and_it_is_used_again_after_a_verification(failure: str) -> None:
    async with case(renderers=1) as stage:
        await verified(stage)
        renderer = stage.renderers[0]
        good = dict(renderer.statuses)
        FAILURES[failure](renderer)
        assert (await stage.text("meanwhile")).source == "render"
        assert asked_of(renderer, "meanwhile") and asked_of(stage.engines[0], "meanwhile")
        await until(stage.tokenizing.renderer_problems)
        # It gets no further request until it is verified.
        await stage.text("still away")
        assert not asked_of(renderer, "still away")
        (problem,) = stage.tokenizing.renderer_problems()
        assert "not used until it is verified" in problem[2]
        assert problem[2] in " ".join(stage.tokenizing.health())
        assert problem[2] in stage.tokenizing.status(MODEL, stage.engines[0].url).problem
        if failure == "wants a key":
            await until(lambda: "key=NAME" in stage.tokenizing.renderer_problems()[0][2])
        renderer.statuses, renderer.answers = good, {}
        await verified(stage)
        await stage.text("back")
        assert asked_of(renderer, "back")


async def test_a_slow_renderer_leaves_time_for_an_engine() -> None:
    async with case(renderers=1, timeout_s=2.0) as stage:
        await verified(stage)
        stage.renderers[0].slow = "slowly"
        prompt = await stage.text("slowly")
        assert prompt.source == "render" and asked_of(stage.engines[0], "slowly")
        stage.renderers[0].go_on.set()


async def test_another_renderer_answers_if_one_is_away() -> None:
    async with case(renderers=2, **HIDING) as stage:
        await verified(stage)
        await stage.renderers[0].__aexit__()
        for number in range(4):
            assert (await stage.text(f"text {number}")).source == "render"
        await stage.renderers[1].__aexit__()
        prompt = await stage.text("none is left")
        assert (prompt.source, prompt.reason, prompt.broke_engine) == ("none", "unreachable", False)
        assert "the renderer at" in prompt.problem


async def test_a_prompt_that_breaks_a_renderer_is_sent_to_no_other_and_to_no_engine() -> None:
    async with case(renderers=2) as stage:
        await verified(stage)
        for renderer in stage.renderers:
            renderer.dies_of = "poison"
        prompt = await stage.text("poison")
        assert (prompt.source, prompt.broke_engine) == ("none", True)
        assert sum(len(asked_of(server, "poison")) for server in stage.renderers + stage.engines) == 1


async def test_a_refusal_of_a_renderer_is_the_engines_to_confirm() -> None:
    async with case(renderers=1) as stage:
        await verified(stage)
        stage.renderers[0].statuses[RENDER_TEXT] = 400
        assert (await stage.text("longer than its --max-model-len")).source == "render"
    async with case(renderers=1, **HIDING) as stage:
        await verified(stage)
        stage.renderers[0].statuses[RENDER_TEXT] = 400
        prompt = await stage.text("longer than its --max-model-len")
        assert (prompt.reason, prompt.refused) == ("unverified", False)
        assert "the renderer at" in prompt.problem


async def test_a_restarted_renderer_with_another_template_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "VERIFY_EVERY_S", 0.1)
    async with case(renderers=1, **HIDING) as stage:
        await verified(stage)
        assert (await stage.chat()).source == "render"
        stage.renderers[0].tokens = lambda body: tokens_of(body) if "prompt" in body else [5, *tokens_of(body)]
        await until(stage.tokenizing.renderer_problems)
        # The tokens that it made before are forgotten.
        assert (await stage.chat()).reason == "unverified"
        assert (await stage.text("a text")).source == "render"
        stage.renderers[0].tokens = tokens_of
        await verified(stage)
        assert (await stage.chat()).source == "render"


async def test_the_pause_before_a_renderer_is_tried_again_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    monkeypatch.setattr(module, "LONGEST_RETRY_S", 0.08)
    async with case(renderers=1, **HIDING) as stage:
        stage.renderers[0].statuses[RENDER_CHAT] = 500
        await until(stage.tokenizing.renderer_problems)
        renderer = stage.tokenizing._renderers._renderers[MODEL][0]
        await until(lambda: renderer.retry_s == 0.08)
        stage.renderers[0].statuses.pop(RENDER_CHAT)
        await verified(stage)
        assert renderer.retry_s == 0.01


async def test_a_renderer_gets_only_the_key_that_its_entry_names() -> None:
    keys = EngineKey("for-engines", AllowList(["127.0.0.1"]))
    keys.take("for-engines", {"render": "for-renderers"})
    for name, sent in ((None, None), ("render", "Bearer for-renderers"), ("default", "Bearer for-engines")):
        async with case(renderers=1, key=name, engine_key=keys, **HIDING) as stage:
            await verified(stage)
            body = read_client_body("/v1/completions", b'{"prompt": "of a client"}')
            await stage.tokenizing.prompt("/v1/completions", MODEL, body, authorization="Bearer of-the-client")
            assert {headers.get("authorization") for headers in stage.renderers[0].headers} == {sent}
            assert "Bearer for-engines" in {headers.get("authorization") for headers in stage.engines[0].headers}


async def test_without_an_engine_to_compare_with_a_renderer_is_used() -> None:
    async with case(engines=0, renderers=1) as stage:
        assert (await stage.chat()).source == "render"


async def test_texts_that_had_no_tokens_count_no_longer_once_a_renderer_is_verified() -> None:
    async with case(renderers=1, **HIDING) as stage:
        stage.renderers[0].statuses.update({RENDER_CHAT: 500, RENDER_TEXT: 500})
        await asyncio.gather(*(stage.text(f"text {number}") for number in range(COUNTED_MIN)))
        assert list(stage.tokenizing.missing())
        stage.renderers[0].statuses.clear()
        await verified(stage)
        assert not list(stage.tokenizing.missing())
