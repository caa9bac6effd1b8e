# SPDX-License-Identifier: Apache-2.0
"""The items of a stream that say whether its consumer has everything that was sent. Values only."""

from __future__ import annotations

import msgspec


class FellBehind(msgspec.Struct, frozen=True):
    """The moment from which the consumer is behind: a replay or snapshot is under way, or messages are held for one."""

    # Whether batches are known to follow those that were yielded. If not, the stream may have ended with them.
    missing: bool = False


class CaughtUp(msgspec.Struct, frozen=True):
    """The moment at which nothing is under way, held or waiting, and everything that arrived was yielded.

    A connection may be lost between `FellBehind` and this item.
    """
