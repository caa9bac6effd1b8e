# SPDX-License-Identifier: Apache-2.0
"""SGLang's page hashes, compiled and uncompiled, against their definition written out with struct and hashlib."""

from __future__ import annotations

import hashlib
import itertools
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.router.model.kvcache import chain_hash, page_hash
from kvrouter.router.model.kvcache.block_hash import HashScheme, HashSpace
from kvrouter.router.model.kvcache.prompt_hasher import PromptHasher, SegmentMemory
from tests.support.examples import examples

PAGES = st.sampled_from([1, 2, 3, 16, 32, 64])
IDS = st.integers(0, 200_000) | st.sampled_from([0, 2**31, 2**32 - 1])
WIDE_IDS = IDS | st.sampled_from([2**32, 2**63 - 1])
TEXTS = st.none() | st.text(min_size=1, max_size=80)
NATIVE = not chain_hash.__file__.endswith(".py")


def definition(ids: list[int], page: int, salt: str | None, extra_key: str | None, bigrams: bool) -> list[int]:
    """Return the hashes as they appear on the wire, as unsigned numbers."""
    units = [(a, b) for a, b in itertools.pairwise(ids)] if bigrams else [(token_id,) for token_id in ids]
    before = b"" if salt is None else hashlib.sha256(b"sglang-cache-salt-v1\0" + salt.encode()).digest()
    hashes = []
    for start in range(0, len(units) - page + 1, page):
        flat = [number for unit in units[start : start + page] for number in unit]
        wide = max(flat) > 0xFFFF_FFFF
        body = b"\xff" + struct.pack(f"<{len(flat)}Q", *flat) if wide else struct.pack(f"<{len(flat)}I", *flat)
        before = hashlib.sha256(before + body).digest()
        first = before[:8]
        if extra_key is not None:
            name = extra_key.encode()
            seed = b"sglang-kv-event-namespace-v1\x01" + struct.pack("<Q", len(name)) + name + b"\x00"
            first = hashlib.sha256(hashlib.sha256(seed).digest() + first).digest()[:8]
        hashes.append(struct.unpack(">Q", first)[0])
    return hashes


@pytest.mark.parametrize(
    "native", [pytest.param(True, marks=pytest.mark.skipif(not NATIVE, reason="no compiler")), False]
)
@settings(max_examples=examples(400), deadline=None)
@given(st.lists(WIDE_IDS, max_size=200), PAGES, TEXTS, TEXTS, st.booleans())
def test_pages_hash_as_defined(
    native: bool, ids: list[int], page: int, salt: str | None, extra_key: str | None, bigrams: bool
) -> None:
    algo = "sglang_bigram" if bigrams else "sglang"
    with pytest.MonkeyPatch.context() as patch:
        if not native:
            patch.setattr(page_hash, "hash_pages", lambda *_: None)
        hashes, _ = page_hash.page_chain(algo, None, np.array(ids, np.int64), page, salt, extra_key)
    assert hashes.tolist() == definition(ids, page, salt, extra_key, bigrams)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(IDS, max_size=200), PAGES, TEXTS, TEXTS, st.booleans(), st.integers(1, 5))
def test_a_prompt_in_segments_hashes_as_one_chain(
    ids: list[int], page: int, salt: str | None, extra_key: str | None, bigrams: bool, segment: int
) -> None:
    scheme = HashScheme("sglang_bigram" if bigrams else "sglang", b"")
    space = HashSpace(scheme, page, None if extra_key is None else ("adapter", extra_key), salt)
    memory = SegmentMemory(1 << 20)
    for _ in range(2):
        hasher = PromptHasher(space, np.array(ids, np.int64), memory, segment)
        while len(hasher.extend()):
            pass
        assert hasher.hashes.tolist() == definition(ids, page, salt, extra_key, bigrams)


def test_an_empty_salt_is_none() -> None:
    # Source: SGLang 0.5.23 managers/schedule_batch.py (`cache_salt or None`).
    ids = np.arange(8)
    plain, _ = page_hash.page_chain("sglang", None, ids, 4, None, None)
    assert page_hash.page_chain("sglang", None, ids, 4, "", None)[0].tolist() == plain.tolist()


@pytest.mark.skipif(not NATIVE, reason="installed without a C compiler")
@pytest.mark.parametrize("parent, namespace, pages", [(b"x", b"", 1), (b"", b"x", 1), (b"", b"", 4)])
def test_sizes_that_do_not_fit_are_refused(parent: bytes, namespace: bytes, pages: int) -> None:
    with pytest.raises(ValueError):
        chain_hash.hash_pages(parent, np.arange(12), 4, True, namespace, np.empty(pages, np.uint64))
