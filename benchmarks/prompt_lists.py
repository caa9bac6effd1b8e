# SPDX-License-Identifier: Apache-2.0
"""Claim: finding the hits of the prompts of a list takes less time than one turn of ingest (2 ms), among any number of workers.

    python -m benchmarks.prompt_lists [--rounds N]

The prompts have 2,000 tokens, and every worker holds half of each. They are hashed before, as the router does in turns.
The benchmark times the part that the router does without a pause: it matches every prompt, and sums the hits of each
worker. The result is the fastest of some rounds, in us, as other processes use the machine too.
"""

from __future__ import annotations

import time

import numpy as np

from benchmarks.report import parser_of, print_setting
from kvrouter.router.base.common.ids import GPU, Place, WorkerKey
from kvrouter.router.index.matching.matcher import HashPlans, Matcher, WorkerView
from kvrouter.router.index.matching.mirror import Mirror
from kvrouter.router.index.matching.question import Question
from kvrouter.router.model.kvcache.block_hash import HashScheme, HashSpace
from kvrouter.router.model.kvcache.catalog import Group, build_catalog
from kvrouter.router.model.kvcache.prompt_hasher import SegmentMemory
from kvrouter.router.model.workers.registration import CatalogSpec
from kvrouter.router.model.workers.stream_state import StreamState
from kvrouter.router.route.tokens.prompt_list import MAX_PROMPTS_LOOKED_UP, looked_up_among

WORKERS = (1, 16, 64, 256)
PROMPT_TOKENS, BLOCK_TOKENS = 2_000, 16


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    arguments = parser.parse_args()
    print_setting()
    rng = np.random.default_rng(3)
    scheme = HashScheme.default()
    catalog = build_catalog((Group(0, "full_attention", BLOCK_TOKENS),), "learned", CatalogSpec())
    for workers in WORKERS:
        mirror, memory = Mirror(1 << 30), SegmentMemory(256 << 20)
        matcher = Matcher(mirror, memory)
        keys = [WorkerKey("m", f"w{number}") for number in range(workers)]
        for key in keys:
            mirror.begin_epoch(key, "e")
        views = [WorkerView(key, None, StreamState.LIVE, True, "", "e", catalog, scheme, {}) for key in keys]
        parts = []
        for _ in range(MAX_PROMPTS_LOOKED_UP):
            tokens = rng.integers(0, 50_000, PROMPT_TOKENS)
            part = Question("m", PROMPT_TOKENS, token_ids=tokens)
            hashes = matcher._hasher(
                part,
                HashPlans.build(mirror, views).by_scheme[scheme, BLOCK_TOKENS],
                HashSpace(scheme, BLOCK_TOKENS, None, None),
            ).extend()
            for key in keys:
                mirror.add(key, Place(0, GPU), hashes[: len(hashes) // 2])
            parts.append(part)
        plans = HashPlans.build(mirror, views)
        for count in (1, 8, looked_up_among(workers)):
            questions = tuple(parts[:count])
            for part in questions:
                for _ in matcher.hash_steps(part, plans):
                    pass
            best = min(_time_us(matcher, plans, questions) for _ in range(arguments.rounds))
            print(f"{workers:4} workers, {count:3} prompts: {best:8.1f} us")


def _time_us(matcher: Matcher, plans: HashPlans, parts: tuple[Question, ...]) -> float:
    start = time.perf_counter_ns()
    if len(parts) == 1:
        matcher.match(parts[0], plans)
    else:
        matcher.match_list(parts, plans, is_last_known=True)
    return (time.perf_counter_ns() - start) / 1000


if __name__ == "__main__":
    main()
