# SPDX-License-Identifier: Apache-2.0
"""The workers that this process follows, as it reports them to the other routers. Their leases and commits keep it."""

from __future__ import annotations

# The store, and so every other router, may lack for so long what was learned; a commit takes some milliseconds.
LATE_S = 1.0


class HeldWorkers:
    """Workers are named by their tags (`keys.worker_tag`)."""

    def __init__(self) -> None:
        # The number of each lease.
        self.numbers: dict[str, int] = {}
        # Those of which the store took nothing at the last try.
        self.refused: set[str] = set()
        # Since when the store lacks something, by this process's clock.
        self.unwritten_since_s: dict[str, float] = {}

    def late(self, now_s: float) -> list[str]:
        """Those of which the store lacks something for longer than LATE_S."""
        return [
            tag for tag, since_s in self.unwritten_since_s.items() if now_s - since_s > LATE_S and tag in self.numbers
        ]
