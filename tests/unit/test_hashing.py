# SPDX-License-Identifier: Apache-2.0
"""block_hash.py compared with vectors that vLLM itself made (tests/golden/make_hash_vectors.py), and its own rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.events.vllm.messages import BlockStored
from kvrouter.router.model.kvcache.block_hash import (
    ExtraKeys,
    HashScheme,
    HashSpace,
    KeysUnknown,
    SchemeUnexplained,
    SchemeUnknown,
    SchemeVerified,
    Verdict,
    check_token_ids,
    extra_keys_for,
    hash_block,
    hash_chain,
    known_schemes,
    plausible_hash_block_sizes,
    reduce_hash,
    tag_extra_keys,
    verify_scheme,
)
from kvrouter.router.model.kvcache.prompt_hasher import PromptHasher, SegmentMemory
from kvrouter.router.model.kvcache.scheme_verification import HashIdentity
from kvrouter.router.model.workers.hash_algorithms import ALGORITHMS
from kvrouter.router.model.workers.registration import CatalogSpec

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "hash_vectors.json").read_text())
DEFAULT = HashScheme.default()


def prompt_ids(name: str) -> list[int]:
    prompt = GOLDEN["prompts"][name]
    return prompt["ids"] if "ids" in prompt else [prompt["start"] + prompt["step"] * i for i in range(prompt["count"])]


def space_of(vector: dict[str, Any]) -> HashSpace:
    scheme = HashScheme.from_bytes(vector["algo"], bytes.fromhex(vector["none_hash"]))
    lora = None if vector["lora"] is None else (vector["lora"][0], vector["lora"][1])
    return HashSpace(scheme, vector["block_size"], lora, vector["cache_salt"])


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_digests_equal_those_of_vllm(algo: str) -> None:
    vectors = [vector for vector in GOLDEN["vectors"] if vector["algo"] == algo]
    assert len(vectors) == 3 * 7 * 6
    for vector in vectors:
        space = space_of(vector)
        ids = check_token_ids(prompt_ids(vector["prompt"]))
        keys = [extra_keys_for(space, 0), extra_keys_for(space, 1)]
        hashes, last = hash_chain(space.scheme, None, ids, space.block_size, keys)
        assert hashes.tolist() == vector["reduced"], vector
        assert last.hex() == vector["hashes"][-1]
        parent = None
        for index, digest in enumerate(vector["hashes"]):
            block = ids[index * space.block_size : (index + 1) * space.block_size]
            chain = hash_chain(space.scheme, parent, block, space.block_size, keys[min(index, 1) :])
            parent = bytes.fromhex(digest)
            assert (chain[0].tolist(), chain[1]) == ([reduce_hash(parent)], parent)


def test_none_hash_equals_vllms_for_each_seed() -> None:
    seen = set()
    for vector in GOLDEN["vectors"]:
        algo, seed = vector["algo"], vector["seed"]
        if seed is None and algo.startswith("xxhash"):
            continue
        seen.add((algo, seed))
        assert HashScheme.default(algo, seed).none_hash.hex() == vector["none_hash"]
    assert len(seen) == 2 * 3 + 2 * 2


@pytest.mark.parametrize("algo", ["xxhash", "xxhash_cbor"])
def test_xxhash_without_a_seed_is_refused_because_vllm_draws_it(algo: str) -> None:
    with pytest.raises(ValueError, match="PYTHONHASHSEED"):
        HashScheme.default(algo)


def test_an_empty_seed_counts_as_a_seed() -> None:
    assert HashScheme.default("sha256", "") == HashScheme.from_seed("sha256", "") != DEFAULT


def test_schemes_refuse_what_no_engine_has() -> None:
    with pytest.raises(ValueError, match="unknown hash algorithm 'md5'"):
        HashScheme.default("md5")
    with pytest.raises(ValueError, match="unknown hash algorithm 'builtin'"):
        HashScheme("builtin", b"")
    with pytest.raises(ValueError, match="has 32 bytes, got 16"):
        HashScheme.from_bytes("sha256", bytes(16))
    with pytest.raises(ValueError, match="has 16 bytes, got 32"):
        HashScheme.from_bytes("xxhash_cbor", bytes(32))
    with pytest.raises(ValueError, match="block_size"):
        HashSpace(DEFAULT, 0)


def test_labels_tell_seeds_apart() -> None:
    assert DEFAULT.label == "sha256"
    assert HashScheme.default("sha256_cbor").label == "sha256_cbor"
    seeded = HashScheme.from_seed("sha256", "0")
    assert seeded.label == f"sha256/{seeded.none_hash.hex()[:8]}"
    labels = [scheme.label for scheme in known_schemes(["a", "b"])]
    assert len(set(labels)) == len(labels) == 2 + 4 * 4


def test_known_schemes_start_with_vllms_default_and_have_no_duplicates() -> None:
    assert known_schemes()[0] == DEFAULT
    assert known_schemes(["0", "0"]) == (*known_schemes()[:2], *known_schemes(["0"])[2:])
    assert HashScheme.from_seed("xxhash", "mine") in known_schemes(["mine"])


@given(st.lists(st.integers(0, 2**63 - 1), max_size=40), st.integers(1, 7))
def test_a_chain_is_its_blocks_one_after_another(ids: list[int], block_size: int) -> None:
    space = HashSpace(DEFAULT, block_size, ("n", "p"), "s")
    parent, expected = None, list[int]()
    for index in range(len(ids) // block_size):
        block = ids[index * block_size : (index + 1) * block_size]
        parent = hash_block(DEFAULT, parent, block, extra_keys_for(space, index))
        expected.append(reduce_hash(parent))
    keys = [extra_keys_for(space, 0), extra_keys_for(space, 1)]
    hashes, last = hash_chain(DEFAULT, None, check_token_ids(ids), block_size, keys)
    assert (hashes.tolist(), last) == (expected, parent or DEFAULT.none_hash)


def test_hash_block_takes_arrays_as_it_takes_lists() -> None:
    ids = [1, 300, 70000, 2**31]
    assert hash_block(DEFAULT, b"", np.array(ids, np.uint32), None) == hash_block(DEFAULT, None, ids, None)


@pytest.mark.parametrize("bad", [[-1], [2**63], [2**64], [-1, 2**63], [1.0], ["1"], [[1]], [None], [True, False]])
def test_bad_token_ids_are_refused(bad: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"token ids must be .*from 0 to 2\*\*63-1"):
        check_token_ids(bad)
    with pytest.raises(ValueError, match="token ids"):
        hash_block(DEFAULT, None, bad, None)


def test_the_ends_of_the_token_range_are_accepted() -> None:
    assert check_token_ids([0, 2**63 - 1]).tolist() == [0, 2**63 - 1]
    assert check_token_ids([]).dtype == np.int64


def test_extra_keys_are_tagged_lora_first_and_salt_in_block_0_only() -> None:
    space = HashSpace(DEFAULT, 16, ("sql", "/a"), "tenant")
    assert extra_keys_for(space, 0) == (("lora", "sql", "/a"), ("cache_salt", "tenant"))
    assert extra_keys_for(space, 1) == (("lora", "sql", "/a"),)
    assert extra_keys_for(HashSpace(DEFAULT, 16, None, "tenant"), 1) is None
    assert extra_keys_for(HashSpace(DEFAULT, 16, None, ""), 0) is None


def test_a_path_that_is_the_name_hashes_as_two_strings() -> None:
    # If both were one object, pickle would write the second string as a reference to the first; the engine decoded two
    # objects.
    name = "adapter"
    path = "".join(["adap", "ter"])
    assert name is not path
    expected = hash_block(DEFAULT, None, [1], (("lora", name, path),))
    assert hash_block(DEFAULT, None, [1], extra_keys_for(HashSpace(DEFAULT, 1, (name, name)), 0)) == expected
    assert hash_block(DEFAULT, None, [1], (("lora", name, name),)) != expected


@pytest.mark.parametrize("event", GOLDEN["announced"][:-1])
def test_a_block_as_vllm_announces_it_verifies(event: dict[str, Any]) -> None:
    for hash_block_size in (event["hash_block_size"], None):
        assert judge(event, hash_block_size) == SchemeVerified(DEFAULT, event["hash_block_size"])
    assert judge({**event, "block_hash": event["block_hash"] ^ 1}, event["hash_block_size"]) == SchemeUnexplained(
        plain=event["extra_keys"] is None
    )


def judge(event: dict[str, Any], hash_block_size: int | None) -> Verdict:
    return verify_scheme(
        known_schemes(),
        block_hash=event["block_hash"],
        token_ids=event["token_ids"],
        block_size=event["block_size"],
        hash_block_size=hash_block_size,
        extra_keys_untagged=event["extra_keys"],
        lora_name=event["lora"] and event["lora"][0],
        lora_paths=dict([event["lora"]]) if event["lora"] else {},
    )


@pytest.mark.parametrize("hash_block_size", [16, None])
def test_images_within_several_hash_blocks_cannot_be_judged(hash_block_size: int | None) -> None:
    event = GOLDEN["announced"][-1]
    assert event["hash_block_size"] < event["block_size"]
    assert isinstance(judge(event, hash_block_size), SchemeUnknown)


def test_an_image_within_the_first_hash_block_is_judged() -> None:
    keys: ExtraKeys = (("mm", "a1", 3),)
    root = hash_block(DEFAULT, None, range(16), keys)
    event = {
        "block_hash": reduce_hash(hash_block(DEFAULT, root, range(16, 32), None)),
        "token_ids": list(range(32)),
        "block_size": 32,
        "extra_keys": [("a1", 3)],
        "lora": None,
    }
    assert judge(event, None) == judge(event, 16) == SchemeVerified(DEFAULT, 16)


def verdict(scheme: HashScheme, candidates: list[HashScheme] | tuple[HashScheme, ...], **changes: Any) -> Verdict:
    """Return the verdict on the plain block 0..15, hashed by `scheme`, with `changes` of its fields."""
    fields: dict[str, Any] = {
        "block_hash": reduce_hash(hash_block(scheme, None, range(16), changes.pop("hashed", None))),
        "token_ids": list(range(16)),
        "block_size": 16,
        "hash_block_size": 16,
        "extra_keys_untagged": None,
        "lora_name": None,
        "lora_paths": {},
    }
    return verify_scheme(candidates, **{**fields, **changes})


@pytest.mark.parametrize("scheme", known_schemes(["mine"]), ids=lambda scheme: scheme.label)
def test_each_known_scheme_is_distinguished_from_all_others(scheme: HashScheme) -> None:
    every = known_schemes(["mine"])
    assert verdict(scheme, every) == SchemeVerified(scheme, 16)
    assert verdict(scheme, [other for other in every if other != scheme]) == SchemeUnexplained(plain=True)


def test_a_salt_that_equals_the_lora_name_is_distinguished_from_it() -> None:
    hashed: ExtraKeys = (("lora", "x", "/p"), ("cache_salt", "x"))
    fields = {"extra_keys_untagged": ["x", "x"], "lora_name": "x", "lora_paths": {"x": "/p"}}
    assert verdict(DEFAULT, [DEFAULT], hashed=hashed, **fields) == SchemeVerified(DEFAULT, 16)


def test_bare_salts_of_older_engines_do_not_convict_the_scheme() -> None:
    # mypy would reject this key for `hash_block`, but vLLM hashed such keys before vllm#44701.
    older: Any = ("tenant",)
    assert verdict(DEFAULT, [DEFAULT], hashed=older, extra_keys_untagged=["tenant"]) == SchemeUnexplained(plain=False)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"token_ids": list(range(15))}, "came with 15 token ids"),
        ({"token_ids": [], "block_size": 0}, "block of 0 tokens"),
        ({"token_ids": [-1] * 16}, "token ids must be"),
        ({"hash_block_size": 3}, "not made of hash blocks of 3"),
        ({"hash_block_size": 32}, "not made of hash blocks of 32"),
        ({"hash_block_size": 0}, "not made of hash blocks of 0"),
        ({"hash_block_size": None, "block_size": 2056, "token_ids": list(range(2056))}, "not guessed"),
        ({"lora_name": "x", "extra_keys_untagged": ["x"]}, "declare it in lora_paths"),
        ({"lora_name": "x", "lora_paths": {"x": "/p"}}, "do not start with it"),
        ({"lora_name": "x", "lora_paths": {"x": "/p"}, "extra_keys_untagged": ["y"]}, "do not start with it"),
    ],
)
def test_an_undecided_verdict_names_its_reason(changes: dict[str, Any], why: str) -> None:
    outcome = verdict(DEFAULT, [DEFAULT], **changes)
    assert isinstance(outcome, SchemeUnknown)
    assert why in outcome.reason


@pytest.mark.parametrize(
    ("keys", "form"),
    [
        (["a", "b"], "know: str"),
        ([7], "know: int"),
        ([["a", "b"]], "know: [str, str]"),
        ([("a", ("b", 1), None)], "know: [str, [str, int], NoneType]"),
        ("secret", "not a list: str"),
        (7, "not a list: int"),
    ],
)
def test_keys_of_an_unknown_form_are_a_verdict_that_shows_no_value(keys: Any, form: str) -> None:
    outcome = verdict(DEFAULT, [DEFAULT], extra_keys_untagged=keys)
    assert isinstance(outcome, KeysUnknown)
    assert outcome.reason.endswith(form)


def test_prompt_embeds_are_tagged() -> None:
    assert tag_extra_keys([b"d"], lora_name=None, lora_paths={}) == (("prompt_embeds", b"d"),)


def test_plausible_hash_block_sizes_are_the_block_and_its_divisors_in_steps() -> None:
    assert plausible_hash_block_sizes(16) == [16, 8]
    assert plausible_hash_block_sizes(528) == [528, 264, 176, 88, 48, 24, 16, 8]
    assert plausible_hash_block_sizes(1) == [1]
    assert plausible_hash_block_sizes(8) == [8]
    assert plausible_hash_block_sizes(15) == [15]


@pytest.mark.parametrize("algo", ALGORITHMS)
@pytest.mark.parametrize("lookahead", [1, 3])
def test_a_hash_that_covers_the_next_tokens_has_them_beside_its_own_keys(algo: str, lookahead: int) -> None:
    """Hash as vLLM 0.33 does with EAGLE or MTP, both with the compiled chain and block by block."""
    plain = HashScheme.from_seed(algo, "7")
    scheme = msgspec.structs.replace(plain, lookahead=lookahead)
    space = HashSpace(scheme, 4, ("adapter", "/path"), "salt")
    ids = np.array([3, 70_000, 2**40, 5, 6, 7, 8, 900, 10, 11, 12, 2**33, 14, 15][: 12 + lookahead - 1], np.int64)
    keys = [extra_keys_for(space, 0), extra_keys_for(space, 1)]
    hashes, last = hash_chain(scheme, None, ids, 4, keys)
    assert len(hashes) == (len(ids) - lookahead) // 4 == 2
    parent = None
    for i, chained in enumerate(hashes.tolist()):
        following = ids[(i + 1) * 4 : (i + 1) * 4 + lookahead].tolist()
        parent = hash_block(plain, parent, ids[i * 4 : (i + 1) * 4], (keys[i], *following))  # type: ignore[arg-type]
        assert reduce_hash(parent) == chained
    assert parent == last
    hasher = PromptHasher(space, ids, SegmentMemory(1 << 20), segment_blocks=1)
    assert [*hasher.extend(), *hasher.extend()] == hashes.tolist() and not hasher.extend().size


def test_a_lookahead_is_found_from_a_root_block_and_the_tokens_after_it() -> None:
    scheme = msgspec.structs.replace(DEFAULT, lookahead=1)
    ids = np.arange(40, dtype=np.int64)
    hashes, _ = hash_chain(scheme, None, ids, 16, [None])
    identity = HashIdentity(CatalogSpec(), known_schemes())
    stored = BlockStored(hashes, None, 16, "GPU", token_ids=ids[:32].tolist(), extra_keys=(None, None))
    assert identity.judge(stored) and identity.scheme == scheme and identity.label == "sha256+1 (verified)"
    with pytest.raises(ValueError, match="lookahead"):
        HashScheme("sglang", b"", 1)
