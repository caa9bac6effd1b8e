# SPDX-License-Identifier: Apache-2.0
"""The checksum of a chunk that one engine fetches from another. It covers the key and the content."""

from __future__ import annotations

from collections.abc import Callable

from kvrouter.engine_patch.offload.disk.format.checksum import checksum
from kvrouter.engine_patch.offload.key import OffloadKey


class ChunkChecksum:
    """A callable that returns the checksum of a key and the content of its slot.

    The content of one chunk under the key of another has another checksum.
    """

    def __init__(self, algorithm: str, slot: Callable[[int], memoryview], chunk_bytes: int) -> None:
        """Raise ValueError if the algorithm is not available here.

        Args:
            algorithm: A name of `disk/format/checksum.py`, which is part of the identity that both engines share.
            slot: Returns the memory of a slot.
            chunk_bytes: Bytes of a chunk; the padding of its slot does not count.
        """
        self._sum = checksum(algorithm)
        self._slot = slot
        self._chunk_bytes = chunk_bytes

    def __call__(self, key: OffloadKey, slot: int) -> int:
        """Return the checksum, at most 64 bits."""
        return self._sum(self._slot(slot).cast("B")[: self._chunk_bytes]) ^ self._sum(memoryview(key))
