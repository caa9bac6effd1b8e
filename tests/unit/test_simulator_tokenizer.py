# SPDX-License-Identifier: Apache-2.0
"""The simulator's tokenizer: reversible, stable under growth, and its chat template as written."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.simulator.cache import tokenizer
from kvrouter.simulator.cache.text import next_token


@given(st.text(st.characters(codec="utf-8")))
def test_decoding_gives_the_text_back(text: str) -> None:
    ids = tokenizer.encode(text)
    assert all(0 <= token < tokenizer.VOCABULARY for token in ids)
    if not any(mark in text for mark in tokenizer.MARKS):
        assert tokenizer.decode(ids) == text
    assert "".join(tokenizer.token_strings(tokenizer.encode("plain text bada"))) == "plain text bada"


def test_lone_surrogates_become_question_marks() -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"


@given(st.lists(st.integers(tokenizer.FIRST_WORD, tokenizer.VOCABULARY - 1), max_size=50))
def test_words_keep_their_tokens(ids: list[int]) -> None:
    assert tokenizer.encode(tokenizer.decode(ids)) == ids
    assert tokenizer.encode(tokenizer.decode(ids) + "<|im_end|>\n")[: len(ids)] == ids


def test_every_sampled_token_is_a_word() -> None:
    assert all(tokenizer.FIRST_WORD <= next_token(list(range(n))) < tokenizer.VOCABULARY for n in range(500))


def test_the_template_is_as_documented() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
    ]
    assert tokenizer.render_chat(messages, tools=[{"x": 1}]) == (
        '<|im_start|>system\n[{"x":1}]<|im_end|>\n'
        "<|im_start|>user\na\nb<|im_end|>\n"
        '<|im_start|>assistant\n[{"id":"1"}]<|im_end|>\n'
        "<|im_start|>assistant\n"
    )
    assert tokenizer.render_chat([{"role": "assistant", "content": "I"}], continue_final_message=True) == (
        "<|im_start|>assistant\nI"
    )
    assert tokenizer.encode("<|im_start|>u")[0] == tokenizer.MARK_START


def test_pictures_are_refused() -> None:
    with pytest.raises(tokenizer.NotATextError, match="text only"):
        tokenizer.render_chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
