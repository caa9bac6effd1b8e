# SPDX-License-Identifier: Apache-2.0
"""Facts about an engine that its stream shows: the hash scheme, the cache groups, the chunk size and the rank."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from kvrouter.events.transport.progress import FellBehind
from kvrouter.events.vllm.codec import encode_batch
from kvrouter.events.vllm.stream_items import Batch, Connected, Restarted, fingerprint
from kvrouter.events.vllm.wire import WireStored
from kvrouter.router.model.kvcache.block_hash import HashScheme, hash_block, hash_chain, reduce_hash
from kvrouter.router.model.kvcache.catalog_learner import UNNAMED_BLOCK_TOKENS
from kvrouter.router.model.kvcache.scheme_verification import MAX_JUDGEMENTS
from kvrouter.router.model.workers.registration import CatalogSpec, GroupSpec
from kvrouter.router.model.workers.stream_state import StreamState
from tests.support.ingest_steps import batch, feed, live, make, removed, restored, stored, taken

TOKENS = list(range(100, 116))


def root(scheme: HashScheme, **fields: Any) -> WireStored:
    block_hash = reduce_hash(hash_block(scheme, None, TOKENS, None))
    return stored([block_hash], parent_block_hash=None, token_ids=TOKENS, extra_keys=[None], **fields)


@pytest.mark.parametrize("scheme", [HashScheme.default("sha256_cbor"), HashScheme.from_seed("xxhash", "0")])
def test_the_first_root_block_verifies_the_scheme(scheme: HashScheme) -> None:
    ingest = live()
    assert ingest.profile.identity.label.endswith("(assumed)") and ingest.profile.identity.wants_tokens
    feed(ingest, batch(0, root(scheme)))
    assert ingest.profile.identity.scheme == scheme and ingest.profile.identity.label.endswith("(verified)")
    assert not ingest.profile.identity.wants_tokens


def test_a_scheme_that_nothing_explains_is_unhashable_until_a_block_verifies() -> None:
    ingest = feed(live(), batch(0, root(HashScheme.from_seed("sha256", "nobody knows"))))
    assert ingest.state is StreamState.UNHASHABLE and "none_hash_seed" in ingest.reason
    assert ingest.held.blocks.counts() == {"g0:GPU": 1}
    feed(ingest, batch(1, root(HashScheme.default())))
    assert ingest.state is StreamState.LIVE


def test_a_removal_first_makes_the_catalog_incomplete() -> None:
    ingest = feed(live(), batch(0, stored([1])), batch(1, removed([4], 3)))
    assert ingest.profile.catalog.problem is not None and "group 3" in ingest.profile.catalog.problem
    feed(ingest, batch(2, stored([], 3, kv_cache_spec_kind="mamba")))
    assert ingest.profile.catalog.problem is None and len(ingest.profile.catalog.groups) == 2


def test_a_group_that_contradicts_itself_makes_the_catalog_incomplete() -> None:
    ingest = feed(live(), batch(0, stored([1])), batch(1, stored([2], kv_cache_spec_kind="mamba")))
    assert ingest.profile.catalog.problem is not None and "contradicts itself" in ingest.profile.catalog.problem


def placeholder(block_hash: int) -> WireStored:
    return stored([block_hash], medium="CPU", block_size=0, parent_block_hash=None, kv_cache_spec_kind=None)


def test_a_first_block_alone_on_the_cpu_tier_shows_that_chunks_are_single_blocks() -> None:
    ingest = feed(live(), batch(0, stored([1, 2, 3], parent_block_hash=None)), batch(1, placeholder(2)))
    assert ingest.profile.catalog.blocks_per_chunk is None and "offload_blocks_per_chunk" in ingest.reason
    feed(ingest, batch(2, placeholder(1)))
    assert ingest.profile.catalog.blocks_per_chunk == 1 and ingest.reason == ""


def test_a_self_describing_store_tells_the_chunk_size() -> None:
    ingest = feed(
        live(), batch(0, stored([1, 2, 3, 4], parent_block_hash=None)), batch(1, stored([1, 2], medium="CPU"))
    )
    assert ingest.profile.catalog.blocks_per_chunk == 2


def test_a_stated_catalog_overrides_a_learned_one() -> None:
    spec = CatalogSpec(groups=(GroupSpec(0, "full_attention", 16, eagle=True),))
    ingest = feed(live(catalog=spec), batch(0, stored([1], kv_cache_spec_kind="mamba")))
    assert ingest.profile.catalog.source == "configured" and ingest.profile.catalog.groups[0].eagle
    feed(ingest, batch(1, stored([1], 1)))
    assert ingest.profile.catalog.source == "learned" and len(ingest.profile.catalog.groups) == 2


@pytest.mark.parametrize(("stated", "announced"), [(0, None), (3, None), (None, 0), (None, 3)])
def test_a_group_that_is_stated_alone_is_the_one_that_is_announced_alone(
    stated: int | None, announced: int | None
) -> None:
    """Announce the only group, which has no number in SGLang's events, nor in those of vLLM up to 0.19."""
    spec = CatalogSpec(groups=(GroupSpec(stated, "full_attention", 16, eagle=True),))
    ingest = feed(live(catalog=spec), batch(0, stored([1, 2], announced)))
    catalog = ingest.profile.catalog
    assert (catalog.source, catalog.problem) == ("configured", None)
    (group,) = catalog.groups
    assert (group.group_idx, group.eagle) == (announced, True)
    assert {place.group_idx for place in ingest.held.blocks.places} == {announced}


