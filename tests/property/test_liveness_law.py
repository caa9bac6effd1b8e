# SPDX-License-Identifier: Apache-2.0
"""Safety and liveness of one worker's credit, through random lives of its engine and every fault of its wire.

The worlds are those of `stream_world.py`.

python -m tests.property.test_liveness_law --worlds 10000 --seed 1
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter

from tests.support.stream_world import World

# The steps of one world, which are enough for some ten lives and as many changes of the router.
WORLD_STEPS = 220
SHORT_WORLDS = 120
FIRST_SEED = 1


def broken_law(seed: int, steps: int) -> str | None:
    """Run a world for that many steps and return the error that ended it, or None."""
    world = World(seed)
    try:
        world.run(steps)
    except Exception as error:
        return repr(error)
    return None


def shortest(seed: int, steps: int) -> tuple[int, str, list[str]]:
    """Return the fewest steps after which the world breaks a law, the error, and the trace of what happened before."""
    for length in range(steps + 1):
        world = World(seed)
        try:
            world.run(length)
        except Exception as error:
            return length, repr(error), list(world.trace)
    raise AssertionError("it breaks no law")


def report(seed: int) -> str:
    """Describe the shortest run of a world that breaks a law."""
    length, error, trace = shortest(seed, WORLD_STEPS)
    world = World(seed)
    name = f"{world.kind}{' with HTTP' if world.http else ''}"
    return f"seed {seed} ({name}), {length} steps: {error}\n  " + "\n  ".join(trace)


def test_no_world_breaks_a_law() -> None:
    wrong = [seed for seed in range(FIRST_SEED, FIRST_SEED + SHORT_WORLDS) if broken_law(seed, WORLD_STEPS)]
    assert not wrong, "\n\n".join(map(report, wrong[:3]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=FIRST_SEED, help="of the first world")
    parser.add_argument(
        "--count-early", action="store_true", help="count live steps inside an answer, go on after them"
    )
    parser.add_argument("--explain", type=int, default=3, help="broken worlds that are shown in full")
    arguments = parser.parse_args()
    World.counts_early = arguments.count_early
    begun_s, steps = time.monotonic(), 0
    live = early = 0
    wrong: dict[int, str] = {}
    kinds: Counter[str] = Counter()
    for seed in range(arguments.seed, arguments.seed + arguments.worlds):
        world = World(seed)
        kinds[f"{world.kind}{' with HTTP' if world.http else ''}"] += 1
        try:
            steps += world.run(WORLD_STEPS)
        except Exception as error:
            steps += WORLD_STEPS
            wrong[seed] = f"{world.kind}{'+http' if world.http else ''}: {error!r}"
        live += world.live_items
        early += world.early_items
    print(f"{arguments.worlds} worlds, {steps} steps, {len(wrong)} wrong, {time.monotonic() - begun_s:.0f} s")
    print(f"{live} items after which the worker was live, {early} of them inside an answer or with messages held")
    print(", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())))
    groups: dict[str, list[int]] = {}
    for seed, what in wrong.items():
        groups.setdefault(re.sub(r"\d+|\{.*\}", "N", what)[:150], []).append(seed)
    for what, seeds in sorted(groups.items(), key=lambda group: -len(group[1])):
        print(f"{len(seeds)} x {what}; seeds {seeds[:4]}")
    for seed in list(wrong)[: arguments.explain]:
        print(report(seed))
    return bool(wrong or early)


if __name__ == "__main__":
    sys.exit(main())
