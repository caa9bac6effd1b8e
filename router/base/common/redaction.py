# SPDX-License-Identifier: Apache-2.0
"""Redaction of values before they are shown: removes keys, seeds, passwords, and the contents of prompts. Pure."""

from __future__ import annotations

import re
from typing import Any

# The text that replaces a hidden value.
HIDDEN = "***"

# Fields whose values are not shown. The seeds of block hashes are among them, because a person who knows a seed can
# make prompts whose hashes collide.
SECRET_FIELDS = frozenset(
    {
        *("api_key", "worker_api_key", "authorization", "password", "cache_salt"),
        *("none_hash", "none_hash_seed"),
        *("prompt", "prompt_token_ids", "token_ids", "messages", "input", "text"),
    }
)
# As in a worker's SPEC (`none_hash_seed=x`), and as JSON and Python write a field, whose quotes may be escaped.
_SEED = re.compile(r"""\b(none_hash(?:_seed)?(?:=|\\*['"]\s*:\s*))(?:(\\*['"]).*?(?<!\\)\2|[^,\s]*)""", re.DOTALL)
_PASSWORD = re.compile(r"(//)[^/@\s]*@")


def redacted(value: Any, secrets: tuple[str, ...] = ()) -> Any:
    """Return a decoded JSON value with its secret fields, and the secrets within its texts, replaced by `HIDDEN`.

    Args:
        value: The value.
        secrets: Texts that are hidden wherever they occur.
    """
    if isinstance(value, dict):
        return {
            name: HIDDEN if name in SECRET_FIELDS and part is not None else redacted(part, secrets)
            for name, part in value.items()
        }
    if isinstance(value, list | tuple):
        return [redacted(part, secrets) for part in value]
    return redacted_text(value, secrets) if isinstance(value, str) else value


def redacted_text(text: str, secrets: tuple[str, ...] = ()) -> str:
    """Return a text without passwords in URLs, without seeds of block hashes, and without the given secrets."""
    for secret in filter(None, secrets):
        text = text.replace(secret, HIDDEN)
    return _PASSWORD.sub(rf"\1{HIDDEN}@", _SEED.sub(rf"\1{HIDDEN}", text))
