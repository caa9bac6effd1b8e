# SPDX-License-Identifier: Apache-2.0
"""The version in the paths of this API: each of our paths is served unchanged and below `/v1`, as one endpoint.

An OpenAI path below `/v1` is not ours, and contains its own version. All code behind the routing table sees a path
without the version, so authorization, handlers and metrics have one name for an endpoint.
"""

from __future__ import annotations

from collections.abc import Iterable

VERSION = "/v1"
_BELOW = VERSION + "/"


class VersionedPaths:
    """The set of our paths, given without the version. Paths with the same first part are versioned together."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._first = frozenset(_first_part(path) for path in paths if not path.startswith(_BELOW))

    def unversioned(self, path: str) -> str:
        """Return the path without the version, or unchanged if it is not ours."""
        if not path.startswith(_BELOW):
            return path
        rest = path.removeprefix(VERSION)
        return rest if _first_part(rest) in self._first else path

    def spellings(self, path: str) -> tuple[str, ...]:
        """Return every path by which a client reaches this one."""
        return (path, VERSION + path) if self.unversioned(VERSION + path) == path else (path,)


def _first_part(path: str) -> str:
    """Return the first part of a path: `workers` for `/workers/w0`."""
    return path[1:].partition("/")[0]
