# SPDX-License-Identifier: Apache-2.0
"""Two prompts with windows that are loaded at the same time may wait for each other's GPU blocks for ever.

That is vLLM's own scheduler: it counts the empty places before a window as blocks that a request holds, so it reserves
too few blocks for the rest of a prompt that is being loaded, and gives the others to the next load. Where these tests
fail with a newer vLLM, docs/how-to/offload.md need not warn of it any longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engine.engine_config import MAX_BATCHED_TOKENS, MAX_MODEL_LEN, VOCAB_SIZE
from tests.engine.group_sets import GroupSet, OffloadSet, full, window
from tests.engine.offload_engine import SPEC
from tests.engine.oracle import Oracle
from tests.engine.workload import Prompt

pytestmark = pytest.mark.engine

WINDOW = window(64)
LAYOUT = GroupSet("5 windows+full", (*(WINDOW,) * 5, full()), 0)
# The tokens of each prompt that the CPU tier holds, and all of its tokens.
PROMPTS = ((768, 900), (512, 603))
CPU_CHUNKS = 2_000
# Many times what two prompts need that are loaded and computed.
STEPS = 200
TIERS = {"vLLM's tier": {}, "our tier": SPEC}


def blocks_of(num_tokens: int) -> int:
    """Return the most GPU blocks that a request of this length holds at a time."""
    in_full = -(-num_tokens // WINDOW.block_size)
    in_window = min(in_full, WINDOW.max_admission_blocks_per_request(MAX_BATCHED_TOKENS, MAX_MODEL_LEN))
    return sum(in_window if spec is WINDOW else in_full for spec in LAYOUT.specs)


def loaded_blocks(num_tokens: int) -> int:
    """Return the GPU blocks into which a prefix of whole blocks is loaded."""
    in_full = num_tokens // WINDOW.block_size
    in_window = -(-(WINDOW.sliding_window - 1) // WINDOW.block_size)
    return sum(in_window if spec is WINDOW else in_full for spec in LAYOUT.specs)


@contextmanager
def two_loads(num_blocks: int, spec: dict[str, str], model: Path) -> Iterator[Oracle]:
    """Run two prompts whose beginnings are in CPU memory alone for some steps, in a GPU cache of `num_blocks`."""
    rng = Random(1)
    group_set = replace(LAYOUT, num_blocks=num_blocks)
    offload: dict[str, Any] = spec | OffloadSet(group_set, CPU_CHUNKS).connector_config()
    oracle = Oracle(group_set, model, rng, offload)
    try:
        prompts = [tuple(rng.randrange(VOCAB_SIZE) for _ in range(whole)) for _, whole in PROMPTS]
        for prompt, (held, _) in zip(prompts, PROMPTS, strict=True):
            # The last token of a prompt is computed, so that a block more than the prefix is not complete.
            oracle.submit(Prompt((*prompt[:held], 0), None))
            for _ in range(STEPS):
                oracle.step()
        assert oracle.reset(running=False, connector=False)
        for prompt in prompts:
            oracle.submit(Prompt(prompt, None))
        for _ in range(STEPS):
            oracle.step()
        yield oracle
    finally:
        oracle.close()


@pytest.mark.parametrize("spec", TIERS.values(), ids=TIERS)
def test_two_loads_wait_for_each_other_where_the_gpu_cache_holds_little_more_than_both(
    spec: dict[str, str], model: Path
) -> None:
    # One block is vLLM's own; the others suffice for half of what either prompt has to compute.
    loaded = sum(loaded_blocks(held) for held, _ in PROMPTS)
    rest = min(len(LAYOUT.specs) * (whole - held) // WINDOW.block_size for held, whole in PROMPTS)
    with two_loads(1 + loaded + rest // 2, spec, model) as oracle:
        assert oracle.unfinished == len(PROMPTS) and not oracle.scheduler.running
        requests = list(oracle.scheduler.requests.values())
        # The first one's load has ended, so that it waits for blocks alone.
        assert [request.num_computed_tokens for request in requests] == [held for held, _ in PROMPTS]
        assert requests[0].status.name == "WAITING"


@pytest.mark.parametrize("spec", TIERS.values(), ids=TIERS)
def test_they_do_not_where_it_holds_all_that_both_need_at_most(spec: dict[str, str], model: Path) -> None:
    with two_loads(1 + sum(blocks_of(whole) for _, whole in PROMPTS), spec, model) as oracle:
        assert not oracle.unfinished
