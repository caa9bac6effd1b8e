# SPDX-License-Identifier: Apache-2.0
"""Readiness for the service manager that started this process (systemd's `Type=notify`), if there is one.

Source: sd_notify(3): a datagram to the unix socket that `NOTIFY_SOCKET` names.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping

log = logging.getLogger(__name__)

VARIABLE = "NOTIFY_SOCKET"
READY = b"READY=1"


def announce(line: str, environment: Mapping[str, str]) -> None:
    """Print `line`, which reports that the router serves, and notify the service manager."""
    print(line, flush=True)
    address = environment.get(VARIABLE)
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifier:
        try:
            # An `@` stands for the zero byte that an abstract address begins with.
            notifier.sendto(READY, f"\0{address[1:]}" if address.startswith("@") else address)
        except OSError as error:
            log.warning(
                "the service manager cannot be notified; it will take the start for failed",
                extra={"socket": address, "error": str(error)},
            )
