# SPDX-License-Identifier: Apache-2.0
"""Chunks that a simulated replica fetches from another one, by cases small enough to follow by hand."""

from __future__ import annotations

import pytest

from kvrouter.simulator.cache.cpu_tier import CacheEvent, EvictedChunk, OffloadedChunk, Uses
from kvrouter.simulator.cache.peer import PeerMiss
from kvrouter.simulator.cache.pool import Key
from kvrouter.simulator.cache.shapes import Geometry, gpt_oss, llama, qwen3_next
from kvrouter.simulator.engine.replica import Replica
from kvrouter.simulator.engine.timing import Timing
from kvrouter.simulator.engine.virtual_time import ReplicaFleet, VirtualReplica

# A prefilled token takes 1 ms, a loaded token 0.1 ms, a step 10 ms, a load 5 ms, a fetched chunk 2 ms and the way to
# its source 1 ms.
TIMING = Timing(1000, 0.010, 0.0, 10_000, 0.005, 0.002, 0.001)
PROMPT = list(range(100))
PATIENT_S = 10.0


class Fleet:
    """Replicas that fetch from each other, and their events."""

    def __init__(self, geometry: Geometry, replicas: int = 2, chunks: int = 40, own_chunks: int = 0) -> None:
        self.events: list[list[CacheEvent]] = [[] for _ in range(replicas)]
        sizes = [own_chunks or chunks, *[chunks] * (replicas - 1)]
        self.replicas = [
            Replica(geometry, 60, on_step=events.extend, chunk_tokens=64, cpu_chunks=size)
            for events, size in zip(self.events, sizes, strict=True)
        ]
        self.fleet = ReplicaFleet([VirtualReplica(replica, TIMING) for replica in self.replicas])
        self.now_s = 0.0

    def serve(self, number: int, prompt: list[int], source: int | None = None, timeout_s: float = PATIENT_S) -> int:
        """Serve a prompt at an idle fleet; return how much of it was not computed."""
        self.now_s += 100.0
        wish = None if source is None else self.fleet.wish(source, timeout_s)
        job = self.fleet.submit(number, self.replicas[number].text(prompt), 1, self.now_s, wish)
        self.first_token_s = next(moment.time_s for moment in self.fleet.advance() if moment.job is job) - self.now_s
        list(self.fleet.advance())
        return job.cached

    def offload(self, number: int):  # type: ignore[no-untyped-def]
        offload = self.replicas[number].offload
        assert offload is not None
        return offload

    def missed(self, number: int) -> dict[PeerMiss, int]:
        return dict(self.offload(number).peer_counts.missed)

    def pinned(self, number: int) -> list[Key]:
        tier = self.offload(number).tier
        return [key for key, readers in tier._readers.items() if readers]


@pytest.mark.parametrize("geometry", [llama(16), gpt_oss(16, 32), qwen3_next(16, 3)], ids=lambda shape: shape.name)
def test_what_the_source_holds_is_fetched_and_loaded_in_every_group(geometry: Geometry) -> None:
    fleet = Fleet(geometry)
    fleet.serve(1, PROMPT)
    assert fleet.serve(0, PROMPT) == 0
    fleet = Fleet(geometry)
    fleet.serve(1, PROMPT)
    held = fleet.offload(1).tier.resident()
    text = fleet.replicas[1].text(PROMPT)
    reachable = fleet.offload(0).reach(text.hashes, len(PROMPT), 0, lambda key: key in held)
    assert fleet.serve(0, PROMPT, source=1) == reachable >= 64
    arrived = {event.key for event in fleet.events[0] if isinstance(event, OffloadedChunk)}
    assert fleet.offload(0).peer_counts.pulled > 0 and arrived == fleet.offload(0).tier.resident()
    assert not fleet.pinned(0) and not fleet.pinned(1)


def test_a_pull_takes_its_latency_and_its_bytes_and_then_the_load() -> None:
    fleet = Fleet(llama(16))
    fleet.serve(1, PROMPT)
    assert fleet.serve(0, PROMPT, source=1) == 96
    # 1 ms to the source, 6 chunks of 2 ms, a load of 5 ms and 96 tokens of 0.1 ms, and a step of 10 ms and 4 tokens.
    assert fleet.first_token_s == pytest.approx(0.001 + 0.012 + 0.005 + 0.0096 + 0.010 + 0.004)


