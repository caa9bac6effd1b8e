# SPDX-License-Identifier: Apache-2.0
"""Images, sounds and videos in a prompt: the positions of their placeholder tokens, and the names of their contents.

The placeholders of two images are the same tokens, so the extra keys of their blocks distinguish them. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from xxhash import xxh3_64_intdigest

# The most items of one prompt. vLLM serves a few tens; every segment of the prompt looks at every item.
MAX_ITEMS = 4_096


class MultimodalItem(NamedTuple):
    """One image, sound or video in a prompt.

    Source: vLLM 0.32.0 multimodal/inputs.py (MultiModalFeatureSpec).
    """

    # vLLM's mm_hash, which names the content.
    identifier: str
    # The position of the item's first placeholder token.
    offset_tokens: int
    # The number of its placeholder tokens, at least one.
    length_tokens: int


# The items of a prompt in the order of their offsets, without overlaps.
Items: TypeAlias = tuple[MultimodalItem, ...]


def in_order(items: Sequence[MultimodalItem]) -> Items:
    """Return the items in the order of their offsets.

    Raises ValueError if there are more than MAX_ITEMS, if two overlap, or if one has no tokens or a negative offset.
    """
    if len(items) > MAX_ITEMS:
        raise ValueError(f"{len(items)} items; at most {MAX_ITEMS} are read")
    ordered = tuple(sorted(items, key=lambda item: item.offset_tokens))
    end = 0
    for item in ordered:
        if item.offset_tokens < end:
            raise ValueError(f"an item begins at token {item.offset_tokens}, before {end}, where the one before ends")
        if item.length_tokens < 1:
            raise ValueError(f"the item at token {item.offset_tokens} has no tokens")
        end = item.offset_tokens + item.length_tokens
    return ordered


def within(items: Items, start_tokens: int, end_tokens: int) -> Items:
    """Return the items with a token from start_tokens to before end_tokens, with offsets relative to start_tokens.

    The offset of an item that begins before start_tokens is negative.
    Source: vLLM 0.32.0 v1/core/kv_cache_utils.py:510 (_gen_mm_extra_hash_keys).
    """
    return tuple(
        item._replace(offset_tokens=item.offset_tokens - start_tokens)
        for item in items
        if item.offset_tokens < end_tokens and item.offset_tokens + item.length_tokens > start_tokens
    )


def named(name: int, items: Items, start_tokens: int, end_tokens: int) -> int:
    """Mix the items from start_tokens to before end_tokens into a hash that names these tokens.

    Different pictures yield different names. Without items, return `name` itself.
    """
    for item in within(items, start_tokens, end_tokens):
        name = xxh3_64_intdigest(f"{item.offset_tokens}\0{item.identifier}".encode("utf-8", "surrogatepass"), seed=name)
    return name
