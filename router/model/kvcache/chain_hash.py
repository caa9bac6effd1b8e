# SPDX-License-Identifier: Apache-2.0
"""What `chain_hash.pyx` does, compiled, without a Python object a block. This stands for it where there was no C
compiler: it leaves all blocks to `block_hash.py` and
all pages to `page_hash.py`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray


def hash_blocks(
    parent: bytes,
    token_ids: NDArray[np.int64],
    block_size: int,
    endings: tuple[bytes, ...],
    cbor: bool,
    digest: Callable[[bytes], bytes] | None,
    hashes: NDArray[np.uint64],
) -> bytes | None:
    """Fill `hashes`, one for each block of `token_ids`, with the last 8 bytes of the digests, each the next one's
    parent. Returns the last whole digest, None for blocks that have to be serialised in Python.

    endings: of each block, the serialised bytes from its extra keys on; the last one is that of all further blocks.
    cbor: serialise as cbor2 does, else as pickle. digest: None for SHA-256. Raises ValueError on sizes that do not fit.
    """
    return None


def hash_pages(
    parent: bytes,
    token_ids: NDArray[np.int64],
    page_size: int,
    bigrams: bool,
    namespace: bytes,
    hashes: NDArray[np.uint64],
) -> bytes | None:
    """Fill `hashes`, one for each page of `token_ids`, as `page_hash.py` defines them. Returns the last whole digest,
    None for pages that have to be hashed in Python.

    parent, namespace: 32 bytes or none. Raises ValueError on sizes that do not fit.
    """
    return None


def hash_sha256(data: bytes, plain: bool) -> bytes:
    """plain: without the processor's instructions for it."""
    return hashlib.sha256(data).digest()
