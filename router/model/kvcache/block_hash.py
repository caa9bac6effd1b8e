# SPDX-License-Identifier: Apache-2.0
"""vLLM's block hashes, recomputed: schemes, extra keys, chains, and the scheme that explains a block seen on the wire.

A block's hash covers its parent's full digest, its token ids and its extra keys, so equal hashes mean equal prefixes.
This module is pure and keeps no state; `prompt_hasher.py` remembers hashes. Keys of prompt embeds are known only from
an event, never for a question.
Source: vLLM 0.32.0 utils/hashing.py and v1/core/kv_cache_utils.py:131-172, 578-725, 941-1003; the lookahead 0.33.0.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrouter.router.base.common.json_numbers import all_bits
from kvrouter.router.model.kvcache.chain_hash import hash_blocks
from kvrouter.router.model.kvcache.multimodal import Items
from kvrouter.router.model.kvcache.page_hash import page_chain
from kvrouter.router.model.workers.hash_algorithms import ALGORITHMS, LOOKAHEAD_TOKENS, HashAlgorithm, cbored, sha256

# vLLM's NONE_HASH seed when PYTHONHASHSEED is unset and the algorithm is cryptographic (since 0.29.0; random before).
DEFAULT_SEED = "vllm-none-hash"

# The values of PYTHONHASHSEED in the guides of LMCache ("0") and llm-d ("42"). They are tried, so that such engines
# verify without a declaration.
COMMON_SEEDS = ("0", "42")

MAX_TOKEN_ID = 2**63 - 1

# An undeclared hash block size is sought among the announced size and those of its divisors that are multiples of this
# number, because block sizes in vLLM's attention backends are multiples of 8 or more, and so is their gcd.
HASH_BLOCK_STEP_TOKENS = 8

# For a larger announced block, only its own size is tried as the hash block size: 10 schemes and 9 sizes of 2,048
# tokens already take 20 ms uncompiled, and an engine either announces smaller blocks too or can be declared.
MAX_GUESSED_BLOCK_TOKENS = 2048

# How many parts of an unknown extra key a message shows; known forms have two or three.
MAX_PARTS_SHOWN = 4

# Enough for the default seed and the router's own seeds with each algorithm; every worker's scheme is one of these.
CACHED_SEEDS = 64

ExtraKeys = tuple[tuple[object, ...], ...]


def _algorithm(algo: str) -> HashAlgorithm:
    algorithm = ALGORITHMS.get(algo)
    if algorithm is None:
        raise ValueError(f"unknown hash algorithm {algo!r}: vLLM has {', '.join(ALGORITHMS)}")
    return algorithm


class HashScheme(msgspec.Struct, frozen=True, cache_hash=True):
    """The way in which one engine hashes blocks."""

    algo: str
    # The full digest that stands for the parent of every first block; empty in SGLang's schemes.
    none_hash: bytes
    # Tokens after a block that vLLM's hash covers too, from 0.33 on with EAGLE or MTP and no KV connector.
    lookahead: int = 0

    def __post_init__(self) -> None:
        # The first page of a prompt has no parent in SGLang.
        expected = 0 if self.algo in LOOKAHEAD_TOKENS else _algorithm(self.algo).digest_bytes
        if len(self.none_hash) != expected:
            raise ValueError(f"none_hash of {self.algo} has {expected} bytes, got {len(self.none_hash)}")
        if self.lookahead < 0 or (self.lookahead and self.algo in LOOKAHEAD_TOKENS):
            raise ValueError(f"{self.algo} cannot have a lookahead of {self.lookahead}")

    @property
    def label(self) -> str:
        """The scheme's name for people.

        Examples: `sha256` with vLLM's default seed, `sha256/1a2b3c4d` (the first bytes of none_hash) with any other
        seed, and `sha256+1` if a hash covers one token more than its block.
        """
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
        """Return the scheme of an engine that was started with PYTHONHASHSEED=`seed`."""
        algorithm = _algorithm(algo)
        return cls(algo, algorithm.digest(algorithm.serialize(seed)))

    @classmethod
    def from_bytes(cls, algo: str, none_hash: bytes) -> HashScheme:
        """Return the scheme of an engine that declares its NONE_HASH. Raises ValueError if the length is wrong."""
        return cls(algo, bytes(none_hash))

    @classmethod
    def default(cls, algo: str = "sha256", seed: str | None = None) -> HashScheme:
        """Return the scheme by vLLM's own rule: PYTHONHASHSEED if it is set, otherwise the fixed default seed.

        Raises ValueError for an xxhash algorithm without a seed, because vLLM then draws 32 random bytes per process.

        Args:
            algo: One of ALGORITHMS.
            seed: The value of PYTHONHASHSEED, which may be "", or None if it is not set.
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
        """Tokens after a block that its hash covers too, for schemes of vLLM and of SGLang."""
        return LOOKAHEAD_TOKENS.get(self.algo, self.lookahead)


