# SPDX-License-Identifier: Apache-2.0
r"""The simulator's tokenizer and chat template: small, without files, and exactly reversible.

Token ids 0-255 are bytes, 256 and 257 the chat marks, and FIRST_WORD up to VOCABULARY - 1 words: a space and two or
three syllables (" bada", " kozife"). Text is cut into runs of a space and small letters; a run that is a word becomes
one token, everything else UTF-8 bytes. A replica answers in words, so that an answer sent back as text has the tokens
that it was sampled with. There is no BOS token.

The chat template, with every mark one token and the rest tokenized as text:

    <|im_start|>system\nTOOLS_JSON<|im_end|>\n                (only with tools)
    <|im_start|>ROLE\nCONTENT<|im_end|>\n                     (each message; tool calls follow the content as JSON)
    <|im_start|>assistant\n                                    (add_generation_prompt)

With continue_final_message the last message's <|im_end|>\n is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

# All token ids are below this number, which is small enough for any model's vocabulary.
VOCABULARY = 32_000

MARK_START, MARK_END = 256, 257
MARKS = {"<|im_start|>": MARK_START, "<|im_end|>": MARK_END}
FIRST_WORD = 264

_SYLLABLES = [c + v for c in "bdfghjklmnprstvwzcyx" for v in "aeiou"]


def _word(number: int) -> str:
    """Return a word of two syllables for the first 10,000 numbers, of three beyond."""
    base = len(_SYLLABLES)
    rest, last = divmod(number, base)
    first, middle = divmod(rest, base)
    head = _SYLLABLES[first - 1] if first else ""
    return " " + head + _SYLLABLES[middle] + _SYLLABLES[last]


_WORDS = [_word(n) for n in range(VOCABULARY - FIRST_WORD)]
_IDS = {word: FIRST_WORD + n for n, word in enumerate(_WORDS)}
_NAMES = {number: mark for mark, number in MARKS.items()}

# A run of letters after a space may be a word, a mark is one token, and everything else is encoded as bytes.
_CUT = re.compile(r"<\|im_start\|>|<\|im_end\|>| [a-z]+|[^ <]+|[ <]", re.DOTALL)


class NotATextError(ValueError):
    """Messages that cannot be put into the template; the error's text says why."""


def encode(text: str) -> list[int]:
    """Return the token ids of a text. Marks in it become marks, as in vLLM's tokenizers; lone surrogates become `?`."""
    ids: list[int] = []
    for run in _CUT.findall(text):
        token = _IDS.get(run) or MARKS.get(run)
        if token is not None:
            ids.append(token)
        else:
            ids += run.encode("utf-8", "replace")
    return ids


def decode(ids: Sequence[int]) -> str:
    """Return the text of token ids, without chat marks; ids without a meaning and torn UTF-8 become U+FFFD."""
    return _join(ids, marks=False)


def token_strings(ids: Sequence[int]) -> list[str]:
    """Return each token's own text, marks included."""
    return [_join([token], marks=True) for token in ids]


def _join(ids: Sequence[int], *, marks: bool) -> str:
    parts: list[bytes] = []
    for token in ids:
        if 0 <= token < 256:
            parts.append(bytes((token,)))
        elif FIRST_WORD <= token < VOCABULARY:
            parts.append(_WORDS[token - FIRST_WORD].encode())
        elif token in _NAMES:
            parts.append(_NAMES[token].encode() if marks else b"")
        else:
            parts.append("\ufffd".encode())
    return b"".join(parts).decode("utf-8", "replace")


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> str:
    """Apply the chat template. Raises NotATextError for a message that has no text."""
    parts: list[str] = []
    if tools:
        parts.append(f"<|im_start|>system\n{_json(list(tools))}<|im_end|>\n")
    for n, message in enumerate(messages):
        body = _content(message)
        if message.get("tool_calls"):
            body += _json(message["tool_calls"])
        last = continue_final_message and n == len(messages) - 1
        parts.append(f"<|im_start|>{message.get('role', 'user')}\n{body}" + ("" if last else "<|im_end|>\n"))
    if add_generation_prompt and not continue_final_message:
        parts.append("<|im_start|>assistant\n")
    return "".join(parts)


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise NotATextError("this replica reads text only; send content as a string or as parts of type text")
        texts.append(part["text"])
    return "\n".join(texts)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
