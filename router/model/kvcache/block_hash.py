# SPDX-License-Identifier: Apache-2.0
"""vLLM's block hashes, recomputed: schemes, extra keys, chains, and which scheme explains a block seen on the wire.

A block's hash covers its parent's full digest, its token ids and its extra keys, so equal hashes mean equal prefixes.
All of this is pure; nothing is remembered here (`prompt_hasher.py` does). Multi-modal and prompt-embeds keys are known
only from an event, never for a question.
Source: vLLM 0.32.0 utils/hashing.py and v1/core/kv_cache_utils.py:131-172, 578-725, 941-1003; the lookahead 0.33.0.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

import cbor2
import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from kvrouter.router.base.common.json_numbers import all_bits
from kvrouter.router.model.kvcache.chain_hash import hash_blocks
from kvrouter.router.model.kvcache.multimodal import Items
from kvrouter.router.model.kvcache.page_hash import LOOKAHEAD_TOKENS, page_chain

# vLLM's; those of SGLang are in `page_hash.py`.
ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")

# vLLM's NONE_HASH seed when PYTHONHASHSEED is unset and the algorithm is cryptographic (since 0.29.0; random before).
DEFAULT_SEED = "vllm-none-hash"

# PYTHONHASHSEED as the guides of LMCache ("0") and llm-d ("42") set it; tried so that such engines verify undeclared.
COMMON_SEEDS = ("0", "42")

# vLLM writes pickle.HIGHEST_PROTOCOL, which is 5 in every Python that runs it; pinned, because ours may be another one.
PICKLE_PROTOCOL = 5

MAX_TOKEN_ID = 2**63 - 1

# An undeclared hash block size is sought among the announced size and its divisors that are multiples of this, because
# block sizes are multiples of 8 or more in vLLM's attention backends, and so is their gcd.
HASH_BLOCK_STEP_TOKENS = 8

# Above this, an undeclared hash block size is not guessed: 10 schemes and 9 sizes of 2,048 tokens already take 20 ms
# uncompiled, and an engine either announces smaller blocks too or can be declared.
MAX_GUESSED_BLOCK_TOKENS = 2048

# The default seed and the router's own, for each algorithm; every worker has its scheme from one of these.
CACHED_SEEDS = 64

ExtraKeys = tuple[tuple[object, ...], ...]


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


_pickled = functools.partial(pickle.dumps, protocol=PICKLE_PROTOCOL)
_cbored = functools.partial(cbor2.dumps, canonical=True)


class _Algorithm(msgspec.Struct, frozen=True):
    serialize: Callable[[object], bytes]
    # How a serialised block without extra keys ends, from where others have theirs.
    plain_ending: bytes
    digest: Callable[[bytes], bytes]
    digest_bytes: int
    # A predictable seed would let an attacker precompute collisions, so vLLM draws a random one a process.
    secret_seed: bool


_ALGORITHMS = {
    "sha256": _Algorithm(_pickled, b"N\x87\x94.", _sha256, 32, False),
    "sha256_cbor": _Algorithm(_cbored, b"\xf6", _sha256, 32, False),
    "xxhash": _Algorithm(_pickled, b"N\x87\x94.", xxhash.xxh3_128_digest, 16, True),
    "xxhash_cbor": _Algorithm(_cbored, b"\xf6", xxhash.xxh3_128_digest, 16, True),
}


def _algorithm(algo: str) -> _Algorithm:
    found = _ALGORITHMS.get(algo)
    if found is None:
        raise ValueError(f"unknown hash algorithm {algo!r}: vLLM has {', '.join(ALGORITHMS)}")
    return found


class HashScheme(msgspec.Struct, frozen=True, cache_hash=True):
    """How one engine hashes blocks: the algorithm and the parent of every first block (`none_hash`, a full digest)."""

    algo: str
    none_hash: bytes
    # Tokens after a block that vLLM's hash covers too: with EAGLE or MTP and no KV connector, from 0.33 on.
    lookahead: int = 0

    def __post_init__(self) -> None:
        # SGLang's first page has no parent.
        expected = 0 if self.algo in LOOKAHEAD_TOKENS else _algorithm(self.algo).digest_bytes
        if len(self.none_hash) != expected:
            raise ValueError(f"none_hash of {self.algo} has {expected} bytes, got {len(self.none_hash)}")
        if self.lookahead < 0 or (self.lookahead and self.algo in LOOKAHEAD_TOKENS):
            raise ValueError(f"{self.algo} cannot have a lookahead of {self.lookahead}")

    @property
    def label(self) -> str:
        """For people: `sha256`, or `sha256/1a2b3c4d` (first bytes of none_hash) when the seed is not vLLM's default;
        `sha256+1` where a hash covers one token more."""
        if self.algo in LOOKAHEAD_TOKENS:
            return self.algo
        algorithm = _algorithm(self.algo)
        name = f"{self.algo}+{self.lookahead}" if self.lookahead else self.algo
        if not algorithm.secret_seed and self.none_hash == HashScheme.from_seed(self.algo, DEFAULT_SEED).none_hash:
            return name
        return f"{name}/{self.none_hash[:4].hex()}"

    @classmethod
    @functools.lru_cache(maxsize=CACHED_SEEDS)
    def from_seed(cls, algo: str, seed: str) -> HashScheme:
        """The scheme of an engine started with PYTHONHASHSEED=`seed`."""
        algorithm = _algorithm(algo)
        return cls(algo, algorithm.digest(algorithm.serialize(seed)))

    @classmethod
    def from_bytes(cls, algo: str, none_hash: bytes) -> HashScheme:
        """The scheme of an engine that declares its NONE_HASH. Raises ValueError on a wrong length."""
        return cls(algo, bytes(none_hash))

    @classmethod
    def default(cls, algo: str = "sha256", seed: str | None = None) -> HashScheme:
        """vLLM's own rule: PYTHONHASHSEED (`seed`, "" counts) if set, else the fixed default seed.

        Raises ValueError for the xxhash algorithms without a seed: there vLLM draws 32 random bytes a process.
        """
        if seed is not None:
            return cls.from_seed(algo, seed)
        if _algorithm(algo).secret_seed:
            raise ValueError(
                f"{algo} without PYTHONHASHSEED has a random none_hash in every engine process and cannot be computed; "
                "set PYTHONHASHSEED there and none_hash_seed here, or declare none_hash"
            )
        return cls.from_seed(algo, DEFAULT_SEED)

    @property
    def lookahead_tokens(self) -> int:
        """Tokens after a block that its hash covers too."""
        return LOOKAHEAD_TOKENS.get(self.algo, self.lookahead)


class HashSpace(msgspec.Struct, frozen=True, cache_hash=True):
    """Prompts of one space have equal hashes when their tokens are equal; of two spaces never, but for a shared scheme.

    block_size: tokens of a *hash* block. lora: (name, path as the engine loaded it). cache_salt None and "" hash alike.
    """

    scheme: HashScheme
    block_size: int
    lora: tuple[str, str] | None = None
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1 token, got {self.block_size}")


class SchemeVerified(msgspec.Struct, frozen=True):
    """The block is explained: the engine hashes with `scheme` at `hash_block_size` tokens."""

    scheme: HashScheme
    hash_block_size: int


class SchemeUnexplained(msgspec.Struct, frozen=True):
    """No candidate gives the announced hash.

    plain: the block has no extra keys. Only then is it certain that the scheme is unknown: engines older than the tags
    (vllm#44701) hash bare names and salts, so their plain blocks verify and their salted ones do not.
    """

    plain: bool


class SchemeUnknown(msgspec.Struct, frozen=True):
    """The event lacks something that its hash covers, so it proves nothing; another block may."""

    reason: str


Verdict = SchemeVerified | SchemeUnexplained | SchemeUnknown


def check_token_ids(token_ids: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int64]:
    """`token_ids` as int64, shape (num_tokens,). Raises ValueError on anything but integers from 0 to 2**63-1."""
    return measure_token_ids(token_ids)[0]


def measure_token_ids(token_ids: Sequence[int] | NDArray[np.integer]) -> tuple[NDArray[np.int64], int]:
    """`check_token_ids`, and all bits that are set in any id: below 2**n where all ids are."""
    found = np.asarray(token_ids)
    if found.ndim == 1 and found.size == 0:
        return np.empty(0, np.int64), 0
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise ValueError(f"token ids must be a list of integers from 0 to 2**63-1, got {found.dtype} {found.shape}")
    if found.dtype == np.uint64 and (high := int(found.max())) > MAX_TOKEN_ID:
        raise ValueError(f"token ids must be from 0 to 2**63-1, got {high}")
    ids = np.ascontiguousarray(found, dtype=np.int64)
    bits = all_bits(ids.view(np.uint64))
    if bits > MAX_TOKEN_ID:
        raise ValueError(f"token ids must be from 0 to 2**63-1, got {int(ids.min())}")
    return ids, bits


def hash_block(
    scheme: HashScheme,
    parent: bytes | None,
    tokens: Sequence[int] | NDArray[np.integer],
    extra_keys: ExtraKeys | None,
) -> bytes:
    """The full digest of one block. parent: the preceding block's digest, None (or empty, as in vLLM) for the first.

    extra_keys: tagged, as `extra_keys_for` and `tag_extra_keys` give them. Raises ValueError on bad token ids.
    """
    algorithm = _algorithm(scheme.algo)
    block = tuple(check_token_ids(tokens).tolist())
    return algorithm.digest(algorithm.serialize((parent or scheme.none_hash, block, extra_keys)))


def _ending(algorithm: _Algorithm, keys: ExtraKeys | None) -> bytes:
    """The bytes of a serialised block from its extra keys on. A pickle's references count the objects before, which are
    as many whatever parent and token ids are."""
    if keys is None:
        return algorithm.plain_ending
    # Of an object of its own, unlike b"", which may be a key too.
    parent = bytes(algorithm.digest_bytes)
    head = len(algorithm.serialize((parent, (0,), None))) - len(algorithm.plain_ending)
    return algorithm.serialize((parent, (0,), keys))[head:]


def hash_chain(
    scheme: HashScheme,
    parent: bytes | None,
    token_ids: NDArray[np.int64],
    block_size: int,
    extra_keys: Sequence[ExtraKeys | None],
) -> tuple[NDArray[np.uint64], bytes]:
    """`reduce_hash` of the successive full blocks of `token_ids` (already checked), the first one after `parent`, and
    the full digest of the last (of the parent if there is none).

    extra_keys: one for each block, in their order; the last one is that of all further blocks too. A scheme with a
    lookahead needs its tokens after the last block."""
    if scheme.algo in LOOKAHEAD_TOKENS:
        named = {str(key[0]): str(key[-1]) for key in extra_keys[0] or ()}
        return page_chain(scheme.algo, parent, token_ids, block_size, named.get("cache_salt"), named.get("lora"))
    algorithm = _algorithm(scheme.algo)
    serialize, digest = algorithm.serialize, algorithm.digest
    tail = parent or scheme.none_hash
    hashes = np.empty(max(0, len(token_ids) - scheme.lookahead) // block_size, np.uint64)
    if scheme.lookahead and hashes.size:
        extra_keys = _with_lookahead(extra_keys, token_ids.tolist(), block_size, scheme.lookahead, hashes.size)
    endings = tuple([_ending(algorithm, keys) for keys in extra_keys])
    called = None if digest is _sha256 else digest
    last = hash_blocks(tail, token_ids, block_size, endings, serialize is _cbored, called, hashes)
    if last is not None:
        return hashes, last
    tokens = iter(token_ids[: hashes.size * block_size].tolist())
    keys_of_blocks = itertools.chain(extra_keys, itertools.repeat(extra_keys[-1]))
    for i, (block, keys) in enumerate(zip(zip(*[tokens] * block_size, strict=True), keys_of_blocks, strict=False)):
        tail = digest(serialize((tail, block, keys)))
        hashes[i] = reduce_hash(tail)
    return hashes, tail


def _with_lookahead(
    extra_keys: Sequence[ExtraKeys | None], ids: list[int], block_size: int, lookahead: int, blocks: int
) -> list[ExtraKeys | None]:
    """Every block's own keys and the tokens after it, as vLLM puts them in the place of the keys.

    Source: vLLM 0.33.0 kv_cache_utils.py:1003 (get_request_block_hasher)."""
    found: list[ExtraKeys | None] = []
    for i in range(blocks):
        keys, end = extra_keys[min(i, len(extra_keys) - 1)], (i + 1) * block_size
        found.append(cast("ExtraKeys", (keys, *ids[end : end + lookahead])))
    return found


def reduce_hash(digest: bytes) -> int:
    """The hash as an index key and as events carry it: the last 8 bytes, big-endian, unsigned."""
    return int.from_bytes(digest[-8:], "big")


def _as_received(text: str) -> str:
    # Pickle writes a string that it has met before *as the same object* as a reference. In the engine, names, paths and
    # salts were decoded from a message, so equal ones are different objects (but for CPython's shared strings of one
    # Latin-1 character, which decoding here reproduces); here they may be one object, e.g. a path that equals the name.
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "surrogatepass")


def extra_keys_for(space: HashSpace, block_index: int, items: Items = ()) -> ExtraKeys | None:
    """The tagged extra keys of a block: the LoRA in every block, its multimodal items, then the cache salt in block 0.

    items: those with tokens in this block, their offsets from its start (`multimodal.within`).

    Source: vLLM 0.32.0 kv_cache_utils.py:625 (generate_block_hash_extra_keys).
    """
    keys: list[tuple[object, ...]] = []
    if space.lora is not None:
        name, path = space.lora
        keys.append(("lora", _as_received(name), _as_received(path)))
    for item in items:
        keys.append(("mm", _as_received(item.identifier), item.offset_tokens))
    if block_index == 0 and space.cache_salt:
        keys.append(("cache_salt", _as_received(space.cache_salt)))
    return tuple(keys) or None


def tag_extra_keys(
    extra_keys: Sequence[object] | None, *, lora_name: str | None, lora_paths: Mapping[str, str]
) -> ExtraKeys | SchemeUnknown | None:
    """One block's extra keys as hashed, from the untagged ones of its event; Unjudged if they are ambiguous.

    The LoRA comes first, so a cache salt that equals its name is still distinguished. Inverse of vLLM 0.32.0
    kv_cache_utils.py:666 (to_event_extra_keys), but for the LoRA path, which `lora_paths` (name -> path) must have.
    """
    rest = list(extra_keys or ())
    keys: list[tuple[object, ...]] = []
    if lora_name is not None:
        if not rest or rest.pop(0) != lora_name:
            return SchemeUnknown(f"the event names the LoRA {lora_name!r} but its extra keys do not start with it")
        path = lora_paths.get(lora_name)
        if path is None:
            return SchemeUnknown(f"the path of the LoRA {lora_name!r} is hashed but unknown; declare it in lora_paths")
        keys.append(("lora", _as_received(lora_name), _as_received(path)))
    salted = False
    for key in rest:
        match key:
            case str() if not salted:
                salted = True
                keys.append(("cache_salt", _as_received(key)))
            case [str(identifier), int(offset)]:
                keys.append(("mm", _as_received(identifier), offset))
            case bytes():
                keys.append(("prompt_embeds", key))
            case _:
                return SchemeUnknown(f"an extra key has a form that vLLM 0.32 does not send: {type(key).__name__}")
    return tuple(keys) or None


def plausible_hash_block_sizes(block_size: int) -> list[int]:
    """Hash block sizes that a block of `block_size` tokens may be made of: itself, then divisors, larger first."""
    steps = range(block_size // 2 // HASH_BLOCK_STEP_TOKENS * HASH_BLOCK_STEP_TOKENS, 0, -HASH_BLOCK_STEP_TOKENS)
    return [block_size, *(size for size in steps if block_size % size == 0)]


def verify_scheme(
    candidates: Iterable[HashScheme],
    *,
    block_hash: int,
    token_ids: Sequence[int] | NDArray[np.integer],
    block_size: int,
    hash_block_size: int | None,
    extra_keys_untagged: Sequence[object] | None,
    lora_name: str | None,
    lora_paths: Mapping[str, str],
) -> Verdict:
    """Which candidate explains the hash of a dense root block (parent None), as one BlockStored announces it.

    block_hash: uint64. token_ids: the block's `block_size` tokens, and those after it that are known: a scheme whose
    lookahead is longer explains nothing.
    extra_keys_untagged: this block's entry of the event's extra_keys; give only events that carry extra_keys at all,
    since absent ones may hide a salt. A block of
    several hash blocks has the chain's hash at its last one. hash_block_size None: `plausible_hash_block_sizes` are
    tried. Never raises on what an event holds.
    """
    schemes = list(candidates)
    following = len(token_ids) - block_size
    # A hash that covers more than is known is one that nothing is said of.
    schemes = [scheme for scheme in schemes if scheme.lookahead_tokens <= following]
    if block_size < 1 or following < 0 or not schemes:
        return SchemeUnknown(f"the block of {block_size} tokens came with {len(token_ids)} token ids")
    try:
        tokens = check_token_ids(token_ids)
    except (ValueError, OverflowError) as error:
        return SchemeUnknown(str(error))
    if hash_block_size is not None and (hash_block_size < 1 or block_size % hash_block_size):
        return SchemeUnknown(f"a block of {block_size} tokens is not made of hash blocks of {hash_block_size}")
    if hash_block_size is None and block_size > MAX_GUESSED_BLOCK_TOKENS:
        return SchemeUnknown(f"the hash block size is not guessed from {block_size} tokens; declare hash_block_size")
    first = tag_extra_keys(extra_keys_untagged, lora_name=lora_name, lora_paths=lora_paths)
    if isinstance(first, SchemeUnknown):
        return first
    sizes = plausible_hash_block_sizes(block_size) if hash_block_size is None else [hash_block_size]
    # Their keys are those of the announced block; its hash blocks may have others, which are not on the wire.
    located = any(key[0] in ("mm", "prompt_embeds") for key in first or ())
    others = tuple(key for key in first or () if key[0] == "lora") or None
    for size in sizes:
        for scheme in schemes:
            hashes, _ = hash_chain(scheme, None, tokens[: block_size + scheme.lookahead_tokens], size, (first, others))
            if int(hashes[-1]) == block_hash:
                return SchemeVerified(scheme, size)
    if located and hash_block_size != block_size:
        return SchemeUnknown("multi-modal and prompt-embeds keys of the hash blocks within a block are not on the wire")
    return SchemeUnexplained(plain=first is None)


def known_schemes(extra_seeds: Sequence[str] = ()) -> tuple[HashScheme, ...]:
    """Candidates for `verify_scheme`, likeliest first: vLLM's defaults, then all algorithms with each known seed."""
    schemes = [HashScheme.default("sha256"), HashScheme.default("sha256_cbor")]
    schemes += [HashScheme.from_seed(algo, seed) for seed in (*extra_seeds, *COMMON_SEEDS) for algo in ALGORITHMS]
    return tuple(dict.fromkeys(schemes))
