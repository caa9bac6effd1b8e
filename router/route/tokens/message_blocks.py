# SPDX-License-Identifier: Apache-2.0
"""The blocks of a message of Anthropic's API, as far as they decide how its tokens are found. Pure.

Values may be of any type, because the engine reports errors in them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Types of content blocks that do not become text of a chat message. Source: vLLM 0.32.0
# entrypoints/anthropic/protocol.py, AnthropicContentBlock.
MEDIA = "image"
TOOL_USE, TOOL_RESULT, THINKING = "tool_use", "tool_result", "thinking"


def blocks_of(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the blocks of a message; a plain text has none."""
    content = message.get("content")
    if isinstance(content, list):
        yield from (block for block in content if isinstance(block, dict))


def has_media(message: dict[str, Any]) -> bool:
    """Return whether a message has an image, including one in a tool's result."""
    # A client may nest results deeper than Python recurses.
    unread = [message]
    while unread:
        for block in blocks_of(unread.pop()):
            if block.get("type") == MEDIA:
                return True
            if block.get("type") == TOOL_RESULT:
                unread.append(block)
    return False


def is_inline_system(message: dict[str, Any]) -> bool:
    """Return whether this is a system message among the others; some templates accept one only in front."""
    return message.get("role") == "system"


def has_thinking(message: dict[str, Any]) -> bool:
    """Return whether a message has thinking of an earlier turn."""
    return any(block.get("type") == THINKING for block in blocks_of(message))


def uses_tools(message: dict[str, Any]) -> bool:
    """Return whether a message calls a tool or has a tool's result."""
    return any(block.get("type") in (TOOL_USE, TOOL_RESULT) for block in blocks_of(message))
