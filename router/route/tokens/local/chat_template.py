# SPDX-License-Identifier: Apache-2.0
"""A model's chat template, rendered as transformers renders it for the engine.

Source: transformers 5 utils/chat_template_utils.py: the environment's options, its filters and functions, and how the
end of a message that is to be continued is found. In Jinja's sandbox: a template comes with a model and is no code of
the operator's.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.route.tokens.prompt_tokens import TokensUnknown

# Stands behind the text that is to be continued while the template runs. The space at its end shows whether the
# template trims.
MARK = "CONTINUED-HERE "

# Set by the template's caller; as an argument of a client they would be given twice.
OWN_ARGUMENTS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class _Generation(Extension):
    """`{% generation %}` marks what an assistant wrote, for training; the text in it is text as any other."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_itself"), [], [], body).set_lineno(line)

    def _itself(self, caller: Callable[[], str]) -> str:
        return caller()


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own would escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class ChatTemplate:
    """now: the local time, for templates that write the date."""

    def __init__(self, text: str, now: Callable[[], datetime]) -> None:
        """Raises SettingError where it is no Jinja."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        self.text = text
        try:
            self._template = environment.from_string(text)
        except jinja2.TemplateError as error:
            raise SettingError(f"its chat template is no Jinja: {error}") from None

    def render(self, messages: list[dict[str, Any]], *, continued: bool, arguments: dict[str, Any]) -> str:
        """The text of the chat; with `continued`, up to the end of the last message's content.

        Raises Unknown where the template refuses the chat, as it would in the engine."""
        last = ""
        if continued:
            messages, last = _marked(messages)
        try:
            text = self._template.render(messages=messages, **arguments)
        except RecursionError:
            raise TokensUnknown("refused", "the chat template recurses without end") from None
        except Exception as error:
            # Templates are programs: they raise what they like.
            raise TokensUnknown("refused", f"the chat template refuses the chat: {error}") from None
        return _unmarked(text, last) if continued else text


def _marked(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """The messages with MARK behind the last text of the last one, and that text."""
    messages = [*messages[:-1], copy.deepcopy(messages[-1])]
    content = messages[-1].get("content")
    if isinstance(content, str):
        messages[-1]["content"] = content + MARK
        return messages, content
    for part in reversed(content or []):
        if "text" in part:
            text: str = part["text"]
            part["text"] = text + MARK
            return messages, text
    raise TokensUnknown("refused", "continue_final_message: the last message has no text to go on from")


def _unmarked(text: str, last: str) -> str:
    at = text.rfind(MARK.strip())
    if at < 0 or last.strip() not in text:
        raise TokensUnknown("refused", "continue_final_message: the chat template leaves the last message's end out")
    # A template that trims has trimmed the space behind the mark, and would have trimmed what was before it.
    return text[:at] if text.startswith(MARK, at) else text[:at].rstrip()
