# SPDX-License-Identifier: Apache-2.0
"""A model's tokenizer and chat template, read from a folder in the usual layout of models.

The folder has tokenizer.json, tokenizer_config.json and a template. Calls are synchronous, so long texts belong in a
thread. Nothing is downloaded. Whether the tokens are those that the engine makes is judged elsewhere, by probes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer

from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.base.common.regular_file import read_regular
from kvrouter.router.route.tokens.engine.wire import RenderQuirks, chat_of, template_arguments
from kvrouter.router.route.tokens.local.chat_messages import conversation, tools
from kvrouter.router.route.tokens.local.chat_template import OWN_ARGUMENTS, ChatTemplate
from kvrouter.router.route.tokens.local.piece_cache import PieceCache
from kvrouter.router.route.tokens.prompt_tokens import TokensUnknown
from kvrouter.router.route.tokens.token_request import LEFT_TO_THE_ENGINE, TokenRequest

# The names of special tokens that templates may use. Source: transformers 5, SPECIAL_TOKENS_ATTRIBUTES.
NAMED_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))

# The file of the tokenizer's settings.
SETTINGS = "tokenizer_config.json"

# The limit on the size of one file; the largest tokenizers have some 35 MB.
MAX_FILE_BYTES = 256 * 1024**2


# vLLM passes the parts of contents to a template that loops over them. If text and parts lead to the same tokens of the
# probes, this pattern decides which of them is used.
LOOPS_OVER_CONTENT = re.compile(r"{%-?\s*for\s+\w+\s+in\s[^%]*content")


class LocalTokenizer:
    """The tokenizer of one model."""

    def __init__(self, folder: Path, now: Callable[[], datetime]) -> None:
        """Read the tokenizer from its folder.

        Args:
            folder: The model's folder.
            now: Returns the local time, for templates that write the date.

        Raises:
            SettingError: A file cannot be read.
        """
        self.folder = folder
        config = _read_json(folder / SETTINGS)
        try:
            tokenizer = Tokenizer.from_buffer(read_regular(folder / "tokenizer.json", MAX_FILE_BYTES))
        except Exception as error:
            # The library raises plain Exception.
            raise SettingError(f"cannot read {folder / 'tokenizer.json'}: {error}; name a folder with one") from None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.add_tokens(_further_tokens(tokenizer, folder, config))
        texts = _templates(folder, config)
        self._special = _named_tokens(folder, config)
        self._templates = {name: ChatTemplate(text, now) for name, text in texts.items()}
        self._pieces = PieceCache(tokenizer, "".join([*texts.values(), *self._special.values()]))

    @property
    def held_bytes(self) -> int:
        """The memory held by the cache of pieces."""
        return self._pieces.held_bytes

    def ids(self, request: TokenRequest, quirks: RenderQuirks) -> NDArray[np.int64]:
        """Return the tokens that an engine with these peculiarities of rendering makes of a request.

        Raises:
            TokensUnknown: Only the engine can read the request, or its prompt is made of something other than tokens.
        """
        for name in LEFT_TO_THE_ENGINE:
            if request.has(name):
                raise TokensUnknown("unsupported", f"{name} is not read by the tokenizer here; the engine reads it")
        if request.kind == "messages":
            request = chat_of(request, quirks)
        elif request.kind == "responses":
            request = chat_of(request, quirks)
            quirks = msgspec.structs.replace(quirks, name_first=True)
        special = request.value("add_special_tokens")
        if request.kind == "text":
            text = request.value("prompt")
            if not isinstance(text, str):
                raise TokensUnknown("unsupported", "the tokenizer here reads text alone")
            return self._encoded(text, special is not False)
        return self._encoded(self._chat(request, quirks), special is True)

    def _encoded(self, text: str, add_special_tokens: bool) -> NDArray[np.int64]:
        """Return the ids of a text; raise TokensUnknown if there are none."""
        ids = self._pieces.encode(text, add_special_tokens=add_special_tokens)
        if not len(ids):
            raise TokensUnknown("refused", "the prompt has no tokens")
        return ids

    def _chat(self, request: TokenRequest, quirks: RenderQuirks) -> str:
        """Return the text of a chat."""
        tool_definitions = tools(request, quirks)
        template = self._templates.get("tool_use" if tool_definitions else "default") or self._templates.get("default")
        if template is None:
            raise TokensUnknown("unsupported", f"{self.folder} has no chat template; put its chat_template.jinja there")
        messages = conversation(request, quirks)
        if any(message["role"] == "developer" for message in messages) and "developer" not in template.text:
            raise TokensUnknown("unsupported", "the role developer, which the engine turns into another here")
        arguments = template_arguments(request)
        if not OWN_ARGUMENTS.isdisjoint(arguments.keys() - {"documents"}) or "chat_template" in arguments:
            raise TokensUnknown("unsupported", "chat_template_kwargs that replace arguments of their own")
        continued = request.value("continue_final_message") is True
        generation = request.value("add_generation_prompt") is not False
        if continued and generation:
            raise TokensUnknown("refused", "continue_final_message wants add_generation_prompt to be false")
        template_context: dict[str, Any] = {"documents": None} | self._special | arguments
        template_context |= {"tools": tool_definitions, "add_generation_prompt": generation}
        return template.render(messages, continued=continued, arguments=template_context)

    def likely_quirks(self) -> tuple[RenderQuirks, ...]:
        """Return the quirks that an engine with this template may have, the most likely first.

        If the template loops over a message's content, it probably reads parts.
        """
        default = self._templates.get("default")
        loops = default is not None and LOOPS_OVER_CONTENT.search(default.text) is not None
        return tuple(
            RenderQuirks(keeps_unused_tools=keeps, content_parts=parts, merges_system=merges)
            for merges in (False, True)
            for keeps in (True, False)
            for parts in ((True, False) if loops else (False, True))
        )


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file, empty if the file does not exist or has something else."""
    try:
        content = msgspec.json.decode(read_regular(path, MAX_FILE_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise SettingError(f"cannot read {path}: {error}") from None
    return content if isinstance(content, dict) else {}


def _malformed(folder: Path, field: str, form: str) -> SettingError:
    """Return the error for a field of the settings that has another form than tokenizers read."""
    return SettingError(f"{folder / SETTINGS}: {field} is malformed: write {form}, or remove it")


def _content(token: Any) -> str | None:
    """Return the text of a special token, given as its text or with its properties, or None if it has none."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _named_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the texts of the special tokens that the settings name. Raises SettingError."""
    texts: dict[str, str] = {}
    for name in NAMED_TOKENS:
        if config.get(name) is not None:
            text = _content(config[name])
            if text is None:
                raise _malformed(folder, name, 'the token\'s text, or {"content": TEXT}')
            texts[name] = text
    return texts


def _further_tokens(tokenizer: Tokenizer, folder: Path, config: dict[str, Any]) -> list[AddedToken]:
    """Return the tokens of the settings that tokenizer.json lacks, in the order of their ids. Raises SettingError."""
    field = "added_tokens_decoder"
    wrong = _malformed(folder, field, 'an object like {"ID": {"content": TEXT}} with a number as each ID')
    listed = config.get(field) or {}
    if not isinstance(listed, dict):
        raise wrong
    try:
        listed_tokens = [token for _, token in sorted(listed.items(), key=lambda item: int(item[0]))]
    except ValueError:
        raise wrong from None
    tokens = []
    for token in listed_tokens:
        text = _content(token)
        if not isinstance(token, dict) or text is None:
            raise wrong
        if tokenizer.token_to_id(text) is None:
            properties = ("single_word", "lstrip", "rstrip", "normalized", "special")
            tokens.append(AddedToken(text, **{name: bool(token.get(name, False)) for name in properties}))
    return tokens


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the templates by name: `default`, and `tool_use` if the model has a separate one for tools.

    Raises SettingError.
    """
    configured = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(configured, str):
        templates["default"] = configured
    elif isinstance(configured, list):
        for entry in configured:
            name, text = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
            if not isinstance(name, str) or not isinstance(text, str):
                raise _malformed(
                    folder, "chat_template", 'a template, or a list like [{"name": NAME, "template": TEXT}]'
                )
            templates[name] = text
    for path in (folder / "chat_template.jinja", *sorted((folder / "additional_chat_templates").glob("*.jinja"))):
        try:
            templates["default" if path.parent == folder else path.stem] = read_regular(path, MAX_FILE_BYTES).decode(
                "utf-8"
            )
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise SettingError(f"cannot read {path}: {error}") from None
    return templates
