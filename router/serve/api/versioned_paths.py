# SPDX-License-Identifier: Apache-2.0
"""The version in the paths of this API: each path of ours is served as it stands and below `/v1`, and is one endpoint.

What an OpenAI client sends below `/v1` is not ours, and has its version in its own path. Everything behind the routing
table sees a path without the version, so authorization, handlers and metrics have one name for an endpoint."""

from __future__ import annotations

from collections.abc import Iterable

VERSION = "/v1"
_BELOW = VERSION + "/"


class VersionedPaths:
    """paths: of ours, without the version. Paths with the same first part are versioned together."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._first = frozenset(_first_part(path) for path in paths if not path.startswith(_BELOW))

    def unversioned(self, path: str) -> str:
        """The same path without the version; one that is not ours stays as it is."""
        if not path.startswith(_BELOW):
            return path
        rest = path.removeprefix(VERSION)
        return rest if _first_part(rest) in self._first else path

    def spellings(self, path: str) -> tuple[str, ...]:
        """Every path by which a client reaches this one."""
        return (path, VERSION + path) if self.unversioned(VERSION + path) == path else (path,)


def _first_part(path: str) -> str:
    """`workers` of `/workers/w0`."""
    return path[1:].partition("/")[0]
