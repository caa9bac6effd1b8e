# SPDX-License-Identifier: Apache-2.0
"""The fields by which a body may name content that another client has sent. Pure.

A cache salt separates the blocks of clients' prompts, but not what a request names in another way: blocks at another
engine, and media in the engine's cache of processed media, which has no salts. So these fields are refused for clients
whose prompts must have salts of their own.
Source: vLLM 0.33.0, modules `renderers.chat_utils` (uuid of a content part), `renderers.base` (_process_mm_uuids) and
`v1.kv_offload.tiering.p2p`; SGLang 0.5.23, module `managers.io_struct` (bootstrap_host and its like).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvrouter.router.base.common.errors import Forbidden
from kvrouter.router.route.tokens.client_body import TOO_LONG, check_elements, is_given, value_of

# Blocks at another engine, by vLLM's and SGLang's names; and media by their hashes, in `/inference/v1/generate`.
TRANSFER_FIELDS = (
    *("kv_transfer_params", "ec_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room"),
    "kv_hints",
    "features",
)
# Fields in which vLLM takes the same as arguments of an extension.
EXTENSION_FIELDS = ("sampling_params", "vllm_xargs")
# Fields with parts of contents, of which one may name its medium.
CONTENT_FIELDS = ("messages", "system", "input", "content_parts", "prompt")
MEDIUM_NAME = "uuid"
# A field without any of these bytes names no medium; the last three are letters of the name, escaped.
MAY_NAME = (MEDIUM_NAME.encode(), rb"\u0075", rb"\u0069", rb"\u0064")


def check_content(fields: Mapping[str, msgspec.Raw]) -> None:
    """Raise Forbidden if a body may name another client's content, BadQuestion if that cannot be seen in time."""
    for name in TRANSFER_FIELDS:
        if is_given(fields, name):
            raise _foreign(name)
    for name in EXTENSION_FIELDS:
        if is_given(fields, name):
            value = _decoded(fields[name], name)
            if value is TOO_LONG or _has_transfer(value):
                raise _foreign(name)
    for name in CONTENT_FIELDS:
        if not is_given(fields, name):
            continue
        raw = bytes(fields[name])
        if any(word in raw for word in MAY_NAME):
            check_elements(fields[name], name)
            if _names_medium(msgspec.json.decode(raw)):
                raise _foreign(f"{MEDIUM_NAME} in {name}")


def _decoded(field: msgspec.Raw, name: str) -> Any:
    check_elements(field, name)
    return value_of(field)


def _has_transfer(value: Any) -> bool:
    """Return whether an object, or one within it, has a field that names blocks."""
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if isinstance(found, dict):
            if not found.keys().isdisjoint(TRANSFER_FIELDS):
                return True
            waiting += found.values()
        elif isinstance(found, list):
            waiting += found
    return False


def _names_medium(value: Any) -> bool:
    """Return whether a list of messages or parts, or one of their contents, has a part that names its medium.

    Arguments of tools may have any field, so objects that are no parts are not looked into.
    """
    waiting = [value]
    while waiting:
        parts = waiting.pop()
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict):
                if part.get(MEDIUM_NAME) is not None:
                    return True
                waiting += (part.get("content"), part.get("output"))
    return False


def _foreign(name: str) -> Forbidden:
    return Forbidden(
        f"prompts of this client have a cache salt of their own, and {name} may name what another client has sent: leave it "
        "out",
        code="salt_not_allowed",
    )
