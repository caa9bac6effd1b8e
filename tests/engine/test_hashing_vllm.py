# SPDX-License-Identifier: Apache-2.0
"""Our block hashes, compared with those of the installed vLLM on random requests."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from kvrouter.router.model.kvcache.block_hash import (
    HashScheme,
    HashSpace,
    SchemeVerified,
    known_schemes,
    reduce_hash,
    verify_scheme,
)
from kvrouter.router.model.kvcache.multimodal import Items, MultimodalItem
from kvrouter.router.model.kvcache.prompt_hasher import PromptHasher, SegmentMemory
from kvrouter.router.model.workers.hash_algorithms import ALGORITHMS

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

CASES_PER_SCHEME = 260
SEEDS = (None, "0", "42", "", "random")
# Some names are also salts, tags, paths or one character, because pickle writes an object met twice as a reference.
NAMES = ("sql", "lora", "cache_salt", "a", "é", "日本", "tenant", "/adapters/sql", "x" * 300)
WIDTHS = (2**8, 2**16, 2**18, 2**31, 2**32, 2**63)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function from (algo, seed) to vLLM's hash function, with NONE_HASH set as at the start of an engine."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    monkeypatch.setattr(kv_cache_utils, "_NONE_HASH_SEED", None)
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"", raising=False)

    def start(algo: str, seed: str | None) -> Any:
        if seed is None:
            monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        else:
            monkeypatch.setenv("PYTHONHASHSEED", seed)
        function = get_hash_fn_by_name(algo)
        kv_cache_utils.init_none_hash(function)
        return function

    return start


def received(value: Any, kind: Any) -> Any:
    """Return a value as the engine core receives it, through vLLM's own message codec."""
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    return MsgpackDecoder(kind).decode(MsgpackEncoder().encode(value))


def request(function: Any, space: HashSpace, ids: list[int], items: Items = ()) -> Any:
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    lora = None if space.lora is None else received(LoRARequest(space.lora[0], 1, space.lora[1]), LoRARequest)
    return Request(
        request_id="r",
        prompt_token_ids=ids,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        lora_request=lora,
        mm_features=[
            MultiModalFeatureSpec(None, "image", received(name, str), PlaceholderRange(offset, length))
            for name, offset, length in items
        ],
        cache_salt=None if space.cache_salt is None else received(space.cache_salt, str),
        block_hasher=get_request_block_hasher(space.block_size, function),
    )


def scheme_of(algo: str, seed: str | None) -> HashScheme:
    from vllm.v1.core import kv_cache_utils

    scheme = HashScheme.from_bytes(algo, kv_cache_utils.NONE_HASH)
    if seed is not None or not algo.startswith("xxhash"):
        assert scheme == HashScheme.default(algo, seed)
    return scheme


def random_space(scheme: HashScheme, chance: random.Random) -> HashSpace:
    lora = (chance.choice(NAMES), chance.choice(NAMES)) if chance.random() < 0.4 else None
    salt = chance.choice((*NAMES, "")) if chance.random() < 0.4 else None
    return HashSpace(scheme, chance.choice((1, 2, 3, 4, 16, 16, 32, 100)), lora, salt)


def random_items(num_tokens: int, chance: random.Random) -> Items:
    """Return no image for most prompts, and else up to four, some of them twice, side by side or apart."""
    count = min(chance.choice((0, 0, 0, 0, 0, 0, 1, 2, 4)), num_tokens // 2)
    cuts = sorted(chance.sample(range(num_tokens + 1), 2 * count))
    starts = [chance.choice((cuts[2 * i - 1] if i else 0, cuts[2 * i])) for i in range(count)]
    return tuple(MultimodalItem(chance.choice(NAMES), start, cuts[2 * i + 1] - start) for i, start in enumerate(starts))


@pytest.mark.parametrize("algo", ALGORITHMS)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_prompts_hash_as_in_vllm(engine: Any, algo: str, seed: str | None) -> None:
    chance = random.Random(f"{algo} {seed}")
    function, scheme = engine(algo, seed), scheme_of(algo, seed)
    # The memory is small and the spaces recur, so that segments are remembered, evicted and hashed again.
    memory = SegmentMemory(100_000)
    spaces = [random_space(scheme, chance) for _ in range(40)]
    prefix = [chance.randrange(2**17) for _ in range(200)]
    questions: list[tuple[HashSpace, list[int], Items]] = []
    for _ in range(CASES_PER_SCHEME):
        space, width = chance.choice(spaces), chance.choice(WIDTHS)
        ids = prefix[: chance.randrange(201)] + [chance.randrange(width) for _ in range(chance.randrange(100))]
        ids = ids or [0]
        items = random_items(len(ids), chance)
        if questions and chance.random() < 0.2:
            # Repeat the prompt, or its tokens with other images.
            space, ids, known_items = questions[-1]
            items = known_items if chance.random() < 0.5 else random_items(len(ids), chance)
        questions.append((space, ids, items))
        hasher = PromptHasher(space, np.array(ids, np.int64), memory, chance.choice((1, 3, 64)), items)
        while hasher.extend().size:
            pass
        expected = [reduce_hash(digest) for digest in request(function, space, ids, items).block_hashes]
        assert hasher.hashes.tolist() == expected, (space, ids, items)
    assert memory.hits
    assert memory.misses


@pytest.mark.parametrize("block_size", [528, 13_107, 20_000])
def test_long_blocks_hash_as_in_vllm(engine: Any, block_size: int) -> None:
    # 13,107 ids of 5 bytes fill a pickle frame of 64 KiB.
    function, scheme = engine("sha256", None), scheme_of("sha256", None)
    space = HashSpace(scheme, block_size, ("sql", "/adapters/sql"), "tenant")
    ids = list(range(70_000, 70_000 + 2 * block_size + 1))
    hasher = PromptHasher(space, np.array(ids, np.int64), SegmentMemory(0))
    assert hasher.extend().tolist() == [reduce_hash(digest) for digest in request(function, space, ids).block_hashes]


@pytest.mark.parametrize("scale", [1, 2, 33])
def test_root_blocks_announced_by_a_block_pool_verify(engine: Any, scale: int) -> None:
    from vllm.v1.core.block_pool import BlockPool

    hash_block_size, block_size = 16, 16 * scale
    function, scheme = engine("sha256_cbor", "42"), scheme_of("sha256_cbor", "42")
    for lora, salt in [(None, None), (None, "t"), (("x", "/p"), None), (("x", "/p"), "x")]:
        pool = BlockPool(8, True, hash_block_size, enable_kv_cache_events=True)
        ids = list(range(1000, 1000 + 2 * block_size))
        vllm_request = request(function, HashSpace(scheme, hash_block_size, lora, salt), ids)
        pool.cache_full_blocks(vllm_request, pool.get_new_blocks(2), 0, 2, block_size, 0)
        (event,) = pool.take_events()
        assert event.parent_block_hash is None
        for known_size in (hash_block_size, None):
            verdict = verify_scheme(
                known_schemes(),
                block_hash=event.block_hashes[0],
                token_ids=event.token_ids[:block_size],
                block_size=event.block_size,
                hash_block_size=known_size,
                extra_keys_untagged=event.extra_keys[0],
                lora_name=event.lora_name,
                lora_paths=dict([lora]) if lora else {},
            )
            assert verdict == SchemeVerified(scheme, hash_block_size)