class HashSpace(msgspec.Struct, frozen=True, cache_hash=True):
    """The set of prompts that one engine hashes alike: two prompts of a space with equal tokens have equal hashes.

    Prompts of different spaces have equal hashes only if the spaces share a scheme.
    """

    scheme: HashScheme
    # Tokens of a *hash* block.
    block_size: int
    # The name of the LoRA and its path as the engine loaded it, or None.
    lora: tuple[str, str] | None = None
    # None and "" hash alike.
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1 token, got {self.block_size}")


class SchemeVerified(msgspec.Struct, frozen=True):
    """The verdict that the engine hashes with `scheme`, in hash blocks of `hash_block_size` tokens."""

    scheme: HashScheme
    hash_block_size: int


class SchemeUnexplained(msgspec.Struct, frozen=True):
    """The verdict that no candidate hash scheme yields the hash that the engine announced for a block."""

    # Whether the block has no extra keys. Only such a block proves that the scheme is unknown: engines older than the
    # tags (vllm#44701) hash bare names and salts, so their plain blocks verify and their salted ones do not.
    plain: bool


class SchemeUnknown(msgspec.Struct, frozen=True):
    """The verdict that the event lacks something that its hash covers, so it proves nothing; another block may."""

    reason: str


class KeysUnknown(msgspec.Struct, frozen=True):
    """The verdict that the event has extra keys of a form that this router does not know, so no hash of it is known.

    The engine is newer than the router, and may hash the keys in another form, too.
    """

    reason: str


Verdict = SchemeVerified | SchemeUnexplained | SchemeUnknown | KeysUnknown


def check_token_ids(token_ids: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int64]:
    """Return `token_ids` as int64, shape (num_tokens,).

    Raises ValueError unless all ids are integers from 0 to 2**63-1.
    """
    return measure_token_ids(token_ids)[0]


def measure_token_ids(token_ids: Sequence[int] | NDArray[np.integer]) -> tuple[NDArray[np.int64], int]:
    """Return the same as `check_token_ids`, and the bitwise or of all ids.

    The bitwise or is below 2**n exactly if all ids are. Raises ValueError as `check_token_ids` does.
    """
    array = np.asarray(token_ids)
    if array.ndim == 1 and array.size == 0:
        return np.empty(0, np.int64), 0
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"token ids must be a list of integers from 0 to 2**63-1, got {array.dtype} {array.shape}")
    if array.dtype == np.uint64 and (high := int(array.max())) > MAX_TOKEN_ID:
        raise ValueError(f"token ids must be from 0 to 2**63-1, got {high}")
    ids = np.ascontiguousarray(array, dtype=np.int64)
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
    """Return the full digest of one block. Raises ValueError on token ids that `check_token_ids` rejects.

    Args:
        scheme: One of vLLM's schemes.
        parent: The digest of the preceding block, or None (or b"", as in vLLM) for the first block.
        tokens: The token ids of the block.
        extra_keys: The tagged keys that `extra_keys_for` and `tag_extra_keys` return.
    """
    algorithm = _algorithm(scheme.algo)
    block = tuple(check_token_ids(tokens).tolist())
    return algorithm.digest(algorithm.serialize((parent or scheme.none_hash, block, extra_keys)))


