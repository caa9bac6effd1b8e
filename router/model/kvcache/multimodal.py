# SPDX-License-Identifier: Apache-2.0
"""Images, sounds and videos in a prompt: where their placeholder tokens stand, and what names their content.

The placeholders of two images are the same tokens; the blocks' extra keys distinguish them. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from xxhash import xxh3_64_intdigest

# Of one prompt. vLLM serves some tens; each costs a look for each segment of the prompt.
MAX_ITEMS = 4_096


class MultimodalItem(NamedTuple):
    """identifier: vLLM's mm_hash. Its placeholders are the tokens from offset_tokens on, length_tokens of them, at
    least one.

    Source: vLLM 0.32.0 multimodal/inputs.py (MultiModalFeatureSpec)."""

    identifier: str
    offset_tokens: int
    length_tokens: int


# By offset; they do not overlap.
Items: TypeAlias = tuple[MultimodalItem, ...]


def in_order(items: Sequence[MultimodalItem]) -> Items:
    """The items by offset. Raises ValueError where they overlap or are too many, or one is empty or before the
    prompt."""
    if len(items) > MAX_ITEMS:
        raise ValueError(f"{len(items)} items; at most {MAX_ITEMS} are read")
    found = tuple(sorted(items, key=lambda item: item.offset_tokens))
    end = 0
    for item in found:
        if item.offset_tokens < end:
            raise ValueError(f"an item begins at token {item.offset_tokens}, before {end}, where the one before ends")
        if item.length_tokens < 1:
            raise ValueError(f"the item at token {item.offset_tokens} has no tokens")
        end = item.offset_tokens + item.length_tokens
    return found


def within(items: Items, start_tokens: int, end_tokens: int) -> Items:
    """Those with a token from start_tokens to before end_tokens, their offsets counted from there; negative for one
    begun before.

    Source: vLLM 0.32.0 v1/core/kv_cache_utils.py:510 (_gen_mm_extra_hash_keys).
    """
    return tuple(
        item._replace(offset_tokens=item.offset_tokens - start_tokens)
        for item in items
        if item.offset_tokens < end_tokens and item.offset_tokens + item.length_tokens > start_tokens
    )


def named(name: int, items: Items, start_tokens: int, end_tokens: int) -> int:
    """A name of some tokens that includes their items: another for another picture; `name` itself where there are
    none."""
    for item in within(items, start_tokens, end_tokens):
        name = xxh3_64_intdigest(f"{item.offset_tokens}\0{item.identifier}".encode("utf-8", "surrogatepass"), seed=name)
    return name
