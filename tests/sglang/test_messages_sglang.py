# SPDX-License-Identifier: Apache-2.0
"""A message of Anthropic's API becomes the prompt that SGLang makes of it: SGLang's own code compared with ours.

SGLang converts the message and writes the prompt. Ours is the prompt that SGLang's /tokenize makes of our chat, and the
prompt of the tokenizer in the router.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest

pytest.importorskip("sglang")

from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
from sglang.srt.entrypoints.openai import serving_chat
from sglang.srt.entrypoints.openai.protocol import TokenizeRequest
from sglang.srt.entrypoints.openai.serving_tokenize import OpenAIServingTokenize
from sglang.srt.parser.jinja_template_utils import detect_jinja_template_content_format
from transformers import AutoTokenizer

from kvrouter.router.model.engines.sglang.description import SGLANG
from kvrouter.router.route.tokens.client_body import MESSAGES_PATH, read_client_body
from kvrouter.router.route.tokens.engine.wire import RenderQuirks, tokenize_body
from kvrouter.router.route.tokens.local.local_tokenizer import LocalTokenizer
from kvrouter.router.route.tokens.prompt_tokens import TokensUnknown
from kvrouter.router.route.tokens.thinking import DROPPED, NO_SWITCH, ThinkingHistory, ThinkingSwitch
from kvrouter.router.route.tokens.token_request import TokenRequest, read
from tests.support.anthropic_bodies import BILLING, block, blocks, message, text
from tests.support.tiny_tokenizer import CHAT_TEMPLATE, write_tokenizer

# SGLang warns of its own field `max_tokens`.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

# For each case; more than 3,000 prompts are compared in all.
BODIES = 1_300

# A template that reads contents as texts and gives a message's fields as they are.
PLAIN_TEMPLATE = """\
{%- if tools %}{{ tools | tojson }}{%- endif %}{{ reasoning_effort }}{{ thinking }}{{ enable_thinking }}
{%- for message in messages %}{{ '<|im_start|>' + (message | tojson) + '<|im_end|>' }}{%- endfor %}"""
# A template that accepts no later system message.
STRICT_TEMPLATE = (
    "{%- for message in messages %}{%- if message.role == 'system' and not loop.first %}"
    "{{- raise_exception('system') }}{%- endif %}{%- endfor %}" + CHAT_TEMPLATE
)
QWEN = (ThinkingHistory(("<think>", "\n</think>")), ThinkingSwitch(("enable_thinking",)))
# The template, SGLang's reasoning parser, and the forms that the router then gives to thinking.
CASES = {
    "no parser": (CHAT_TEMPLATE, None, (DROPPED, NO_SWITCH)),
    "qwen3": (CHAT_TEMPLATE, "qwen3", QWEN),
    "system in front": (STRICT_TEMPLATE, "qwen3", QWEN),
    "mistral": (
        PLAIN_TEMPLATE,
        "mistral",
        (ThinkingHistory(("[THINK]", "\n[/THINK]")), ThinkingSwitch(("reasoning_effort",), "medium", "none")),
    ),
}


class Sides:
    """SGLang's own code, and ours with the quirks of this engine."""

    def __init__(self, folder: Path, template: str, parser: str | None, thinking: Any) -> None:
        write_tokenizer(folder, template)
        content_format = detect_jinja_template_content_format(template)
        config = SimpleNamespace(model_type="llama", architectures=["LlamaForCausalLM"])
        model = SimpleNamespace(hf_config=config, get_default_sampling_params=dict, is_multimodal=False)
        manager = SimpleNamespace(
            tokenizer=AutoTokenizer.from_pretrained(folder),
            config_value={"reasoning_parser": parser}.get,
            model_config=model,
            model_path=str(folder),
            server_args=None,
        )
        templates = SimpleNamespace(
            chat_template_name=None,
            python_chat_template=None,
            jinja_template_content_format=content_format,
            jinja_template_may_reorder_tool_results=False,
            reasoning_config=None,
        )
        self._tokenize = OpenAIServingTokenize(manager, templates)
        self._chat = self._tokenize.chat_serving
        assert self._chat is not None
        self._anthropic = AnthropicServing(self._chat)
        history, switch = thinking
        self.quirks = RenderQuirks(
            keeps_unused_tools=False,
            content_parts=content_format == "openai",
            merges_system=template is STRICT_TEMPLATE,
            history=history,
            switch=switch,
            reading=SGLANG.tokens.reading,
        )
        self._local = LocalTokenizer(folder, datetime.now)

    def engines(self, body: dict[str, Any]) -> list[int]:
        request = AnthropicMessagesRequest(**json.loads(json.dumps({"model": "m"} | body)))
        chat = self._anthropic._convert_to_chat_completion_request(request)
        return list(self._chat._process_messages(chat, False).prompt_ids)

    def tokenized(self, request: TokenRequest) -> list[int]:
        sent_body = tokenize_body(request, self.quirks, SGLANG.tokens)
        return list(self._tokenize._tokenize_chat_request(TokenizeRequest(**json.loads(sent_body))))

    def local(self, request: TokenRequest) -> list[int]:
        ids: list[int] = self._local.ids(request, self.quirks).tolist()
        return ids


