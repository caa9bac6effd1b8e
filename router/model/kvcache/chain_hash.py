# SPDX-License-Identifier: Apache-2.0
"""The fallback for `chain_hash.pyx`, which hashes chains in compiled code without a Python object per block.

This module is used where no C compiler was available at installation. It leaves all blocks to `block_hash.py` and all
pages to `page_hash.py`.
"""

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
    """Fill `hashes` with the last 8 bytes of each block's digest, which is the parent of the next block.

    Args:
        parent: The parent of the first block.
        token_ids: The ids of all blocks.
        block_size: Ids in a block.
        endings: The serialised bytes of each block from its extra keys on; the last entry holds for all further blocks.
        cbor: Whether to serialise like cbor2 instead of pickle.
        digest: The hash function, or None for SHA-256.
        hashes: The output, one entry for each block. Raises ValueError if any of the sizes does not fit.

    Returns:
        The last whole digest, or None if the blocks have to be serialised in Python.
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
    """Fill `hashes` with the hash of each page, as `page_hash.py` defines it.

    Args:
        parent: The digest before the first page, 32 bytes or none.
        token_ids: The ids of all pages, and with `bigrams` one more.
        page_size: Ids in a page.
        bigrams: Whether a page consists of pairs of successive ids.
        namespace: The seed of a LoRA's namespace, 32 bytes or none.
        hashes: The output, one entry for each page. Raises ValueError if any of the sizes does not fit.

    Returns:
        The last whole digest, or None if the pages have to be hashed in Python.
    """
    return None


def hash_sha256(data: bytes, plain: bool) -> bytes:
    """Return the SHA-256 digest of `data`; `plain` keeps compiled code from using the processor's SHA instructions."""
    return hashlib.sha256(data).digest()
