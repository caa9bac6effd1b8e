# SPDX-License-Identifier: Apache-2.0
"""The form that an engine gives to thinking in a message of Anthropic's API, as far as its reasoning parser decides.

An engine does not report this form, so trials find it (`engine/verification.py`).

Source: SGLang 0.5.23 entrypoints/openai/serving_chat.py (wrap_reasoning_history, apply_reasoning_enabled),
parser/reasoning_parser.py.
"""

from __future__ import annotations

import msgspec


class ThinkingHistory(msgspec.Struct, frozen=True):
    """The form of thinking in earlier turns."""

    # The texts around it in the turn's content; None if it is not part of the content.
    marks: tuple[str, str] | None = None
    # Whether the template gets it as `reasoning_content`.
    as_field: bool = False


class ThinkingSwitch(msgspec.Struct, frozen=True):
    """The template's arguments that switch thinking on and off."""

    names: tuple[str, ...] = ()
    on: bool | str = True
    off: bool | str = False


# Without a reasoning parser, SGLang drops earlier thinking, and refuses requests that switch thinking on.
DROPPED = ThinkingHistory()
NO_SWITCH = ThinkingSwitch()

# The marks of SGLang's reasoning parsers, the most frequent first.
HISTORIES = (
    DROPPED,
    *(
        ThinkingHistory((begin, f"\n{end}"))
        for begin, end in (
            ("<think>", "</think>"),
            ("[THINK]", "[/THINK]"),
            ("<|channel>thought\n", "<channel|>"),
            ("<|channel|>analysis<|message|>", "<|end|>"),
            ("<mm:think>", "</mm:think>"),
            ("◁think▷", "◁/think▷"),
            ("<|START_THINKING|>", "<|END_THINKING|>"),
            ("<|inner_prefix|>", "<|inner_suffix|>"),
        )
    ),
    ThinkingHistory(as_field=True),
)
SWITCHES = (
    NO_SWITCH,
    ThinkingSwitch(("enable_thinking",)),
    ThinkingSwitch(("thinking",)),
    ThinkingSwitch(("thinking", "enable_thinking")),
    ThinkingSwitch(("reasoning_effort",), "medium", "none"),
    ThinkingSwitch(("reasoning_effort",), "medium", "no_think"),
    ThinkingSwitch(("reasoning_effort",), "high", "no_think"),
)