def _ending(algorithm: HashAlgorithm, keys: ExtraKeys | None) -> bytes:
    """Return the bytes of a serialised block from its extra keys on.

    They are the same for every parent and all token ids: the references of a pickle count the objects before them, and
    the number of these objects does not depend on the parent or the ids.
    """
    if keys is None:
        return algorithm.plain_ending
    # The parent must be an object that is not among the keys; b"" is one shared object, and may be a key too.
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
    """Hash the successive full blocks of a prompt or of a part of it.

    Args:
        scheme: A scheme of vLLM or SGLang.
        parent: The full digest of the block before the first one, or None at the beginning of a prompt.
        token_ids: Checked ids; a scheme with a lookahead needs its tokens after the last block too.
        block_size: Tokens of a hash block.
        extra_keys: The keys of each block, in the order of the blocks; the last entry holds for all further blocks too.

    Returns:
        The hash of each block, as `reduce_hash` returns it, and the full digest of the last block. Without any full
        block, the digest is that of the parent.
    """
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
    python_digest = None if digest is sha256 else digest
    last = hash_blocks(tail, token_ids, block_size, endings, serialize is cbored, python_digest, hashes)
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
    """Return the keys of each block joined with the tokens after the block, which vLLM hashes in the place of the keys.

    Source: vLLM 0.33.0 kv_cache_utils.py:1003 (get_request_block_hasher).
    """
    joined_keys: list[ExtraKeys | None] = []
    for i in range(blocks):
        keys, end = extra_keys[min(i, len(extra_keys) - 1)], (i + 1) * block_size
        joined_keys.append(cast("ExtraKeys", (keys, *ids[end : end + lookahead])))
    return joined_keys


def reduce_hash(digest: bytes) -> int:
    """Return the hash as index keys and events have it: the last 8 bytes of the digest, big-endian and unsigned."""
    return int.from_bytes(digest[-8:], "big")


def _as_received(text: str) -> str:
    # Pickle writes a reference for a string that is *the same object* as an earlier one. In the engine, names, paths and
    # salts were decoded from a message, so equal strings are different objects (except CPython's shared strings of one
    # Latin-1 character, which decoding here reproduces). In the router, equal strings may be one object, e.g. a path
    # that equals its name, so each string is decoded into a new object.
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "surrogatepass")


