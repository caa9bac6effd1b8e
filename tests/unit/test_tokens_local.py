# SPDX-License-Identifier: Apache-2.0
"""A tokenizer from a folder: prompts that it reads, prompts for the engine, and messages for wrong folders."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer

from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.model.engines.known import ENGINES
from kvrouter.router.route.tokens.client_body import (
    CHAT_PATH,
    MESSAGES_PATH,
    RESPONSES_PATH,
    TEXT_PATH,
    read_client_body,
)
from kvrouter.router.route.tokens.engine.wire import RenderQuirks
from kvrouter.router.route.tokens.local.local_tokenizer import LocalTokenizer
from kvrouter.router.route.tokens.prompt_tokens import TokensUnknown
from kvrouter.router.route.tokens.token_request import TokenRequest, read
from tests.support.tiny_tokenizer import BOS, write_tokenizer

USER = {"role": "user", "content": "Hi there, Größe 12"}


def now() -> datetime:
    return datetime(2026, 3, 9, 12, 0)


def asked(body: dict[str, Any], path: str = CHAT_PATH) -> TokenRequest:
    request = read(path, read_client_body(path, msgspec.json.encode(body)))
    assert isinstance(request, TokenRequest)
    return request


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path)


def text_of(folder: Path, body: dict[str, Any], quirks: RenderQuirks = RenderQuirks(content_parts=True)) -> str:  # noqa: B008
    """Return the text that the ids stand for."""
    ids = LocalTokenizer(folder, now).ids(asked(body), quirks)
    text: str = Tokenizer.from_file(str(folder / "tokenizer.json")).decode(ids.tolist(), skip_special_tokens=False)
    return text


def with_template(folder: Path, template: str) -> Path:
    (folder / "chat_template.jinja").write_text(template)
    return folder


def test_a_chat_becomes_what_its_template_writes(folder: Path) -> None:
    assert text_of(folder, {"messages": [{"role": "system", "content": " Be brief "}, USER]}) == (
        f"{BOS}<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\n{USER['content']}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_call_is_written_with_the_keys_in_the_order_of_its_api(folder: Path) -> None:
    maker = LocalTokenizer(with_template(folder, "{{ messages[0].tool_calls[0].function | tojson }}"), now)
    call = {"name": "f", "arguments": "{}"}
    chat = {"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": call}]}]}
    response = {"input": [{"type": "function_call", "call_id": "c"} | call]}
    quirks = RenderQuirks()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [
        tokenizer.decode(maker.ids(request, quirks).tolist())
        for request in (asked(chat), asked(response, RESPONSES_PATH))
    ]
    assert texts == ['{"arguments": {}, "name": "f"}', '{"name": "f", "arguments": {}}']


def test_a_message_to_be_continued_ends_where_it_ends(folder: Path) -> None:
    for content, ending in (("It is ", "It is"), ("It is", "It is"), ("a\n", "a")):
        body = {"messages": [USER, {"role": "assistant", "content": content}], "continue_final_message": True}
        text = text_of(folder, body | {"add_generation_prompt": False})
        # This template trims, so the engine goes on from the trimmed text.
        assert text.endswith(f"<|im_start|>assistant\n{ending}")
        with pytest.raises(TokensUnknown, match="add_generation_prompt") as caught:
            text_of(folder, body)
        assert caught.value.reason == "refused"


def test_the_space_at_a_messages_end_is_kept_where_the_template_keeps_it(folder: Path) -> None:
    with_template(folder, "{% for m in messages %}{{ m.role + ':' + m.content + '|' }}{% endfor %}")
    body = {"messages": [USER, {"role": "assistant", "content": "It is "}], "continue_final_message": True}
    assert text_of(folder, body | {"add_generation_prompt": False}, RenderQuirks()).endswith("assistant:It is ")


def test_parts_are_one_text_or_stay_parts(folder: Path) -> None:
    with_template(
        folder,
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}",
    )
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]}
    assert text_of(folder, body, RenderQuirks(content_parts=True)) == "[a][b]"
    assert text_of(folder, body, RenderQuirks(content_parts=False)) == "a\nb"
    assert LocalTokenizer(folder, now).likely_quirks()[0] == RenderQuirks(content_parts=True)


def test_a_template_has_what_transformers_gives_it(folder: Path) -> None:
    with_template(
        folder,
        "{{ strftime_now('%Y-%m-%d') }} {{ {'a': '<é>'} | tojson }} {{ bos_token }}"
        "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% endfor %} {{ documents }} {{ tools }} {{ custom }}",
    )
    body = {"messages": [USER, USER], "chat_template_kwargs": {"custom": 7}}
    assert text_of(folder, body, RenderQuirks()) == f'2026-03-09 {{"a": "<é>"}} {BOS}{USER["content"]} None None 7'


def test_a_template_that_refuses_refuses_the_request(folder: Path) -> None:
    for template in ("{{ raise_exception('only two messages') }}", "{{ messages[9].content }}", "{{ 1 / 0 }}"):
        with_template(folder, template)
        with pytest.raises(TokensUnknown) as caught:
            text_of(folder, {"messages": [USER]})
        assert caught.value.reason == "refused"


def test_a_template_reaches_nothing_of_the_process(folder: Path) -> None:
    for template in (
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
    ):
        with_template(folder, template)
        with pytest.raises(TokensUnknown):
            text_of(folder, {"messages": [USER]})


def test_a_model_may_have_a_template_of_its_own_for_tools(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | tojson }}"},
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tool = {"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": 2}}}
    assert text_of(folder, {"messages": [USER]}) == "plain"
    written = '[{"type": "function", "function": {"name": "f", "description": null, "parameters": {"b": 1, "a": 2}}}]'
    assert text_of(folder, {"messages": [USER], "tools": [tool]}) == written
    unused = {"messages": [USER], "tools": [tool], "tool_choice": "none"}
    assert text_of(folder, unused, RenderQuirks(keeps_unused_tools=False)) == "plain"


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [USER | {"role": "critic"}]},
        {"messages": [USER | {"role": "developer"}]},
        {"messages": [USER | {"role": ["user"]}]},
        {"messages": [USER | {"role": {"user": 1}}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]}]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [{"role": "system", "content": "x-anthropic-billing-header: 1\nBe brief"}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "type": "custom", "custom": {}}]}]},
        {"messages": [{"role": "assistant", "tool_calls": {}}, USER]},
        {"messages": [USER], "tools": [{"type": "web_search"}]},
        {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f", "examples": []}}]},
        {"messages": [USER], "chat_template": "x"},
        {"messages": [USER], "truncate_prompt_tokens": 3},
        {"messages": [USER], "chat_template_kwargs": {"messages": []}},
        {"messages": [USER], "chat_template_kwargs": {"chat_template": "x"}},
    ],
)
def test_ambiguous_chats_are_left_to_the_engine(folder: Path, body: dict[str, Any]) -> None:
    with pytest.raises(TokensUnknown) as caught:
        LocalTokenizer(folder, now).ids(asked(body), RenderQuirks())
    assert caught.value.reason == "unsupported"


def test_a_message_of_which_sglang_makes_an_empty_chat_is_refused_by_the_template(folder: Path) -> None:
    request = asked({"messages": [{"role": "user", "content": []}]}, MESSAGES_PATH)
    with pytest.raises(TokensUnknown) as caught:
        LocalTokenizer(folder, now).ids(request, RenderQuirks(reading=ENGINES["sglang"].tokens.reading))
    assert caught.value.reason == "refused"


def test_a_deep_message_to_be_continued_is_refused(folder: Path) -> None:
    arguments = '{"a":' * 600 + "1" + "}" * 600
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": "It is", "tool_calls": [call]}
    body = {"messages": [USER, message], "continue_final_message": True, "add_generation_prompt": False}
    with pytest.raises(TokensUnknown, match="nested too deeply") as caught:
        LocalTokenizer(folder, now).ids(asked(body), RenderQuirks())
    assert caught.value.reason == "refused"


def test_a_text_has_its_special_tokens_unless_they_are_not_wanted(folder: Path) -> None:
    local = LocalTokenizer(folder, now)
    plain = local.ids(asked({"prompt": "Paris", "add_special_tokens": False}, TEXT_PATH), RenderQuirks())
    assert local.ids(asked({"prompt": "Paris"}, TEXT_PATH), RenderQuirks()).tolist() == [1, *plain.tolist()]
    chat = local.ids(asked({"messages": [USER]}), RenderQuirks())
    twice = local.ids(asked({"messages": [USER], "add_special_tokens": True}), RenderQuirks())
    assert np.array_equal(twice, [1, *chat.tolist()])


def test_tokens_that_only_the_settings_name_are_tokens(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {"1024": {"content": "<|new|>", "special": True, "normalized": False}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    body = {"prompt": "<|new|>", "add_special_tokens": False}
    assert LocalTokenizer(folder, now).ids(asked(body, TEXT_PATH), RenderQuirks()).tolist() == [
        Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    ]


def test_a_wrong_folder_says_what_is_wrong(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="name a folder with one"):
        LocalTokenizer(tmp_path / "nothing", now)
    with_template(folder, "{% if %}")
    with pytest.raises(SettingError, match="no Jinja"):
        LocalTokenizer(folder, now)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(SettingError, match="cannot read"):
        LocalTokenizer(folder, now)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("added_tokens_decoder", [1]),
        ("added_tokens_decoder", {"x": {"content": "a"}}),
        ("added_tokens_decoder", {"1": "a"}),
        ("added_tokens_decoder", {"1": {}}),
        ("added_tokens_decoder", {"1": {"content": 3}}),
        ("chat_template", ["a"]),
        ("chat_template", [{"name": "default"}]),
        ("chat_template", [{"name": ["default"], "template": "a"}]),
        ("chat_template", [{"name": "default", "template": 3}]),
        ("bos_token", {}),
        ("eos_token", {"content": None}),
        ("pad_token", 3),
    ],
)
def test_malformed_settings_of_a_model_name_the_field(folder: Path, field: str, value: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(SettingError, match=rf"tokenizer_config.json: {field} is malformed: write .+"):
        LocalTokenizer(folder, now)


@pytest.mark.parametrize("content", [b'{"a": "\xff"}', b"\xff", b"[" * 100_000, b""])
def test_settings_of_a_model_that_are_no_json_are_named(folder: Path, content: bytes) -> None:
    (folder / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(SettingError, match=r"cannot read .*tokenizer_config.json"):
        LocalTokenizer(folder, now)


@pytest.mark.parametrize(
    "template",
    [
        "{{ " + "(" * 3_000 + "1" + ")" * 3_000 + " }}",
        "{% for x in y %}" * 25 + "{% endfor %}" * 25,
        "{% if x %}" * 150 + "{% endif %}" * 150,
    ],
)
def test_a_template_that_is_nested_too_deeply_is_refused(folder: Path, template: str) -> None:
    with_template(folder, template)
    with pytest.raises(SettingError, match="no Jinja"):
        LocalTokenizer(folder, now)


def test_a_model_without_a_template_has_no_chats(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(TokensUnknown, match="chat template"):
        LocalTokenizer(folder, now).ids(asked({"messages": [USER]}), RenderQuirks())