def test_a_second_group_beside_the_stated_one_is_a_reason() -> None:
    spec = CatalogSpec(groups=(GroupSpec(None, "full_attention", 16),))
    ingest = feed(live(catalog=spec), batch(0, stored([1], 0), stored([1], 1)))
    assert ingest.profile.catalog.problem is not None
    assert "states a group without a number, its events announce group 0, group 1" in ingest.profile.catalog.problem


@pytest.mark.parametrize(
    ("stated", "announced", "what"),
    [
        ((0, 1), None, "states group 0, group 1, its events announce a group without a number"),
        ((1,), 0, "states group 1, its events announce group 0"),
    ],
)
def test_stated_groups_that_no_event_announces_are_a_reason(
    stated: tuple[int, ...], announced: int | None, what: str
) -> None:
    spec = CatalogSpec(groups=tuple(GroupSpec(number, "full_attention", 16) for number in stated))
    ingest = feed(live(catalog=spec), batch(0, stored([1], announced)))
    assert ingest.profile.catalog.problem is not None and what in ingest.profile.catalog.problem


@pytest.mark.parametrize("size", [8, 24, 32, 64])
def test_another_block_size_than_the_stated_one_is_a_reason(size: int) -> None:
    spec = CatalogSpec(groups=(GroupSpec(None, "full_attention", size),))
    ingest = live(catalog=spec)
    assert ingest.profile.catalog.problem is None
    feed(ingest, batch(0, stored([1], None)))
    assert ingest.profile.catalog.problem == (
        f"its catalog states blocks of {size} tokens for the unnamed group (full_attention), its events announce 16: "
        "register the engine's block size"
    )


def ranked(seq: int, rank: int | None, *events: Any) -> Batch:
    payload = encode_batch(float(seq), list(events), rank)
    return Batch(seq, payload, fingerprint(payload), False)


def test_batches_of_another_rank_are_never_credited() -> None:
    ingest = live()
    ingest.allow_ranks(frozenset({1}))
    feed(ingest, ranked(0, 1, stored([1, 2])))
    assert ingest.held.blocks.counts() == {"g0:GPU": 2}
    epoch = ingest.held.epoch
    feed(ingest, ranked(1, 0, stored([3])))
    assert ingest.state is StreamState.MISMATCHED and "publishes rank 0" in ingest.reason
    assert ingest.held.epoch != epoch and not ingest.held.blocks.counts(), (
        "what came before may have been another's too"
    )
    # A batch that names no rank belongs to the rank of the batch before it.
    feed(ingest, ranked(2, None, stored([4])), ranked(3, 0, stored([5])))
    assert not ingest.held.blocks.counts() and ingest.profile.tally.foreign == 3
    feed(ingest, ranked(4, 1, stored([6])))
    assert ingest.state is StreamState.LIVE and ingest.reason == ""
    assert ingest.held.blocks.counts() == {"g0:GPU": 1}


def test_a_rank_that_the_engine_names_later_has_its_stream_read_again() -> None:
    ingest = live()
    ingest.allow_ranks(frozenset({0}))
    feed(ingest, ranked(0, 4, stored([1])))
    assert ingest.state is StreamState.MISMATCHED
    assert ingest.allow_ranks(frozenset({0, 4})), "what was left out is wanted"
    assert ingest.state is StreamState.LIVE
    assert not live().allow_ranks(frozenset({0}))


