# SPDX-License-Identifier: Apache-2.0
"""Random requests with a source, to the simulated tier and to the engine's: equal hits, equal pulls, equal tiers."""

from __future__ import annotations

import random

import pytest

from kvrouter.engine_patch.offload.key import OffloadKey, pack
from kvrouter.engine_patch.offload.tiers.tiering import LookupAnswer
from kvrouter.simulator.cache.cpu_tier import Uses
from kvrouter.simulator.cache.offload import Offload
from kvrouter.simulator.cache.peer import PeerWish
from kvrouter.simulator.cache.pool import Key
from kvrouter.simulator.cache.shapes import Geometry, gpt_oss, llama, qwen3_next
from kvrouter.simulator.engine.replica import Replica
from tests.support.peer_world import Engine, World

READ = {LookupAnswer.YES: True, LookupAnswer.NO: False, LookupAnswer.SOON: None, LookupAnswer.UNKNOWN: None}
# The source lends at most half of its chunks at once, which is more than the longest prompt has.
SOURCE_CHUNKS = 72
LONGEST_CHUNKS = 12
# The reader evicts nothing: a chunk that an eviction passes over becomes the youngest in the engine, and keeps its place
# in the simulated tier, which is that of vLLM's own connector.
READER_CHUNKS = 600


def real(key: Key) -> OffloadKey:
    return pack(key.block_hash, key.group_idx)


class Twins:
    """A simulated replica and its source, and an engine's tiers and their source, which get the same calls."""

    def __init__(self, geometry: Geometry) -> None:
        self.source, self.reader = (
            Replica(geometry, 100, on_step=lambda events: None, cpu_chunks=size)
            for size in (SOURCE_CHUNKS, READER_CHUNKS)
        )
        self.world = World()
        self.real_source = self.world.engine("source", SOURCE_CHUNKS)
        self.real_reader = self.world.engine("reader", READER_CHUNKS)
        self.groups = geometry.groups

    def keys(self, hashes: list[bytes]) -> list[Key]:
        """Return the chunks of a text; every group has blocks of the hash block size."""
        return [Key(g, block) for block in hashes for g in range(len(self.groups))]

    def store(self, replica: Replica, engine: Engine, key: Key) -> None:
        tier = offload_of(replica).tier
        if tier.lookup(key) is False:
            tier.end_store(tier.begin_store({key: 0}, Uses()) or ())
            engine.store(real(key))

    def serve(self, prompt: list[int]) -> int:
        """Look a prompt up until what can be loaded is known, in both worlds, and return it."""
        text, offload = self.reader.text(prompt), offload_of(self.reader)
        simulated = PeerWish(offload_of(self.source).lender, 10.0)
        job = self.reader.prepare(text, 1, peer=simulated)
        wish = self.real_reader.wish(self.real_source, 10.0)
        # The simulated tier knows from the start what the source holds, so both query it for all chunks.
        for key in self.keys(text.hashes):
            self.real_reader.tiers.look_up(real(key), wish)
            if offload.tier.lookup(key) is False:
                offload._can_fetch(simulated, key)
        offload.query(simulated)
        self.real_reader.tiers.end_step()
        self.turn()
        for _ in range(2 * LONGEST_CHUNKS):
            found = offload.find(job, 0)
            offload.plan([])
            for pull in offload.plan_pulls():
                offload.end(pull.number)
            expected = offload._ask(
                text.hashes, len(prompt), 0, lambda key: READ[self.real_reader.tiers.look_up(real(key), wish)]
            )
            self.real_reader.tiers.end_step()
            self.turn()
            assert found == expected
            self.compare()
            if found is not None:
                break
        else:
            raise AssertionError("it never became known what can be loaded")
        offload.ended(job)
        offload.plan([])
        self.real_reader.tiers.forget(wish)
        return found

    def turn(self) -> None:
        """Let every question and every transfer end."""
        for _ in range(6):
            self.world.turn()
        self.real_reader.read_changes()

    def compare(self) -> None:
        for replica, engine in ((self.source, self.real_source), (self.reader, self.real_reader)):
            assert set(map(real, offload_of(replica).tier.resident())) == engine.announced
        assert offload_of(self.reader).peer_counts.pulled == self.real_reader.peers.pulled


def offload_of(replica: Replica) -> Offload:
    assert replica.offload is not None
    return replica.offload


@pytest.mark.parametrize("geometry", [llama(16), gpt_oss(16, 32), qwen3_next(16, 3)], ids=lambda shape: shape.name)
@pytest.mark.parametrize("seed", range(4))
def test_simulated_tier_fetches_what_the_engines_tier_fetches(geometry: Geometry, seed: int) -> None:
    rng = random.Random(seed)
    twins = Twins(geometry)
    found = []
    for _ in range(30):
        prompt = [rng.randrange(3)] * 16
        for _ in range(rng.randrange(LONGEST_CHUNKS - 1)):
            prompt += [rng.randrange(2)] * 16
        prompt += [7] * rng.randrange(16)
        hashes = twins.source.text(prompt).hashes
        # Most of the prompt is at the source, some of it here.
        for key in twins.keys(hashes):
            if rng.random() < 0.9:
                twins.store(twins.source, twins.real_source, key)
            if rng.random() < 0.15:
                twins.store(twins.reader, twins.real_reader, key)
        twins.compare()
        found.append(twins.serve(prompt))
    assert sum(found) > 0 and offload_of(twins.reader).peer_counts.pulled > 20
