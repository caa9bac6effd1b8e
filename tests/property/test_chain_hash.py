# SPDX-License-Identifier: Apache-2.0
"""The compiled hash chain against pickle, cbor2, hashlib and xxhash, byte for byte."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.router.model.kvcache import block_hash, chain_hash
from kvrouter.router.model.kvcache.block_hash import (
    ExtraKeys,
    HashScheme,
    hash_block,
    hash_chain,
    reduce_hash,
)
from kvrouter.router.model.workers.hash_algorithms import ALGORITHMS
from tests.support.examples import examples

pytestmark = pytest.mark.skipif(chain_hash.__file__.endswith(".py"), reason="installed without a C compiler")

# The smallest and largest values of each encoding of an integer in pickle and in CBOR.
ENDS = [0, 23, 24, 255, 256, 2**16 - 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**39 - 1, 2**39, 2**55, 2**63 - 1]
IDS = st.sampled_from(ENDS) | st.integers(0, 200_000) | st.integers(0, 2**63 - 1)
TEXTS = st.text(max_size=300)
KEYS = st.one_of(
    st.tuples(st.just("lora"), TEXTS, TEXTS),
    st.tuples(st.just("mm"), TEXTS, st.integers(-(2**20), 2**20)),
    st.tuples(st.just("cache_salt"), TEXTS),
    # The bytes are copied, because a pickle would refer back to an object that is identical to the parent.
    st.tuples(st.just("prompt_embeds"), st.binary(max_size=300).map(bytearray).map(bytes)),
)
EXTRA_KEYS = st.none() | st.lists(KEYS, min_size=1, max_size=4).map(tuple)
SIZES = st.integers(1, 64) | st.sampled_from([255, 256, 528])
# The most ids of 10 bytes, plain and after SHA-256, that are sure to fit in a pickle's first frame.
FRAME_IDS = 6_522


def schemes(algo: str) -> st.SearchStrategy[HashScheme]:
    size = len(HashScheme.from_seed(algo, "").none_hash)
    return st.builds(HashScheme, st.just(algo), st.binary(min_size=size, max_size=size))


def one_by_one(
    scheme: HashScheme, parent: bytes | None, ids: list[int], block_size: int, keys: list[ExtraKeys | None]
) -> tuple[list[int], bytes]:
    """Hash each block with `hash_block`; return the reduced hashes and the last full hash."""
    hashes = []
    for at in range(0, len(ids) - block_size + 1, block_size):
        parent = hash_block(scheme, parent, ids[at : at + block_size], keys[min(at // block_size, len(keys) - 1)])
        hashes.append(reduce_hash(parent))
    return hashes, parent or scheme.none_hash


def equal_each_other(
    scheme: HashScheme, parent: bytes | None, ids: list[int], block_size: int, keys: list[ExtraKeys | None]
) -> None:
    """Compare `hash_chain`, with and without the compiled loop, with hashing block by block."""
    expected = one_by_one(scheme, parent, ids, block_size, keys)
    for native in (chain_hash.hash_blocks, lambda *_: None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(block_hash, "hash_blocks", native)
            hashes, last = hash_chain(scheme, parent, np.array(ids, np.int64), block_size, keys)
        assert (hashes.tolist(), last) == expected


@pytest.mark.parametrize("algo", ALGORITHMS)
@settings(max_examples=examples(400), deadline=None)
@given(st.data())
def test_a_compiled_chain_equals_a_plain_one(algo: str, data: st.DataObject) -> None:
    block_size = data.draw(SIZES)
    size = data.draw(st.integers(0, 3 * block_size + 1))
    rng = data.draw(st.randoms(use_true_random=False))
    ids_in_use = data.draw(st.lists(IDS, min_size=1, max_size=40))
    ids = [rng.choice(ids_in_use) for _ in range(size)]
    parent = data.draw(st.none() | st.binary(min_size=2, max_size=300))
    keys: list[ExtraKeys | None] = data.draw(st.lists(EXTRA_KEYS, min_size=1, max_size=4))
    equal_each_other(data.draw(schemes(algo)), parent, ids, block_size, keys)


@pytest.mark.parametrize("algo", ALGORITHMS)
@pytest.mark.parametrize("block_size", [FRAME_IDS, FRAME_IDS + 1, 20_000])
@pytest.mark.parametrize("path_bytes", [0, 100, 70_000])
def test_long_blocks_and_names_hash_alike(algo: str, block_size: int, path_bytes: int) -> None:
    keys: ExtraKeys | None = (("lora", "l", "p" * path_bytes),) if path_bytes else None
    equal_each_other(HashScheme.from_seed(algo, ""), None, [2**63 - 1] * (2 * block_size), block_size, [keys])


def hash_blocks(**changes: Any) -> bytes | None:
    arguments: dict[str, Any] = {
        "parent": bytes(32),
        "token_ids": np.arange(12),
        "block_size": 4,
        "endings": (b"N\x87\x94.",),
        "cbor": False,
        "digest": None,
        "hashes": np.empty(3, np.uint64),
    }
    return chain_hash.hash_blocks(**{**arguments, **changes})


@pytest.mark.parametrize("cbor", [False, True])
def test_what_needs_another_form_is_left_to_python(cbor: bool) -> None:
    assert hash_blocks(cbor=cbor) is not None
    assert hash_blocks(cbor=cbor, parent=bytes(255)) is not None
    assert hash_blocks(cbor=cbor, parent=bytes(256)) is None
    assert hash_blocks(cbor=cbor, block_size=2**61, hashes=np.empty(0, np.uint64)) == bytes(32)
    for bad in (-1, -(2**63)):
        assert hash_blocks(cbor=cbor, token_ids=np.array([*range(11), bad])) is None
    ids, hashes = np.zeros(FRAME_IDS + 1, np.int64), np.empty(1, np.uint64)
    for size in (FRAME_IDS, FRAME_IDS + 1):
        last_hash = hash_blocks(cbor=cbor, token_ids=ids, block_size=size, hashes=hashes)
        assert (last_hash is None) == (size > FRAME_IDS and not cbor)


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": 0},
        {"block_size": -4},
        {"block_size": 5},
        {"block_size": 2**61},
        {"endings": ()},
        {"digest": lambda _: bytes(7)},
        {"digest": lambda _: bytes(256)},
    ],
    ids="-".join,
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        hash_blocks(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"parent": None},
        {"endings": (None,)},
        {"endings": [b"N"]},
        {"token_ids": None},
        {"digest": str},
        {"digest": {}.get},
    ],
    ids="-".join,
)
def test_other_types_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        hash_blocks(**changes)


@pytest.mark.parametrize("plain", [False, True])
def test_sha256_equals_hashlibs(plain: bool) -> None:
    rng = random.Random(1)
    for size in (*range(301), 4_095, 65_536, 1_000_003):
        data = rng.randbytes(size)
        assert chain_hash.hash_sha256(data, plain) == hashlib.sha256(data).digest(), size