def extra_keys_for(space: HashSpace, block_index: int, items: Items = ()) -> ExtraKeys | None:
    """Return the tagged extra keys of a block, or None if it has none.

    Every block has the LoRA and the block's multimodal items; block 0 has the cache salt after them.
    Source: vLLM 0.32.0 kv_cache_utils.py:625 (generate_block_hash_extra_keys).

    Args:
        space: The hash space of the prompt.
        block_index: The number of the block in the prompt.
        items: The items with tokens in this block, with offsets relative to its start (`multimodal.within`).
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
    extra_keys: object, *, lora_name: str | None, lora_paths: Mapping[str, str]
) -> ExtraKeys | SchemeUnknown | KeysUnknown | None:
    """Return the keys that the engine hashed for a block, from the untagged keys of the block's event.

    The LoRA comes first, so a cache salt that equals its name is still distinguished. This is the inverse of vLLM
    0.32.0 kv_cache_utils.py:666 (to_event_extra_keys), except for the path of the LoRA, which is not on the wire.

    Args:
        extra_keys: The block's entry of the event's extra_keys.
        lora_name: The event's LoRA, or None.
        lora_paths: The path of each LoRA by its name.

    Returns:
        The tagged keys, None if there are none, `KeysUnknown` if a key has an unknown form, or `SchemeUnknown` if the
        keys cannot be tagged for another reason.
    """
    if not isinstance(extra_keys, list | tuple | None):
        return KeysUnknown(f"the extra keys of a block are not a list: {_form(extra_keys)}")
    rest = list(extra_keys or ())
    keys: list[tuple[object, ...]] = []
    if lora_name is not None:
        if not rest or rest[0] != lora_name:
            text = f"the event names the LoRA {lora_name!r} but its extra keys do not start with it"
            return (
                KeysUnknown(f"{text}: {_form(rest[0])}")
                if rest and not isinstance(rest[0], str)
                else SchemeUnknown(text)
            )
        rest.pop(0)
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
                return KeysUnknown(f"an extra key has a form that this router does not know: {_form(key)}")
    return tuple(keys) or None


def _form(key: object) -> str:
    """Return the form of an extra key for messages, without its values, which may be secret."""
    if isinstance(key, list | tuple):
        return f"[{', '.join(_form(part) for part in key[:MAX_PARTS_SHOWN])}]"
    return type(key).__name__


def plausible_hash_block_sizes(block_size: int) -> list[int]:
    """Return the hash block sizes that a block may consist of: its own size, then its divisors, the largest first."""
    steps = range(block_size // 2 // HASH_BLOCK_STEP_TOKENS * HASH_BLOCK_STEP_TOKENS, 0, -HASH_BLOCK_STEP_TOKENS)
    return [block_size, *(size for size in steps if block_size % size == 0)]


def verify_scheme(
    candidates: Iterable[HashScheme],
    *,
    block_hash: int,
    token_ids: Sequence[int] | NDArray[np.integer],
    block_size: int,
    hash_block_size: int | None,
    extra_keys_untagged: object,
    lora_name: str | None,
    lora_paths: Mapping[str, str],
) -> Verdict:
    """Find the candidate that explains the hash of a dense root block, which has no parent, as a BlockStored event has it.

    The hash of a block of several hash blocks is the hash of the last of them. No value of an event makes this raise.

    Args:
        candidates: The schemes to try, in this order.
        block_hash: The announced hash, a uint64.
        token_ids: The block's `block_size` tokens, and the known tokens after the block. Schemes whose lookahead is
            longer are not tried.
        block_size: Tokens of the announced block.
        hash_block_size: Tokens of a hash block, or None to try all `plausible_hash_block_sizes`; for a block above
            MAX_GUESSED_BLOCK_TOKENS, None tries only its own size.
        extra_keys_untagged: This block's entry of the event's extra_keys. Pass only events that carry extra_keys at
            all, because absent ones may hide a salt.
        lora_name: The event's LoRA, or None.
        lora_paths: The path of each LoRA by its name.
    """
    schemes = list(candidates)
    following = len(token_ids) - block_size
    # A scheme whose hash covers unknown tokens can be neither verified nor refuted.
    schemes = [scheme for scheme in schemes if scheme.lookahead_tokens <= following]
    if block_size < 1 or following < 0 or not schemes:
        return SchemeUnknown(f"the block of {block_size} tokens came with {len(token_ids)} token ids")
    try:
        tokens = check_token_ids(token_ids)
    except (ValueError, OverflowError) as error:
        return SchemeUnknown(str(error))
    if hash_block_size is not None and (hash_block_size < 1 or block_size % hash_block_size):
        return SchemeUnknown(f"a block of {block_size} tokens is not made of hash blocks of {hash_block_size}")
    first = tag_extra_keys(extra_keys_untagged, lora_name=lora_name, lora_paths=lora_paths)
    if isinstance(first, SchemeUnknown | KeysUnknown):
        return first
    is_guessed = hash_block_size is None and block_size <= MAX_GUESSED_BLOCK_TOKENS
    sizes = plausible_hash_block_sizes(block_size) if is_guessed else [hash_block_size or block_size]
    # These keys are those of the announced block; its hash blocks may have other keys, which are not on the wire.
    located = any(key[0] in ("mm", "prompt_embeds") for key in first or ())
    others = tuple(key for key in first or () if key[0] == "lora") or None
    for size in sizes:
        for scheme in schemes:
            hashes, _ = hash_chain(scheme, None, tokens[: block_size + scheme.lookahead_tokens], size, (first, others))
            if int(hashes[-1]) == block_hash:
                return SchemeVerified(scheme, size)
    if hash_block_size is None and not is_guessed:
        return SchemeUnknown(f"the hash block size is not guessed from {block_size} tokens; declare hash_block_size")
    if located and hash_block_size != block_size:
        return SchemeUnknown("multi-modal and prompt-embeds keys of the hash blocks within a block are not on the wire")
    return SchemeUnexplained(plain=first is None)


def known_schemes(extra_seeds: Sequence[str] = ()) -> tuple[HashScheme, ...]:
    """Return candidates for `verify_scheme`, the likeliest first.

    They are vLLM's defaults, then all algorithms with each of `extra_seeds` and COMMON_SEEDS.
    """
    schemes = [HashScheme.default("sha256"), HashScheme.default("sha256_cbor")]
    schemes += [HashScheme.from_seed(algo, seed) for seed in (*extra_seeds, *COMMON_SEEDS) for algo in ALGORITHMS]
    return tuple(dict.fromkeys(schemes))
