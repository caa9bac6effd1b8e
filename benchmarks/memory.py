# SPDX-License-Identifier: Apache-2.0
"""Claims: an entry takes at most 40 bytes in our process and at most 48 in Redis.

10^6 (worker, block) entries of 16 workers come through their event streams. In process: the growth of the resident set,
garbage collected and free pages given back, so mirror, copy counts and all else that following 16 workers needs. In
Redis: the growth of used_memory, so residency, copies, meta and the log. dynamo: the growth of its resident set for the
same events.
"""

from __future__ import annotations

import time

from filling import FILL_BLOCKS_S, fill_ours, make_load
from processes import Dynamo, Publisher, rss_bytes
from report import Row, Settings, below, median_row, progress, run
from workload import WORKERS

GOAL_PROCESS_BYTES = 40.0
GOAL_REDIS_BYTES = 48.0
SETTLE_S = 1.5


def measure(settings: Settings) -> tuple[list[Row], list[str]]:
    rounds = settings.pick(3, 1)
    progress("memory: making events")
    load = make_load(settings.folder, settings.pick(1_000_000, 60_000))
    found: dict[str, list[float]] = {"rss": [], "rss_untrimmed": [], "redis": []}
    parts = {}
    dynamos = []
    for turn in range(rounds):
        progress(f"memory: round {turn + 1} of {rounds}")
        folder = settings.folder / f"round{turn}"
        folder.mkdir()
        taken = fill_ours(folder, load)
        if taken["entries"] != load.entries:
            raise AssertionError(f"{taken['entries']} entries arrived, {load.entries} were published")
        for name, values in found.items():
            values.append(taken[name] / load.entries)
        parts = taken
        if settings.dynamo is not None:
            dynamos.append(dynamo_bytes(settings, load) / load.entries)
    size = f"{load.entries:,} entries"
    rows = [
        median_row(
            f"memory of the router process, {size}", "bytes/entry", found["rss"], dynamos,
            goal=f"at most {GOAL_PROCESS_BYTES:.0f}", wanted=below(GOAL_PROCESS_BYTES),
        ),
        median_row(f"the same, before malloc_trim, {size}", "bytes/entry", found["rss_untrimmed"]),
        median_row(
            f"memory in Valkey (used_memory), {size}", "bytes/entry", found["redis"],
            goal=f"at most {GOAL_REDIS_BYTES:.0f}", wanted=below(GOAL_REDIS_BYTES),
        ),
    ]  # fmt: skip
    keys = ", ".join(f"{name} {size / load.entries:.1f}" for name, size in sorted(parts["keys"].items()))
    notes = [
        f"in process, by our own count: mirror {parts['mirror'] / load.entries:.1f}, copy counts "
        f"{parts['copies'] / load.entries:.1f} bytes/entry",
        f"in Valkey, by MEMORY USAGE: {keys} bytes/entry; its resident set grew by "
        f"{parts['redis_rss'] / load.entries:.1f} bytes/entry; published at {FILL_BLOCKS_S:,} blocks/s",
    ]
    return rows, notes


def dynamo_bytes(settings: Settings, load: object) -> float:
    """Growth of dynamo's resident set for the same events."""
    from filling import Load

    assert isinstance(load, Load)
    assert settings.dynamo is not None
    with Dynamo.run(settings.dynamo, settings.folder) as dynamo, Publisher.run(load.path, WORKERS) as publisher:
        dynamo.register(publisher.endpoints)
        publisher.wait()
        time.sleep(SETTLE_S)
        before = rss_bytes(dynamo.pid)
        publisher.send(load.batches, FILL_BLOCKS_S)
        for index in range(max(0, len(load.chains) - 2 * WORKERS), len(load.chains)):
            for worker in load.held[index]:
                dynamo.wait_visible(load.chains[index], worker)
        time.sleep(SETTLE_S)
        return rss_bytes(dynamo.pid) - before


if __name__ == "__main__":
    run("memory", __doc__, measure)