def test_pulls_from_one_source_share_its_link() -> None:
    fleet = Fleet(llama(16), replicas=3)
    fleet.serve(2, PROMPT)
    fleet.now_s += 100
    jobs = [
        fleet.fleet.submit(n, fleet.replicas[n].text(PROMPT), 1, fleet.now_s, fleet.fleet.wish(2, PATIENT_S))
        for n in (0, 1)
    ]
    at = {moment.job: moment.time_s - fleet.now_s for moment in fleet.fleet.advance()}
    assert at[jobs[1]] - at[jobs[0]] == pytest.approx(0.012)


def test_what_comes_too_late_is_computed_and_stored_all_the_same() -> None:
    fleet = Fleet(llama(16))
    fleet.serve(1, PROMPT)
    assert fleet.serve(0, PROMPT, source=1, timeout_s=0.005) == 0
    assert fleet.missed(0) == {PeerMiss.DEADLINE: 6}
    # The request waits for 5 ms, then computes 100 tokens in two steps.
    assert fleet.first_token_s == pytest.approx(0.005 + 0.020 + 0.100)
    assert len(fleet.offload(0).tier.resident()) == 6
    assert not fleet.pinned(0) and not fleet.pinned(1)


def test_what_the_source_lacks_is_computed_and_counted() -> None:
    fleet = Fleet(llama(16))
    fleet.serve(1, PROMPT[:48])
    assert fleet.serve(0, PROMPT, source=1) == 48
    assert fleet.missed(0) == {PeerMiss.ABSENT: 1}


def test_a_source_that_ends_during_a_pull_delivers_nothing() -> None:
    fleet = Fleet(llama(16))
    fleet.serve(1, PROMPT)
    fleet.now_s += 100
    wish = fleet.fleet.wish(1, PATIENT_S)
    job = fleet.fleet.submit(0, fleet.replicas[0].text(PROMPT), 1, fleet.now_s, wish)
    assert not list(fleet.fleet.advance(fleet.now_s + 0.005))
    fleet.offload(1).lender.gone = True
    list(fleet.fleet.advance())
    assert job.cached == 0
    assert fleet.missed(0) == {PeerMiss.GONE: 6}


def test_chunks_without_room_are_counted_and_computed() -> None:
    fleet = Fleet(llama(16), own_chunks=4)
    fleet.serve(1, PROMPT)
    assert fleet.serve(0, PROMPT, source=1) == 64
    assert fleet.missed(0) == {PeerMiss.NO_ROOM: 2}


def test_a_pull_evicts_as_a_store_does() -> None:
    fleet = Fleet(llama(16), own_chunks=8)
    fleet.serve(1, PROMPT)
    fleet.serve(0, list(range(500, 600)))
    assert fleet.serve(0, PROMPT, source=1) == 96
    assert sum(len(event.hashes) for event in fleet.events[0] if isinstance(event, EvictedChunk)) == 4


def test_a_chunk_that_is_being_lent_is_not_evicted() -> None:
    fleet = Fleet(llama(16), chunks=6)
    fleet.serve(1, PROMPT)
    fleet.now_s += 100
    job = fleet.fleet.submit(0, fleet.replicas[0].text(PROMPT), 1, fleet.now_s, fleet.fleet.wish(1, PATIENT_S))
    assert not list(fleet.fleet.advance(fleet.now_s + 0.005))
    tier = fleet.offload(1).tier
    assert len(fleet.pinned(1)) == 6
    assert tier.begin_store({Key(0, b"another"): 16}, Uses()) is None
    list(fleet.fleet.advance())
    assert job.cached == 96
    assert tier.begin_store({Key(0, b"another"): 16}, Uses())


def test_a_second_request_waits_for_the_chunks_that_the_first_one_fetches() -> None:
    fleet = Fleet(llama(16))
    fleet.serve(1, PROMPT)
    fleet.now_s += 100
    jobs = [
        fleet.fleet.submit(0, fleet.replicas[0].text(PROMPT), 1, fleet.now_s, fleet.fleet.wish(1, PATIENT_S))
        for _ in range(2)
    ]
    list(fleet.fleet.advance())
    assert [job.cached for job in jobs] == [96, 96]
    assert fleet.offload(0).peer_counts.pulled == 6
