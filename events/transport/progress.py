# SPDX-License-Identifier: Apache-2.0
"""The items of a stream that say whether more was sent than its consumer has been given. Values only."""

from __future__ import annotations

import msgspec


class FellBehind(msgspec.Struct, frozen=True):
    """A replay or a snapshot is under way, or messages are held behind one: more was sent than was yielded."""

    # Batches that follow those yielded are known to exist; else the stream may just as well have ended there.
    missing: bool = False


class CaughtUp(msgspec.Struct, frozen=True):
    """Nothing is under way, held or waiting, and everything that was is yielded.

    A lost connection may come in between."""