def test_the_rank_of_a_stream_is_remembered_over_a_restart() -> None:
    ingest = live()
    ingest.allow_ranks(frozenset({1}))
    feed(ingest, ranked(0, 0, stored([1])))
    flush, again = taken(ingest), make()
    again.allow_ranks(frozenset({1}))
    again.restore(flush.epoch, 0, {}, {}, flush.meta)
    assert again.state is StreamState.MISMATCHED and "publishes rank 0" in again.reason
    assert again.allow_ranks(frozenset({0})), "what was left out is wanted"
    # Another life of the engine may have another rank.
    again.allow_ranks(frozenset({1}))
    feed(again, FellBehind(), Connected(), Restarted(0, 0, "seq 0 again"))
    assert again.state is StreamState.CATCHING_UP


def test_a_passing_reason_hides_no_lasting_one() -> None:
    ingest = feed(make(replay=None), Connected(), batch(0, stored([1]), placeholder(2)))
    assert ingest.state is not StreamState.CONNECTING and "no replay endpoint" in ingest.reason
    ingest.profile.forget_incident()
    assert "chunk size of the offload tier" in ingest.reason
    doubted = feed(make(), FellBehind(), Connected())
    assert doubted.reason
    doubted.profile.forget_incident()
    # This reason explains why the worker is not live, so it stays.
    assert "replaying" in doubted.reason


def entry(block_hash: int, parent: int | None, group: int, kind: str) -> WireStored:
    """Return the event of one block, or of one entry inside a larger block: both have this form."""
    return stored([block_hash], group, parent_block_hash=parent, kv_cache_spec_kind=kind)


def partial(seq: int = 0) -> Any:
    # Hash 3 ends at 48 tokens; its parent, hash 2, would end at 32 tokens, but nobody stored it.
    return batch(seq, entry(3, 2, 0, "full_attention"), entry(3, 2, 1, "mamba"))


def test_a_group_known_from_entries_inside_its_blocks_alone_has_larger_blocks() -> None:
    ingest = feed(live(), partial())
    assert ingest.profile.catalog.problem is None and ingest.profile.catalog.partial_hits
    assert [group.block_size for group in ingest.profile.catalog.groups] == [UNNAMED_BLOCK_TOKENS, 16]
    assert restored(ingest).profile.catalog == ingest.profile.catalog, "a router that takes over knows it too"
    feed(ingest, batch(1, stored([9], 0, block_size=528), entry(12, 11, 1, "mamba")))
    assert ingest.profile.catalog.groups[0].block_size == 528 and ingest.profile.catalog.partial_hits


@pytest.mark.parametrize(
    "events",
    [
        [],
        [stored([1, 2, 5])],
        [entry(1, None, 0, "full_attention"), entry(2, 1, 0, "full_attention")],
    ],
    ids=["what came before is not known", "several at a time", "each after its parent"],
)
def test_blocks_that_may_be_full_are_taken_as_full(events: list[Any]) -> None:
    ingest = feed(live(), *([batch(0, *events)] if events else []), partial(1))
    catalog = ingest.profile.catalog
    assert [group.block_size for group in catalog.groups] == [16, 16] and not catalog.partial_hits


def test_blocks_are_taken_as_full_after_an_unreadable_event() -> None:
    ingest = live()
    broken = Batch(0, msgspec.msgpack.encode([0.0, [{"type": "BlockStored", "block_hashes": "?"}]]), 0, False)
    feed(ingest, broken, partial(1))
    assert ingest.profile.tally.broken == 1
    assert [group.block_size for group in ingest.profile.catalog.groups] == [16, 16]


SMALL, LARGE = 1_536, 12_288
LONG_TOKENS = list(range(2 * LARGE))


