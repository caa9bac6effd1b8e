# SPDX-License-Identifier: Apache-2.0
"""What a message of Anthropic's API consists of, as far as it decides how its tokens are found. Pure; values may be of
any type, as the engine reports what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Of a message's blocks, those that have no text of their own in a chat. Source: vLLM 0.32.0
# entrypoints/anthropic/protocol.py, AnthropicContentBlock.
MEDIA = "image"
TOOL_USE, TOOL_RESULT = "tool_use", "tool_result"


def blocks_of(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The blocks of a message, none of a text."""
    content = message.get("content")
    if isinstance(content, list):
        yield from (block for block in content if isinstance(block, dict))


def has_media(message: dict[str, Any]) -> bool:
    """Whether it has an image, also as a tool's result."""
    return any(
        block.get("type") == MEDIA or (block.get("type") == TOOL_RESULT and has_media(block))
        for block in blocks_of(message)
    )


def is_inline_system(message: dict[str, Any]) -> bool:
    """Whether it is a system message among the others, which some templates take only in front."""
    return message.get("role") == "system"


def uses_tools(message: dict[str, Any]) -> bool:
    """Whether it calls a tool, or has a tool's result."""
    return any(block.get("type") in (TOOL_USE, TOOL_RESULT) for block in blocks_of(message))
