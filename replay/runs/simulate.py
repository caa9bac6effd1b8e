# SPDX-License-Identifier: Apache-2.0
"""A trace through simulated replicas in virtual time, routed by one policy.

The replicas decide and publish as vLLM's scheduler does (simulator/engine/virtual_time.py). Hits come from this
router's own ingest, mirror and matcher, under every policy. The same trace, fleet, policy and seed give the same run.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvrouter.replay.fleet.fleet_shape import FleetShape, Restart
from kvrouter.replay.fleet.virtual_fleet import VirtualFleet
from kvrouter.replay.policies.names import router_of
from kvrouter.replay.policies.routing import Arrival, Placed
from kvrouter.replay.policies.this_router import PULLING
from kvrouter.replay.runs.policy_run import LoadProfile, PolicyRun
from kvrouter.replay.traces.request import Request, Trace
from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.model.engines.engine_metrics import EngineLoad
from kvrouter.simulator.cache.job import Job
from kvrouter.simulator.cache.shapes import Geometry
from kvrouter.simulator.cache.text import PieceText
from kvrouter.simulator.engine.replica import RequestRefused, Stuck
from kvrouter.simulator.engine.timing import TOKEN_BYTES
from kvrouter.simulator.engine.virtual_time import ReplicaFleet, VirtualReplica

FOREVER = float("inf")


def text_of(request: Request, geometry: Geometry, number: int, piece_tokens: int) -> PieceText:
    """Return the text of a request. Raises ValueError if its pieces cannot be cut into the geometry's blocks."""
    return PieceText(
        request.pieces,
        request.prompt_tokens,
        piece_tokens=piece_tokens,
        hash_block_size=geometry.hash_block_size,
        number=number,
    )