def blocks_of(
    block_tokens: int, hash_tokens: int, group: int = 0, kind: str = "full_attention", blocks: int = 0
) -> WireStored:
    """Return the store of the first blocks of LONG_TOKENS, all that they fill if `blocks` is 0."""
    chain, _ = hash_chain(HashScheme.default(), None, np.array(LONG_TOKENS), hash_tokens, (None,))
    hashes = [int(chain[end // hash_tokens - 1]) for end in range(block_tokens, len(LONG_TOKENS) + 1, block_tokens)]
    stored_hashes = hashes[:blocks] if blocks else hashes
    return stored(
        stored_hashes, group, parent_block_hash=None, token_ids=LONG_TOKENS[: len(stored_hashes) * block_tokens],
        extra_keys=[None] * len(stored_hashes), block_size=block_tokens, kv_cache_spec_kind=kind,
    )  # fmt: skip


def full(block_tokens: int, group: int = 0) -> GroupSpec:
    return GroupSpec(group, "full_attention", block_tokens)


def mamba(block_tokens: int) -> GroupSpec:
    return GroupSpec(1, "mamba", block_tokens)


@pytest.mark.parametrize(
    ("spec", "events"),
    [
        (CatalogSpec(groups=(full(SMALL),)), [blocks_of(LARGE, LARGE)]),
        (CatalogSpec(groups=(full(LARGE),)), [blocks_of(SMALL, SMALL)]),
        (
            CatalogSpec(groups=(full(SMALL), mamba(SMALL))),
            [blocks_of(LARGE, LARGE), blocks_of(LARGE, LARGE, 1, "mamba")],
        ),
        # Three blocks of 1,536 tokens end before the first one of 12,288, so nothing of them would be found.
        (
            CatalogSpec(groups=(full(LARGE), mamba(LARGE))),
            [blocks_of(SMALL, SMALL, blocks=3), blocks_of(SMALL, SMALL, 1, "mamba", blocks=3)],
        ),
        (CatalogSpec(hash_block_size=SMALL), [blocks_of(LARGE, LARGE)]),
        (CatalogSpec(hash_block_size=LARGE), [blocks_of(SMALL, SMALL)]),
    ],
)
def test_a_stated_block_size_that_the_events_contradict_is_named_with_theirs(
    spec: CatalogSpec, events: list[WireStored]
) -> None:
    ingest = feed(live(catalog=spec), batch(0, *events))
    problem = ingest.profile.catalog.problem or ""
    assert str(SMALL) in problem and str(LARGE) in problem, problem
    # The engine's seed is not in doubt, so the reason does not name it.
    assert ingest.state is StreamState.LIVE and "none_hash" not in ingest.reason
    assert ingest.profile.identity.label.endswith("(verified)")
    # Another process of the router learns the same.
    assert restored(ingest, catalog=spec).profile.catalog.problem == problem


def test_blocks_that_are_stored_one_by_one_name_their_size_once_two_come_together() -> None:
    spec = CatalogSpec(groups=(full(LARGE), mamba(LARGE)))
    ingest = feed(live(catalog=spec), batch(0, blocks_of(SMALL, SMALL, blocks=1)))
    # An entry inside a block looks the same.
    assert ingest.profile.catalog.problem is None
    for seq in (1, 2):
        feed(ingest, batch(seq, stored([900 + seq], block_size=SMALL)))
    assert ingest.profile.catalog.problem is None
    feed(ingest, batch(3, stored([910, 911], block_size=SMALL)))
    assert str(SMALL) in (ingest.profile.catalog.problem or "")


def test_large_blocks_verify_the_scheme_if_one_hash_covers_each() -> None:
    ingest = feed(live(), batch(0, blocks_of(LARGE, LARGE)))
    assert ingest.profile.identity.label.endswith("(verified)")
    # Smaller hash blocks are not sought, which proves nothing against the scheme.
    ingest = feed(live(), batch(0, blocks_of(LARGE, SMALL)))
    assert ingest.profile.identity.label.endswith("(assumed)")


@pytest.mark.parametrize(
    "keys",
    [
        [["cache_salt", "a"]],
        ["cache_salt", "a"],
        [["cache_salt", "a", 0]],
        [["lora", "sql", "/adapters/sql"], ["cache_salt", "a"]],
        [7],
        7,
        {"cache_salt": "a"},
        [None],
    ],
    ids=str,
)
def test_extra_keys_of_an_unknown_form_earn_nothing_until_a_block_verifies(keys: Any) -> None:
    def salted(block_hash: int) -> WireStored:
        return stored([block_hash], parent_block_hash=None, token_ids=TOKENS, extra_keys=[keys])

    ingest = feed(live(), batch(0, salted(5)))
    assert ingest.state is StreamState.UNHASHABLE
    assert "extra key" in ingest.reason and "none_hash" not in ingest.reason
    assert "extra key" in ingest.profile.identity.label
    # However many of them come, a block of a known form is still looked at.
    feed(ingest, *(batch(seq, salted(5 + seq)) for seq in range(1, MAX_JUDGEMENTS + 2)))
    assert ingest.state is StreamState.UNHASHABLE and ingest.profile.tally.broken == 0
    feed(ingest, batch(MAX_JUDGEMENTS + 2, root(HashScheme.default())))
    assert ingest.state is StreamState.LIVE and ingest.reason == ""
    # Nor do such blocks take away what was verified.
    feed(ingest, batch(MAX_JUDGEMENTS + 3, salted(6)))
    assert ingest.state is StreamState.LIVE
