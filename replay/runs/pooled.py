# SPDX-License-Identifier: Apache-2.0
"""The reuse of a trace by a single cache: one replica serves all requests, each finished before the next begins.

Answers take no memory there.
"""

from __future__ import annotations

from collections.abc import Callable

from kvrouter.replay.fleet.fleet_shape import CONTEXT_TOKENS, FleetShape, ReplicaShape
from kvrouter.replay.runs.simulate import no_collection, text_of
from kvrouter.replay.traces.request import Trace
from kvrouter.simulator.cache.shapes import Geometry
from kvrouter.simulator.cache.text import PieceText
from kvrouter.simulator.engine.replica import Replica, RequestRefused


def pooled_reuse(
    trace: Trace, shape: FleetShape, *, on_request: Callable[[int], None] = lambda done: None
) -> list[int]:
    """Return the tokens of each request that one replica with all blocks and all tiers of the fleet does not compute.

    The replica never restarts. A request that does not fit even there reuses nothing. `on_request` is called after each
    request with the number of requests done.
    """
    replica = Replica(
        shape.geometry,
        sum(replica.blocks for replica in shape.replicas),
        on_step=lambda events: None,
        cpu_chunks=sum(replica.cpu_blocks for replica in shape.replicas),
        max_text_tokens=CONTEXT_TOKENS,
    )
    reused = []
    with no_collection():
        for number, request in enumerate(trace.requests):
            reused.append(_reused(replica, text_of(request, shape.geometry, number, trace.piece_tokens)))
            on_request(number + 1)
    return reused


def _reused(replica: Replica, text: PieceText) -> int:
    try:
        job = replica.submit(text, 1)
    except RequestRefused:
        return 0
    # After the answer, the replica still stores chunks in its CPU tier.
    while replica.busy:
        step = replica.begin_step()
        replica.end_step(step, [transfer.number for transfer in (*step.loads, *step.stores)])
    return job.cached


def endless_reuse(trace: Trace, geometry: Geometry) -> list[int]:
    """Return the most that any router could reuse of each request, by a cache whose blocks never run out.

    The cache keeps checkpoints as vLLM does.
    """
    smallest = min(group.block_size for group in geometry.groups)
    # Full attention keeps each token once, the other groups keep less.
    return pooled_reuse(trace, FleetShape(geometry, (ReplicaShape(2 * trace.prompt_tokens // smallest),)))
