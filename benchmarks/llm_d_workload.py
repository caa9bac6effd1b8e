# SPDX-License-Identifier: Apache-2.0
"""The workload that llm-d publishes figures on, as a trace for `kvrouter replay`.

    python -m benchmarks.llm_d_workload --rate 20 > llm_d.jsonl
    kvrouter replay --trace llm_d.jsonl --piece-tokens 16

It has 150 groups of 5 prompts, 6,000 shared and 1,200 own tokens, 1,000 output tokens, and Poisson arrivals. Each
prompt comes once in each round, in random order. llm-d's guide raises the rate from 3 to 60 requests/s; here each trace
has one rate. The format is Mooncake's, with ids of 16 tokens, which divide both lengths.
"""

from __future__ import annotations

import json
import random

from benchmarks.report import parser_of

GROUPS, PROMPTS = 150, 5
SHARED_TOKENS, OWN_TOKENS, OUTPUT_TOKENS = 6_000, 1_200, 1_000
PIECE_TOKENS = 16


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rate", type=float, default=20.0, help="requests/s")
    parser.add_argument("--rounds", type=int, default=1, help="how often each prompt comes")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    shared, own = SHARED_TOKENS // PIECE_TOKENS, OWN_TOKENS // PIECE_TOKENS
    own_from = GROUPS * shared
    now_s = 0.0
    for _ in range(arguments.rounds):
        order = [(group, prompt) for group in range(GROUPS) for prompt in range(PROMPTS)]
        rng.shuffle(order)
        for group, prompt in order:
            now_s += rng.expovariate(arguments.rate)
            first = own_from + (group * PROMPTS + prompt) * own
            ids = [*range(group * shared, (group + 1) * shared), *range(first, first + own)]
            row = {
                "timestamp": round(now_s * 1000),
                "input_length": SHARED_TOKENS + OWN_TOKENS,
                "output_length": OUTPUT_TOKENS,
                "hash_ids": ids,
            }
            print(json.dumps(row, separators=(",", ":")))


if __name__ == "__main__":
    main()
