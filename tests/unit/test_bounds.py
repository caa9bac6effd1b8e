# SPDX-License-Identifier: Apache-2.0
"""Bounds on the router's memory for one stream, each of them exceeded; docs/reference/bounds.md lists them."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from kvrouter.events.patch.decode import MAX_CATALOG_BYTES, Unreadable, read_answer, read_report
from kvrouter.events.patch.items import Loaded, Snapshot, SnapshotPlace
from kvrouter.events.patch.messages import (
    CatalogMessage,
    DeclaredCatalog,
    Events,
    Heartbeat,
    Hello,
    PlaceSummary,
    ReportRemoved,
    ReportStored,
)
from kvrouter.events.transport.progress import CaughtUp
from kvrouter.events.vllm.codec import BatchDecoder, encode_batch
from kvrouter.events.vllm.messages import MAX_NAME_CHARS
from kvrouter.events.vllm.settings import SubscriberSettings
from kvrouter.events.vllm.stream_items import Batch, Connected, Disconnected, Restarted, StreamItem
from kvrouter.events.vllm.subscriber import Subscriber
from kvrouter.events.vllm.wire import WireRemoved
from kvrouter.router.base.common.compiled import wanted
from kvrouter.router.base.common.ids import GPU, Place, WorkerKey
from kvrouter.router.index.ingest import event_runs
from kvrouter.router.index.ingest.event_runs import RunReader
from kvrouter.router.index.ingest.ingest import Ingest
from kvrouter.router.index.ingest.residency import MAX_PLACES, Residency
from kvrouter.router.index.ingest.stock_feed import MAX_SHAPES
from kvrouter.router.index.matching import mirror as mirrors
from kvrouter.router.index.matching.matcher import HashPlans, Matcher, WorkerView
from kvrouter.router.index.matching.mirror import Mirror, MirrorFull
from kvrouter.router.index.matching.question import Question
from kvrouter.router.model.kvcache.catalog_learner import MAX_BLOCK_SIZES
from kvrouter.router.model.kvcache.gpu_hit import MAX_SPEC_GROUPS
from kvrouter.router.model.kvcache.hit_tables import BANK_BITS
from kvrouter.router.model.kvcache.prompt_hasher import SegmentMemory
from kvrouter.router.model.workers.registration import MAX_GROUPS, MAX_TOKENS
from kvrouter.router.model.workers.stream_state import StreamState
from tests.support import ingest_steps as steps
from tests.support.ingest_steps import batch, stored

WORKER = WorkerKey("m", "w")


def make() -> Ingest:
    return steps.feed(steps.make(), Connected(), CaughtUp())


def feed(ingest: Ingest, seq: int, *events: Any) -> Ingest:
    return steps.feed(ingest, batch(seq, *events))


def hashes_of(*numbers: int) -> Any:
    return np.array(numbers, np.uint64)


def test_a_stream_cannot_invent_places_without_end() -> None:
    owners = [stored([1], medium="FS", ownership=f"o{number}") for number in range(MAX_PLACES + 5)]
    ingest = feed(make(), 0, *owners)
    assert len(list(ingest.held.blocks.places)) == MAX_PLACES
    assert ingest.profile.tally.refused == 5
    assert "5 blocks found no room" in ingest.reason
    # A later removal of refused blocks takes nothing away, and blocks of known places are still counted.
    feed(ingest, 1, WireRemoved([1], "FS", 0, ownership=f"o{MAX_PLACES + 1}"), stored([2], medium="FS", ownership="o0"))
    assert ingest.held.blocks.counts()["g0:FS:o0"] == 2
    assert ingest.profile.tally.refused == 5


def test_a_removal_makes_no_place_beyond_the_bound() -> None:
    residency = Residency(max_places=1)
    residency.add_copies(Place(0, GPU), hashes_of(1))
    residency.remove_copies(Place(1, GPU), hashes_of(1))
    residency.clear(Place(2, GPU))
    assert list(residency.places) == [Place(0, GPU)]
    assert residency.refused_blocks == 0


def test_a_worker_holds_a_bounded_number_of_blocks_over_all_places() -> None:
    residency = Residency(max_blocks=10)
    residency.add_copies(Place(0, GPU), hashes_of(*range(6)))
    residency.add_copies(Place(1, GPU), hashes_of(*range(6)))
    assert (residency.blocks, residency.refused_blocks) == (6, 6)
    residency.remove_copies(Place(0, GPU), hashes_of(0, 1))
    residency.add_copies(Place(1, GPU), hashes_of(*range(6)))
    assert (residency.blocks, residency.refused_blocks) == (10, 6)


def test_changed_copies_count_toward_the_bound_of_pending_changes() -> None:
    residency = Residency()
    residency.add_copies(Place(0, GPU), hashes_of(*range(100)))
    residency.take_changes()
    residency.add_copies(Place(0, GPU), hashes_of(*range(100)))
    assert residency.pending_blocks == 100


def test_a_snapshot_gets_the_room_of_empty_places() -> None:
    ingest = feed(make(), 0, *(stored([1], medium="FS", ownership=f"o{number}") for number in range(MAX_PLACES)))
    places = [SnapshotPlace(g, GPU, None, hashes_of(1, 2), []) for g in range(3)]
    ingest.apply(Loaded(Snapshot("a" * 16, 1.0, 5, places, [])), 1.0)
    assert ingest.held.blocks.counts() == {"g0:GPU": 2, "g1:GPU": 2, "g2:GPU": 2}
    cpu_places = [SnapshotPlace(g, "CPU", None, hashes_of(1), []) for g in range(MAX_PLACES - 2)]
    ingest.apply(Loaded(Snapshot("a" * 16, 1.0, 9, cpu_places, [])), 1.0)
    ingest.apply(CaughtUp(), 1.0)
    assert len(ingest.held.blocks.counts()) == MAX_PLACES - 2
    assert ingest.state is StreamState.LIVE


@pytest.mark.parametrize("fields", [{"medium": "x"}, {"ownership": "x"}, {"kv_cache_spec_kind": "x"}])
def test_a_name_that_is_too_long_breaks_its_event(fields: dict[str, Any]) -> None:
    for size, broken in ((MAX_NAME_CHARS, 0), (MAX_NAME_CHARS + 1, 1)):
        event = stored([1], **{name: text * size for name, text in fields.items()})
        batch = BatchDecoder().decode(encode_batch(1.0, [event, stored([2])]))
        assert (len(batch.events), len(batch.broken)) == (2 - broken, broken)


def test_a_removal_with_a_name_that_is_too_long_voids_the_blocks() -> None:
    ingest = feed(make(), 0, stored([1, 2]))
    feed(ingest, 1, WireRemoved([1], "GPU", 0, ownership="x" * (MAX_NAME_CHARS + 1)))
    assert ingest.held.blocks.counts() == {}
    assert ingest.profile.tally.broken == 1


def test_reports_with_names_that_are_too_long_are_unreadable() -> None:
    long = "x" * (MAX_NAME_CHARS + 1)
    for event in (
        ReportStored(b"", 0, long),
        ReportStored(b"", 0, GPU, kind=long),
        ReportRemoved(b"", 0, GPU, ownership=long),
    ):
        message = read_report(msgspec.msgpack.encode(Events("e" * 16, 1.0, 2.0, [event])))
        assert isinstance(message, Unreadable)
        assert message.uses_seq
    beat = Heartbeat("e" * 16, 1.0, 2.0, 1.0, [PlaceSummary(0, long, 1, 1, 1)])
    assert isinstance(read_report(msgspec.msgpack.encode(beat)), Unreadable)


def test_a_declared_catalog_has_a_bound_in_bytes() -> None:
    for size, kept in ((1_000, True), (MAX_CATALOG_BYTES, False)):
        catalog = DeclaredCatalog(groups=[], lora_paths={"a": "x" * size})
        message = read_report(msgspec.msgpack.encode(CatalogMessage("e" * 16, 1.0, 1, catalog)))
        assert isinstance(message, CatalogMessage if kept else Unreadable)
        hello = Hello(1, "e" * 16, 1.0, 0, "tcp://h:1", 1.0, catalog=catalog)
        assert isinstance(read_answer([b"", msgspec.msgpack.encode(hello)]), Hello if kept else Unreadable)


def test_the_learner_remembers_a_bounded_number_of_groups_sizes_and_shapes() -> None:
    ingest = feed(make(), 0, *(stored([1], group) for group in range(10 * MAX_GROUPS)))
    assert f"more than {MAX_GROUPS} KV cache groups" in (ingest.profile.catalog.problem or "")
    assert len(ingest.profile.catalog.groups) == MAX_GROUPS
    assert len(ingest.profile.learner._seen) == MAX_GROUPS + 1
    sizes = feed(make(), 0, *(stored([1], block_size=size) for size in range(1, 3 * MAX_SHAPES)))
    assert "contradicts itself" in (sizes.profile.catalog.problem or "")
    assert len(sizes.profile.learner._seen[0].block_sizes) == MAX_BLOCK_SIZES
    assert len(sizes.stock.known_shapes) <= MAX_SHAPES
    assert len(sizes.profile.learner.dump()) < 1_000


def test_the_shapes_by_which_batches_are_read_are_bounded() -> None:
    reader = RunReader()
    for first in range(0, 4 * event_runs.MAX_SHAPES, 1_000):
        reader.read([encode_batch(1.0, [stored([1], block_size=size) for size in range(first, first + 1_000)])])
        assert len(reader._shapes) <= 2 * event_runs.MAX_SHAPES
    assert bool(reader._shapes) is wanted()
    shape_count = len(reader._shapes)
    assert reader.read([encode_batch(1.0, [stored([1], block_size=size) for size in range(5_000)])]) is None
    assert reader.read([encode_batch(1.0, [stored([1], locality="x" * 10_000)])]) is None
    assert len(reader._shapes) <= shape_count + event_runs.MAX_SHAPES


def test_the_rule_has_room_for_every_catalog_that_is_let_through() -> None:
    assert MAX_GROUPS <= MAX_SPEC_GROUPS
    assert (MAX_TOKENS + 1) ** 2 <= 2**63


@pytest.mark.parametrize(
    "events",
    [
        [stored([1], block_size=MAX_TOKENS + 1)],
        [stored([1], block_size=MAX_TOKENS), stored([1], 1, block_size=MAX_TOKENS - 18, kv_cache_spec_kind="mamba")],
        [stored([1]), stored([1], 1, kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=2**64 - 1)],
        [stored([1], block_size=MAX_TOKENS), stored([1, 2, 3], block_size=MAX_TOKENS, medium="CPU")],
    ],
)
def test_sizes_that_no_kernel_can_hold_cost_that_worker_its_credit_and_no_other(events: list[Any]) -> None:
    """Regression: a table of int64 refused these sizes with an exception, for all workers of the model."""
    ingest = feed(make(), 0, *events)
    good = feed(make(), 0, stored([1, 2]))
    mirror = Mirror(1 << 24)
    views = []
    for name, each in (("bad", ingest), ("good", good)):
        worker = WorkerKey("m", name)
        mirror.begin_epoch(worker, each.held.epoch)
        for place, block_hashes in ((Place(0, GPU), hashes_of(1, 2)),):
            mirror.add(worker, place, block_hashes)
        catalog, scheme = each.profile.catalog, each.profile.identity.scheme
        views.append(WorkerView(worker, None, each.state, True, each.reason, each.held.epoch, catalog, scheme, {}))
    plans = HashPlans.build(mirror, views)
    assert [view.worker.worker_id for view, _ in plans.withheld] == ["bad"]
    assert plans.by_hash is not None
    assert [view.worker.worker_id for view in plans.by_hash.views] == ["good"]
    assert "tokens" in plans.withheld[0][1]


def test_a_table_without_a_free_slot_refuses_blocks_and_still_knows_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the mirror kept a place without a slot, and more blocks of it ended the task following the logs."""
    monkeypatch.setattr(mirrors, "MAX_SLOTS", 1)
    mirror = Mirror(1 << 24)
    first, second = WorkerKey("m", "first"), WorkerKey("m", "second")
    mirror.begin_epoch(first, "e")
    for group in range(BANK_BITS):
        mirror.add(first, Place(group, GPU), hashes_of(1))
    for _ in range(2):
        with pytest.raises(MirrorFull, match="worker slots"):
            mirror.add(first, Place(BANK_BITS, GPU), hashes_of(1, 2))
        mirror.discard(first, Place(BANK_BITS, GPU), hashes_of(1, 2))
    mirror.begin_epoch(second, "e")
    with pytest.raises(MirrorFull):
        mirror.add(second, Place(0, GPU), hashes_of(1))
    residency = mirror.worker(second)
    assert residency is not None
    assert residency.refused_blocks == 1
    # A worker without a slot can still be judged: it holds nothing.
    ingest = feed(make(), 0, stored([1, 2]))
    scheme = ingest.profile.identity.scheme
    view = WorkerView(second, None, ingest.state, True, "", "e", ingest.profile.catalog, scheme, {})
    plans = HashPlans.build(mirror, [view])
    (hit,) = Matcher(mirror, SegmentMemory(0)).match(Question("m", 33, block_hashes=hashes_of(1, 2)), plans)
    assert (hit.on_gpu, hit.state) == (0, ingest.state.value)


