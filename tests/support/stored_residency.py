# SPDX-License-Identifier: Apache-2.0
"""What a worker holds, read from Redis' own values: the checkpoint, and the log behind it. An oracle: it shares no code
with the router."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

Entry = tuple[bytes, Mapping[bytes, bytes]]


def place_keys(tag: str, meta: Mapping[bytes, bytes]) -> dict[str, str]:
    """Return the key of each place of the checkpoint, by the text of the place. tag: `kvr:3:{model/worker}`."""
    names = [part.partition("=")[0] for part in meta.get(b"places", b"").decode().split()]
    return {name: f"{tag}:{meta[b'epoch'].decode()}:{name}" for name in names}


def residency_of(
    meta: Mapping[bytes, bytes], stored: Mapping[str, bytes | None], log: Iterable[Entry]
) -> dict[str, set[int]]:
    """Hashes by the text of their place. stored: the values of `place_keys`, by place. They may be newer than `meta`,
    and the log newer than both; entries of other programs count for nothing."""
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
    """Of the worker whose keys begin with `tag`."""
    meta = client.hgetall(f"{tag}:meta")
    stored = {place: client.get(key) for place, key in place_keys(tag, meta).items()}
    return residency_of(meta, stored, client.xrange(f"{tag}:log"))


def _hashes(packed: bytes) -> set[int]:
    assert len(packed) % 8 == 0
    return {int.from_bytes(packed[at : at + 8], "big") for at in range(0, len(packed), 8)}
