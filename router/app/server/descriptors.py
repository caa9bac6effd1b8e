# SPDX-License-Identifier: Apache-2.0
"""The system's limit on open files, raised as far as allowed, and the number of connections that fits in it."""

from __future__ import annotations

import contextlib
import logging
import resource

log = logging.getLogger(__name__)

# Half of the open files are for clients; the other half is for Redis, engines (seven a worker) and libraries.
FILES_PER_CONNECTION = 2


def allow_descriptors() -> None:
    """Allow as many open files as the system grants: each worker takes some ten, and the usual soft limit is 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def connections_possible(wanted: int) -> int:
    """Return `wanted`, or fewer if the limit on open files leaves less, and raise that limit if possible.

    Without a free descriptor, no connection can be accepted or made.
    """
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < wanted * FILES_PER_CONNECTION and (most == resource.RLIM_INFINITY or most > files):
        target = wanted * FILES_PER_CONNECTION
        files = target if most == resource.RLIM_INFINITY else min(target, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
    possible = min(wanted, files // FILES_PER_CONNECTION)
    if possible < wanted:
        log.warning(
            "fewer connections than usual: the limit on open files is low; raise it (ulimit -n)",
            extra={"connections": possible, "open_files": files},
        )
    return possible
