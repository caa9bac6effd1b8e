# SPDX-License-Identifier: Apache-2.0
"""A worker's residency, computed from its values in Redis: the checkpoint and the log after it.

It is an oracle and shares no code with the router.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

Entry = tuple[bytes, Mapping[bytes, bytes]]


def place_keys(tag: str, meta: Mapping[bytes, bytes]) -> dict[str, str]:
    """Return the key of each place of the checkpoint, by the text of the place.

    Args:
        tag: The beginning of the worker's keys, `kvr:3:{model/worker}`.
        meta: The worker's `meta` hash.
    """
    names = [part.partition("=")[0] for part in meta.get(b"places", b"").decode().split()]
    return {name: f"{tag}:{meta[b'epoch'].decode()}:{name}" for name in names}


def residency_of(
    meta: Mapping[bytes, bytes], stored: Mapping[str, bytes | None], log: Iterable[Entry]
) -> dict[str, set[int]]:
    """Return the hashes of the resident blocks, by the text of their place.

    Log entries of other programs are ignored.

    Args:
        meta: The worker's `meta` hash.
        stored: The values of the keys of `place_keys`, by place; they may be newer than `meta`.
        log: The entries of the worker's log; they may be newer than both.
    """
    held = {place: _hashes(value or b"") for place, value in stored.items()}
    if b"epoch" not in meta:
        return held
    for _, fields in log:
        if b"commit" not in fields:
            continue
        if int(fields[b"commit"]) <= int(meta[b"checkpoint"]) or fields[b"epoch"] != meta[b"epoch"]:
            continue
        for place, added, removed in msgspec.msgpack.decode(fields.get(b"changes", b"\x90")):
            held[place] = (held.get(place, set()) - _hashes(removed)) | _hashes(added)
    return held


def read_residency(client: Any, tag: str) -> dict[str, set[int]]:
    """Read the residency of the worker whose keys begin with `tag`."""
    meta = client.hgetall(f"{tag}:meta")
    stored = {place: client.get(key) for place, key in place_keys(tag, meta).items()}
    return residency_of(meta, stored, client.xrange(f"{tag}:log"))


def _hashes(packed: bytes) -> set[int]:
    assert len(packed) % 8 == 0
    return {int.from_bytes(packed[at : at + 8], "big") for at in range(0, len(packed), 8)}
