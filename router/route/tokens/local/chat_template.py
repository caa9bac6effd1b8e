# SPDX-License-Identifier: Apache-2.0
"""A model's chat template, rendered as transformers renders it for the engine.

Source: transformers 5 utils/chat_template_utils.py: the environment's options, its filters and functions, and how the
end of a message that is to be continued is found. Templates run in Jinja's sandbox, because they come with a model and
are not the operator's code.
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

# Marks the end of the text that is to be continued while the template runs. The space at its end shows whether the
# template trims.
MARK = "CONTINUED-HERE "

# Arguments that this router sets itself; a client's argument of such a name would be passed twice.
OWN_ARGUMENTS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class _Generation(Extension):
    """The extension for `{% generation %}`, which marks an assistant's text for training.

    The marked text is rendered like any other.
    """

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
    """Return JSON without the escapes for HTML that Jinja's own filter adds."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, text: str, now: Callable[[], datetime]) -> None:
        """Compile the template.

        Args:
            text: The template.
            now: Returns the local time, for templates that write the date.

        Raises:
            SettingError: The text is no Jinja template.
        """
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
        except (RecursionError, SyntaxError, MemoryError):
            # Jinja compiles to Python, whose own limits are narrower.
            raise SettingError("its chat template is no Jinja that can be compiled: it is nested too deeply") from None

    def render(self, messages: list[dict[str, Any]], *, continued: bool, arguments: dict[str, Any]) -> str:
        """Return the text of a chat.

        Args:
            messages: The chat's messages.
            continued: Whether to stop at the end of the last message's content, which is to be continued.
            arguments: The template's further arguments.

        Raises:
            TokensUnknown: The template refuses the chat, as it would in the engine.
        """
        last_text = ""
        if continued:
            try:
                messages, last_text = _marked(messages)
            except RecursionError:
                raise TokensUnknown("refused", "the last message is nested too deeply") from None
        try:
            text = self._template.render(messages=messages, **arguments)
        except RecursionError:
            raise TokensUnknown("refused", "the chat template recurses without end") from None
        except Exception as error:
            # Templates are programs, so they may raise anything.
            raise TokensUnknown("refused", f"the chat template refuses the chat: {error}") from None
        return _unmarked(text, last_text) if continued else text


def _marked(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Return the messages with MARK behind the last text of the last message, and that text."""
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


def _unmarked(text: str, last_text: str) -> str:
    """Return the text up to the mark; raise TokensUnknown if the template left the last message's end out."""
    at = text.rfind(MARK.strip())
    if at < 0 or last_text.strip() not in text:
        raise TokensUnknown("refused", "continue_final_message: the chat template leaves the last message's end out")
    # If the space behind the mark is gone, the template trims, and would also have trimmed the space at the end of the
    # last text.
    return text[:at] if text.startswith(MARK, at) else text[:at].rstrip()
