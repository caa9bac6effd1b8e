# SPDX-License-Identifier: Apache-2.0
"""Images and other media among the tokens of a prompt, as vLLM's render endpoints return and /generate takes them. Pure.

Source: vLLM 0.32.0 entrypoints/scale_out/token_in_token_out/protocol.py (MultiModalFeatures).
"""

from __future__ import annotations

import msgspec

from kvrouter.router.model.kvcache.multimodal import Items, MultimodalItem, in_order


class _Placeholder(msgspec.Struct):
    offset: int
    length: int


class MediaFeatures(msgspec.Struct):
    """Images and other media by kind (image, audio, video); both lists of a kind have the same order."""

    mm_hashes: dict[str, list[str]] = {}
    mm_placeholders: dict[str, list[_Placeholder]] = {}


def items_of(features: MediaFeatures | None, num_tokens: int) -> Items:
    """Return the media in the order of their places in a prompt of this many tokens.

    Raises ValueError if hashes and places do not match, or if one is outside the prompt.
    """
    if features is None:
        return ()
    if features.mm_hashes.keys() != features.mm_placeholders.keys():
        raise ValueError("mm_hashes and mm_placeholders are of different kinds")
    items = in_order(
        [
            MultimodalItem(identifier, place.offset, place.length)
            for kind, identifiers in features.mm_hashes.items()
            for identifier, place in zip(identifiers, features.mm_placeholders[kind], strict=True)
        ]
    )
    if items and items[-1].offset_tokens + items[-1].length_tokens > num_tokens:
        raise ValueError(f"an item ends after the prompt's {num_tokens} tokens")
    return items