@pytest.fixture(scope="module", params=CASES)
def sides(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    with (
        mock.patch.object(serving_chat, "get_serving", lambda: SimpleNamespace(default_chat_template_kwargs=None)),
        mock.patch.object(serving_chat, "get_model", lambda: SimpleNamespace(context_length=None)),
    ):
        yield Sides(tmp_path_factory.mktemp("model"), *CASES[request.param])


def body_of(rng: random.Random) -> dict[str, Any]:
    """Return the body of a request with what SGLang reads in its own way."""
    body = message(rng)
    turns = body["messages"]
    body.pop("thinking", None)
    enabled = {"type": "enabled", "budget_tokens": 1024}
    if thinking := rng.choice([None, None, {"type": "disabled"}, {"type": "adaptive"}, enabled]):
        body["thinking"] = thinking
    if rng.random() < 0.2:
        body["output_config"] = {"effort": rng.choice(["low", "high", "xhigh", "max"])}
    if rng.random() < 0.1:
        body["system"] = rng.choice([" \n", [], [{"type": "text", "text": BILLING + text(rng)}], [block(rng)]])
    for tool in body.get("tools", ()):
        tool |= rng.choice([{}, {}, {}, {"strict": rng.random() < 0.5}, {"type": "custom"}])
    if "tools" in body and rng.random() < 0.3:
        body["tools"].append({"type": "web_search_20250305", "name": "web_search"})
        body["tool_choice"] = rng.choice([{"type": "any"}, {"type": "tool", "name": "weather"}, {"type": "none"}])
    for turn in turns:
        content = turn["content"]
        if isinstance(content, list) and turn["role"] == "user" and rng.random() < 0.3:
            # A text before a tool's result.
            content.insert(0, block(rng))
        elif isinstance(content, list) and turn["role"] == "system":
            turn["content"] = rng.choice([content, [block(rng)], []])
        elif isinstance(content, list) and turn["role"] == "assistant" and rng.random() < 0.1:
            turn["content"] = rng.choice([[], [block(rng)], [{"type": "thinking", "thinking": "", "signature": ""}]])
    if rng.random() < 0.1:
        turns.append({"role": "assistant", "content": rng.choice([text(rng), blocks(rng)])})
    return body


def request_for(body: dict[str, Any]) -> TokenRequest:
    request = read(MESSAGES_PATH, read_client_body(MESSAGES_PATH, msgspec.json.encode({"model": "m"} | body)))
    assert isinstance(request, TokenRequest)
    return request


def test_the_prompt_is_the_engines(sides: Sides, seed: int) -> None:
    rng = random.Random(seed)
    compared = refused = left = local = 0
    for _ in range(BODIES):
        body = body_of(rng)
        try:
            truth = sides.engines(body)
        except ValueError:
            # SGLang refuses redacted thinking, and a tool choice without tools.
            refused += 1
            continue
        request = request_for(body)
        try:
            tokenized = sides.tokenized(request)
        except TokensUnknown:
            left += 1
            continue
        assert tokenized == truth, (seed, body)
        compared += 1
        try:
            ids = sides.local(request)
        except TokensUnknown:
            continue
        assert ids == truth, (seed, body)
        local += 1
    print(f"{compared} compared, {local} of them with the local tokenizer, {refused} refused, {left} left")
    assert compared >= BODIES * 0.4 and left == 0, (compared, refused, left)
    assert local >= compared * 0.9


def test_the_attribution_stays_in_the_prompt(sides: Sides) -> None:
    """SGLang removes no billing line, so a changing one changes the prompt from there on."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    rest = {"type": "text", "text": "You are brief."}
    prompts = [
        sides.tokenized(request_for(body | {"system": [{"type": "text", "text": f"{BILLING} {number}"}, rest]}))
        for number in range(2)
    ]
    assert prompts[0] != prompts[1]
    for number, prompt in enumerate(prompts):
        assert prompt == sides.engines(body | {"system": [{"type": "text", "text": f"{BILLING} {number}"}, rest]})
