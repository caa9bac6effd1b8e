# SPDX-License-Identifier: Apache-2.0
"""The most that anything which keeps checkpoints as vLLM does could reuse of a trace: one replica for all, whose blocks
never run out, one request after another."""

from __future__ import annotations

from kvrouter.replay.fleet.fleet_shape import CONTEXT_TOKENS
from kvrouter.replay.runs.simulate import text_of
from kvrouter.replay.traces.request import Trace
from kvrouter.simulator.cache.shapes import Geometry
from kvrouter.simulator.engine.replica import Replica


def endless_reuse(trace: Trace, geometry: Geometry) -> list[int]:
    """Tokens of each request that such a replica does not compute."""
    a_block = min(group.block_size for group in geometry.groups)
    # Full attention keeps each token once, the others less.
    blocks = 2 * trace.prompt_tokens // a_block
    replica = Replica(geometry, blocks, on_step=lambda events: None, max_text_tokens=CONTEXT_TOKENS)
    reused = []
    for number, request in enumerate(trace.requests):
        job = replica.submit(text_of(request, geometry, number, trace.piece_tokens), 1)
        while not job.finished:
            replica.end_step(replica.begin_step())
        reused.append(job.cached)
    return reused
