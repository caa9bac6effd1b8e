# SPDX-License-Identifier: Apache-2.0
"""The items of a stream that say whether its consumer has been given everything that was sent. Values only."""

from __future__ import annotations

import msgspec


class FellBehind(msgspec.Struct, frozen=True):
    """The consumer is behind: a replay or a snapshot is under way, or messages are held until one ends."""

    # Whether batches are known to follow those that were yielded. If not, the stream may have ended with them.
    missing: bool = False


class CaughtUp(msgspec.Struct, frozen=True):
    """Nothing is under way, held or waiting, and everything that arrived was yielded. A connection may be lost between
    `FellBehind` and this item."""
