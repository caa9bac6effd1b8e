# SPDX-License-Identifier: Apache-2.0
"""The place of a process among several behind one port. Values only."""

from __future__ import annotations

import msgspec

# The lock of the data directory admits one router. So its leases need no unique name, and after a restart it takes over
# its own leases at once.
PRIVATE_TOKEN = "private"


class ProcessPart(msgspec.Struct, frozen=True):
    """The identity of one of several processes behind one port."""

    number: int
    # The descriptor of the listening socket.
    listener: int
    # The name of the process in leases; None: a new one for each start.
    token: str | None
    # The folder of the processes' own sockets.
    folder: str