class Simulation:
    """One run, driven by the arrivals of the requests."""

    def __init__(self, trace: Trace, shape: FleetShape, policy: str, seed: int, speedup: float = 1.0) -> None:
        """Prepare a run, in which requests come `speedup` times as fast as in the trace. Raises SettingError."""
        self._trace = trace
        self._shape = shape
        self._geometry = shape.geometry
        self._speedup = speedup
        size = shape.geometry.hash_block_size
        if trace.piece_tokens % size:
            raise SettingError(
                f"blocks of {size} tokens do not divide the trace's pieces of {trace.piece_tokens}: "
                "take a --block-tokens that does, or leave it out"
            )
        workers = len(shape.replicas)
        has_cpu_tier = any(replica.cpu_blocks for replica in shape.replicas)
        pool_blocks = [replica.blocks for replica in shape.replicas]
        self.index = VirtualFleet(
            shape.geometry,
            workers,
            has_cpu_tier=has_cpu_tier,
            pool_blocks=pool_blocks,
            token_bytes=TOKEN_BYTES if policy == PULLING and shape.peer is not None and has_cpu_tier else 0,
        )
        self.router = router_of(policy, self.index, seed, trace.piece_tokens)
        try:
            self.fleet = ReplicaFleet([self._replica(number) for number in range(workers)])
        except ValueError as error:
            raise SettingError(f"a replica of this size cannot run: {error}") from None
        self._placed: dict[Job, tuple[Placed, int, float]] = {}
        self._in_flight = [0] * workers
        # Restarts still to come, the next one first.
        self._restarts = deque(sorted(shape.restarts, key=lambda restart: restart.time_s))
        self.run = PolicyRun(
            policy,
            seed,
            tuple(replica.timing.prefill_tokens_per_s for replica in shape.replicas),
            LoadProfile(workers, trace.span_s / speedup),
        )

    def _replica(self, number: int) -> VirtualReplica:
        return self._shape.replica(number, lambda now_s, events: self.index.published(number, events, now_s))

    def _loads(self) -> list[EngineLoad]:
        return [
            EngineLoad(
                virtual.replica.scheduler.num_waiting,
                len(virtual.replica.scheduler.running),
                virtual.replica.cache.usage,
            )
            for virtual in self.fleet.replicas
        ]

    def advance(self, until_s: float) -> None:
        """Advance the time to `until_s`, with the restarts up to then. Raises Stuck."""
        while self._restarts and self._restarts[0].time_s <= until_s:
            restart = self._restarts.popleft()
            self._run_until(restart.time_s)
            self._restart(restart)
        self._run_until(until_s)

    def _restart(self, restart: Restart) -> None:
        """Replace a replica by an empty one, and send it the requests of the old one again, in their order.

        The requests keep their arrival time, as the client has waited since then, and only the answer of the new
        replica counts.
        """
        worker = restart.worker
        self.index.now_s = restart.time_s
        self.index.restarted(worker)
        if (offload := self.fleet.replicas[worker].replica.offload) is not None:
            offload.lender.gone = True
        self.fleet.replicas[worker] = self._replica(worker)
        lost = [(job, entry) for job, entry in self._placed.items() if entry[0].number == worker]
        for job, (placed, _, _) in lost:
            placed.done(None)
            del self._placed[job]
        for _, (_, number, arrived_s) in lost:
            placed = self.router.place(self._arrival(number), worker)
            # Use a new text, as that of the old job has grown by its answer.
            job = self._submit(placed, number, self._text(number), restart.time_s)
            self._placed[job] = (placed, number, arrived_s)

    def _text(self, number: int) -> PieceText:
        return text_of(self._trace.requests[number], self._geometry, number, self._trace.piece_tokens)

    def _arrival(self, number: int) -> Arrival:
        request, size = self._trace.requests[number], self._geometry.hash_block_size
        hashes = PieceText.hash_numbers(request.pieces, request.prompt_tokens, self._trace.piece_tokens, size)
        prompt = (request.pieces, hashes, request.prompt_tokens)
        return Arrival(*prompt, request.output_tokens, request.session, request.key)

    def _max_tokens(self, number: int) -> int:
        return max(1, self._trace.requests[number].output_tokens)

    def _submit(self, placed: Placed, number: int, text: PieceText, now_s: float) -> Job:
        """Submit a request where it was placed, with the source from which it fetches. Raises RequestRefused."""
        pull = placed.pull
        wish = pull and self.fleet.wish(pull.source, pull.timeout_s)
        return self.fleet.submit(placed.number, text, self._max_tokens(number), now_s, wish)

    def _run_until(self, until_s: float) -> None:
        for moment in self.fleet.advance(until_s):
            self.index.now_s = self.run.span_s = moment.time_s
            placed, number, arrived_s = self._placed[moment.job]
            if moment.kind == "first_token":
                placed.first_token()
                self.run.ttft_s[number] = moment.time_s - arrived_s
                self.run.reused[number] = moment.job.cached
                if placed.pull is not None and moment.job.peer is not None:
                    self.run.pulls.add(placed.pull, moment.job.peer, moment.job.cached)
                placed.reused(moment.job.cached)
            else:
                placed.done(moment.job.sampled)
                self.run.output[number] = moment.job.sampled
                self._in_flight[placed.number] -= 1
                del self._placed[moment.job]

    def arrive(self, number: int) -> None:
        """Place request `number` of the trace at its time. Raises Stuck."""
        request = self._trace.requests[number]
        now_s = request.time_s / self._speedup
        self.advance(now_s)
        self.index.now_s = now_s
        self.router.tend(self._loads)
        self.run.load.add(now_s, self._in_flight)
        text = self._text(number)
        placed = self.router.place(self._arrival(number))
        index = self.run.add(
            request.prompt_tokens,
            placed.achievable_tokens,
            placed.predicted_tokens,
            placed.expected_tokens,
            worker=placed.number,
        )
        try:
            job = self._submit(placed, number, text, now_s)
        except RequestRefused as error:
            placed.done(None)
            self.run.refused += 1
            self.run.refusal = self.run.refusal or str(error)
            return
        self._placed[job] = (placed, index, now_s)
        self._in_flight[placed.number] += 1


@contextmanager
def no_collection() -> Iterator[None]:
    """Turn off garbage collection: blocks and jobs are millions of objects, and nearly none is garbage in a cycle."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
            gc.collect()


def simulate(
    trace: Trace,
    shape: FleetShape,
    policy: str,
    seed: int,
    *,
    speedup: float = 1.0,
    on_request: Callable[[int], None] = lambda done: None,
) -> PolicyRun:
    """Run the trace under one policy. Raises SettingError.

    `on_request` is called after each request with the number of requests placed. Ctrl-C ends the run early: the results
    so far are returned, marked partial.
    """
    simulation = Simulation(trace, shape, policy, seed, speedup)
    run, began_s = simulation.run, time.perf_counter()
    with no_collection():
        try:
            for number in range(len(trace.requests)):
                simulation.arrive(number)
                on_request(number + 1)
            simulation.advance(FOREVER)
        except KeyboardInterrupt:
            run.partial = True
        except Stuck as error:
            raise SettingError(f"under {policy}: {error}; give --cache-tokens more") from None
    run.wall_s = time.perf_counter() - began_s
    return run
