# SPDX-License-Identifier: Apache-2.0
"""What must agree before a record of an earlier process may be loaded.

A record is bytes without a description: the same bytes mean something else for another model, dtype, page layout, chunk
size or number of ranks. All of it is written in one canonical form, and the digest of that form names the folder the
records lie in, so that records of another identity are never found, not even looked at. Pure: no I/O.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass

from kvrouter.engine_patch.offload.disk.format.checksum import default_checksum

# Grows with every change of what the files of a folder mean: records of another version are foreign.
FORMAT_VERSION = 1
# 128 bits of the digest: no two identities meet, and the path stays short.
FOLDER_NAME_CHARS = 32


@dataclass(frozen=True)
class GroupIdentity:
    """One KV cache group. spec: its kind, or the text of its spec; page_bytes: of every layer of one rank, in canonical
    order."""

    spec: str
    page_bytes: tuple[int, ...]
    tokens_per_block: int


@dataclass(frozen=True)
class DiskIdentity:
    """What a record's bytes depend on.

    blocks_per_chunk: blocks under one key; hash_algorithm, hash_root: how the engine names blocks, and its first parent
    hash in hex, because keys of another scheme are never looked up; record_bytes: of a chunk, all ranks; num_ranks:
    ranks whose bytes stand in a record; parallel: how they divide the model ("tp=2 pp=1"), and which part of it this
    node has; extra: what else the caller knows to matter, such as the revision of the weights; checksum: of payloads,
    see `checksum.py`.
    """

    model: str
    dtype: str
    groups: tuple[GroupIdentity, ...]
    blocks_per_chunk: int
    hash_algorithm: str
    record_bytes: int
    num_ranks: int = 1
    parallel: str = ""
    hash_root: str = ""
    extra: tuple[tuple[str, str], ...] = ()
    checksum: str = dataclasses.field(default_factory=default_checksum)

    def canonical(self) -> bytes:
        """The same bytes for the same identity on every machine: JSON, keys sorted, no blanks, ASCII."""
        return json.dumps(self._plain(), sort_keys=True, separators=(",", ":")).encode("ascii")

    def digest(self) -> bytes:
        return hashlib.sha256(self.canonical()).digest()

    def folder_name(self) -> str:
        return self.digest().hex()[:FOLDER_NAME_CHARS]

    def readable(self) -> str:
        """A description of the folder for people: JSON, with the whole digest."""
        return json.dumps(self._plain() | {"digest": self.digest().hex()}, sort_keys=True, indent=1) + "\n"

    def _plain(self) -> dict[str, object]:
        return {"format_version": FORMAT_VERSION} | dataclasses.asdict(self)
