# SPDX-License-Identifier: Apache-2.0
"""A process's place among several behind one port. Values only."""

from __future__ import annotations

import msgspec

# The data directory's lock admits one router, so its leases need no name of their own, and a restart takes over at
# once.
PRIVATE_TOKEN = "private"


class ProcessPart(msgspec.Struct, frozen=True):
    """Which of several processes behind one port this one is. listener: the descriptor of the listening socket; token:
    names the process in leases; folder: where the processes' own sockets are."""

    number: int
    listener: int
    token: str | None
    folder: str