async def test_a_message_over_the_limit_costs_its_connection_and_not_the_stream() -> None:
    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.XPUB) as publisher:
        publisher.setsockopt(zmq.LINGER, 0)
        # With XPUB_VERBOSE, each subscription is shown, also that of a reader that reconnects.
        publisher.setsockopt(zmq.XPUB_VERBOSE, 1)
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        settings = SubscriberSettings(max_message_bytes=1_000, reopen_s=0.1)
        subscriber = Subscriber(f"tcp://127.0.0.1:{port}", context=context, settings=settings)
        await subscriber.start()
        items: list[StreamItem] = []

        async def until(kind: type[StreamItem], times: int = 1) -> None:
            while sum(isinstance(item, kind) for item in items) < times:
                items.extend(await subscriber.next())

        async def subscribed() -> None:
            while not (publisher.poll(0) and publisher.recv().startswith(b"\1")):
                await asyncio.sleep(0.005)

        async with asyncio.timeout(20):
            await until(Connected)
            await subscribed()
            publisher.send_multipart([b"", bytes(8), b"x" * 1_001])
            await until(Disconnected)
            assert not any(isinstance(item, Batch) for item in items)
            await until(Connected, 2)
            await subscribed()
            publisher.send_multipart([b"", bytes(8), b"x" * 1_000])
            await until(Batch)
        await subscriber.close()


async def test_a_connection_to_a_process_that_is_reported_to_be_gone_is_opened_again() -> None:
    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.XPUB) as publisher:
        publisher.setsockopt(zmq.LINGER, 0)
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        items: list[StreamItem] = []

        def connections() -> int:
            return sum(isinstance(item, Connected) for item in items)

        async with asyncio.timeout(20):
            # The former process was seen before the connection began, which is to the new one then, and after it.
            for age_s, expected in ((60.0, 1), (0.0, 2)):
                items.clear()
                subscriber = Subscriber(f"tcp://127.0.0.1:{port}", context=context)
                await subscriber.start()
                while not connections():
                    items.extend(await subscriber.next())
                subscriber.expire("its process is another", age_s)
                while connections() < expected or not any(isinstance(item, Restarted) for item in items):
                    items.extend(await subscriber.next())
                assert connections() == expected
                assert any(isinstance(item, Disconnected) for item in items) == (expected == 2)
                await subscriber.close()
