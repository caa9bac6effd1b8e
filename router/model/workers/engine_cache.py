# SPDX-License-Identifier: Apache-2.0
"""An engine's description of its KV cache, from its metrics page."""

from __future__ import annotations

from typing import Annotated

import msgspec

# Far beyond any engine. A page may contain any number, and sizes are multiplied and shown.
MAX_COUNT = 1 << 48

Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)]
CACHING_OFF = "its prefix caching is off by its own metrics page, so it computes every prompt in full"


class EngineCache(msgspec.Struct, frozen=True):
    """The KV cache of one engine core. A field is None if the engine does not state it."""

    # Whether prompts are reused at all.
    prefix_caching: bool | None = None
    # Tokens of one block; the smallest size if groups differ.
    block_size: Count | None = None
    # Blocks on the accelerator.
    blocks: Count | None = None
    # Tokens of context that fit on the accelerator. For hybrid models, this differs from blocks times block_size.
    tokens: Count | None = None

    @property
    def problem(self) -> str:
        """Why the engine reuses nothing, by its own description, or "" if it reuses prompts or does not say."""
        return CACHING_OFF if self.prefix_caching is False else ""


def positive_count(text: bytes) -> int | None:
    """Return the count in a label or a sample, or None if there is none.

    Engines print `None` for unknown values, and samples are floats (`128.0`).
    """
    try:
        count = int(float(text))
    except (ValueError, OverflowError):
        return None
    return count if 0 < count <= MAX_COUNT else None
