# SPDX-License-Identifier: Apache-2.0
"""The facts that must agree before a record of an earlier process may be loaded.

A record is bytes without a description: the same bytes mean something else for another model, dtype, page layout, chunk
size or number of ranks. All of these are written in one canonical form, and the digest of that form names the folder of
the records, so that records of another identity are never found, not even looked at. Pure: no I/O.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass

from kvrouter.engine_patch.offload.disk.format.checksum import default_checksum

# The version grows with every change of the meaning of a folder's files: records of another version are foreign.
FORMAT_VERSION = 1
# 128 bits of the digest: no two identities share a folder, and the path stays short.
FOLDER_NAME_CHARS = 32


@dataclass(frozen=True)
class GroupIdentity:
    """One KV cache group."""

    # The group's kind, or the text of its spec.
    spec: str
    # Bytes of a page of every layer of one rank, in canonical order.
    page_bytes: tuple[int, ...]
    tokens_per_block: int


@dataclass(frozen=True)
class DiskIdentity:
    """The facts on which the meaning of a record's bytes depends."""

    model: str
    dtype: str
    groups: tuple[GroupIdentity, ...]
    # Blocks under one key.
    blocks_per_chunk: int
    # The engine's way of naming blocks, because keys of another scheme are never looked up.
    hash_algorithm: str
    # Bytes of a chunk of all ranks.
    record_bytes: int
    # Ranks whose bytes are in a record.
    num_ranks: int = 1
    # The division of the model among the ranks ("tp=2 pp=1"), and the part of it on this node.
    parallel: str = ""
    # The engine's first parent hash in hex, which is part of its way of naming blocks.
    hash_root: str = ""
    # Other facts that the caller knows to matter, such as the revision of the weights.
    extra: tuple[tuple[str, str], ...] = ()
    # The algorithm of the payloads' checksums, see `checksum.py`.
    checksum: str = dataclasses.field(default_factory=default_checksum)

    def canonical(self) -> bytes:
        """Return the same bytes for the same identity on every machine: JSON, keys sorted, no blanks, ASCII."""
        return json.dumps(self._plain(), sort_keys=True, separators=(",", ":")).encode("ascii")

    def digest(self) -> bytes:
        """Return the SHA-256 of the canonical form."""
        return hashlib.sha256(self.canonical()).digest()

    def folder_name(self) -> str:
        """Return the first hex digits of the digest."""
        return self.digest().hex()[:FOLDER_NAME_CHARS]

    def readable(self) -> str:
        """Return a description of the folder for people: JSON, with the whole digest."""
        return json.dumps(self._plain() | {"digest": self.digest().hex()}, sort_keys=True, indent=1) + "\n"

    def _plain(self) -> dict[str, object]:
        return {"format_version": FORMAT_VERSION} | dataclasses.asdict(self)
