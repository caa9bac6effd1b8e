# SPDX-License-Identifier: Apache-2.0
"""Claim: one API key with 10,000 prompts behind one long beginning keeps to its fair part of the workers.

The reuse of other keys falls by some 3 points.

Three keys have chats that fill the memory of three of four simulated replicas. The prompts of the fourth key share
4,096 tokens (`tests/support/key_traffic.py`), and one replica can answer them. The run is in virtual time, so the
machine does not matter.

    python -m benchmarks.one_key [--prompts 10000] [--price 30] [--policy kv]
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from benchmarks.report import parser_of
from kvrouter.replay.fleet.fleet_shape import FleetShape, ReplicaShape, geometry_of
from kvrouter.replay.policies.names import NAMES
from kvrouter.router.route.load import key_shares
from kvrouter.simulator.engine.timing import Timing
from tests.support.key_traffic import ATTACK_BEGINS_S, ATTACK_EVERY_S, PIECE_TOKENS, keys_traffic, run_keys

REPLICAS, BLOCKS = 4, 1_800
TIMING = Timing(prefill_tokens_per_s=10_000.0, step_base_s=0.01)


def row(policy: str, prompts: int, span_s: float) -> list[str]:
    """Return the table's row for one run with this many prompts of the attacker."""
    fleet = FleetShape(geometry_of("llama", PIECE_TOKENS), (ReplicaShape(BLOCKS, 0, TIMING),) * REPLICAS)
    outcome = run_keys(keys_traffic(prompts, span_s), fleet, policy)
    ttft_s = outcome.policy_run.ttft_s
    return [
        policy,
        str(prompts),
        f"{outcome.others_reuse:.3f}",
        f"{statistics.fmean(ttft_s[number] for number in outcome.others):.3f}",
        f"{statistics.fmean(ttft_s[number] for number in outcome.attacks):.3f}" if prompts else "",
        f"{outcome.attacker_blocks:.3f}",
        ", ".join(str(outcome.attacker_places[worker]) for worker in range(REPLICAS)) if prompts else "",
    ]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--prompts", type=int, default=10_000)
    parser.add_argument("--price", type=float, default=key_shares.EXCESS_PRICE, help="of a fair part too much")
    parser.add_argument("--policy", action="append", choices=NAMES, help="may be given several times; kv by default")
    arguments = parser.parse_args()
    key_shares.EXCESS_PRICE = arguments.price
    span_s = ATTACK_BEGINS_S + arguments.prompts * ATTACK_EVERY_S
    columns = (
        "policy",
        "prompts of the one key",
        "others' reuse",
        "others' first token, s",
        "its first token, s",
        "its part of the memory at the end",
        "its prompts by replica",
    )
    print(_line(columns))
    print(_line("---" for _ in columns))
    for policy in arguments.policy or ["kv"]:
        for prompts in (0, arguments.prompts):
            print(_line(row(policy, prompts, span_s)), flush=True)


if __name__ == "__main__":
    main()
