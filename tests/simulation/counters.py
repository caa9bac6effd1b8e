# SPDX-License-Identifier: Apache-2.0
"""The law of counters: at the end of a world, the metrics of each process agree with what happened to it.

Only counters that can be judged exactly, or within what a kill leaves open, are here. What happened is known from the
world's clients, from the store's own count of writes, and from the log lines of the processes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.follow.streams.stream_metrics import COMMIT_OUTCOMES, LEASE_LOSSES
from kvrouter.router.route.load.load_metrics import RESERVATION_ENDS
from tests.simulation.engine import Engine
from tests.simulation.router import Router

# Counters of defects, each of which is a broken law.
DEFECTS = ("kvrouter_internal_errors_total", "kvrouter_task_failures_total")
# The log lines that follow the loss of a lease.
REMOVED = "unregistered"
# A worker that was registered at another address is followed by a new follower, too.
MOVED = "it is registered again"
HANDED_OVER, NOT_HELD, HELD = "worker handed over", "worker not held", "worker held"
# A lease that is given up may be found lost when the last changes are written.
NOT_WRITTEN = "last changes not written to Redis"
TAKEN = re.compile(r"reason=another router process follow(s|ed) this worker")
# A replay endpoint that was silent when batches were lost brings all of its buffer again, and each of them is taken in again.
READ_AGAIN = "reason=the replay endpoint answers again"
DATA_LOST = re.compile(r"reason=Redis (lost commits of this worker|holds another state than this process)")


def problem_of_counters(
    routers: Sequence[Router],
    engines: Mapping[WorkerKey, Engine],
    reserved: Counter[str],
    written: Counter[str],
    history: Iterable[str],
) -> str:
    """Return which metric of which router does not agree with what happened, or "".

    Args:
        routers: The routers.
        engines: The engines by worker.
        reserved: The reservations that clients made, by the token of the process.
        written: The writes to workers' logs that the store executed, by the name of the router.
        history: The lines of the world.
    """
    lines = _lines_by_process(routers, history)
    for router in routers:
        for token, registry in router.registries.items():
            lives = token == router.token and router.core is not None
            for problem in (
                *_defects(registry),
                *_reservations(registry, reserved[token], is_exact=not router.has_http),
                *_leases(registry, lines[token], len(engines), lives=lives),
            ):
                return f"counters: {router.name} {'' if lives else 'before its end '}{problem}"
        for problem in _commits(router, written[router.name], len(engines)):
            return f"counters: {router.name} {problem}"
        for engine in engines.values():
            for problem in _batches(router, engine, lines[router.token]):
                return f"counters: {router.name} {problem}"
    return ""


def _lines_by_process(routers: Sequence[Router], history: Iterable[str]) -> dict[str, list[str]]:
    """Return the lines of each process by its token."""
    lines: dict[str, list[str]] = {token: [] for router in routers for token in router.tokens}
    present: dict[str, str] = {}
    for line in history:
        _, name, text = line.split(maxsplit=2)
        if text.startswith("starts as "):
            present[name] = text.removeprefix("starts as ").partition(",")[0]
        elif name in present:
            lines[present[name]].append(text)
    return lines


def _value(registry: MetricRegistry, name: str, **labels: str) -> int:
    return int(registry.get_sample_value(f"kvrouter_{name}", labels) or 0)


def _defects(registry: MetricRegistry) -> Iterator[str]:
    for metric in registry.collect():
        for sample in metric.samples:
            if sample.name in DEFECTS and sample.value:
                yield f"counts {sample.value:.0f} in {sample.name} {sample.labels}"


def _reservations(registry: MetricRegistry, reserved: int, *, is_exact: bool) -> Iterator[str]:
    """Compare the reservations with those of the clients, whose answers over HTTP may be lost."""
    made = _value(registry, "reservations_total")
    if made < reserved or (is_exact and made != reserved):
        yield f"counts {made} reservations, and clients made {reserved}"
    ended = sum(_value(registry, "reservations_ended_total", how=how) for how in RESERVATION_ENDS)
    if ended > made:
        yield f"counts {ended} ends of {made} reservations"


def _leases(registry: MetricRegistry, lines: Sequence[str], workers: int, *, lives: bool) -> Iterator[str]:
    """Compare the lost leases with the log. A process or a follower may be ended between the count and the line."""
    seen = Counter[str]()
    removed = sum(line.startswith(REMOVED) or MOVED in line for line in lines)
    for line in lines:
        if line.startswith(HANDED_OVER):
            seen["handed_over"] += 1
        elif line.startswith((NOT_HELD, NOT_WRITTEN)) and TAKEN.search(line):
            seen["taken"] += 1
        elif line.startswith((NOT_HELD, NOT_WRITTEN)) and DATA_LOST.search(line):
            seen["data_lost"] += 1
    for how in LEASE_LOSSES:
        counted = _value(registry, "leases_lost_total", how=how)
        if how == "unreadable":
            continue
        slack = removed + (0 if lives else workers)
        if not seen[how] <= counted <= seen[how] + slack:
            yield f"counts {counted} leases as lost ({how}), and logs {seen[how]}"


def _commits(router: Router, written: int, workers: int) -> Iterator[str]:
    """Compare the commits with what the store executed. The answer to a write may be lost, and each kill loses some."""
    counts = Counter[str]()
    for registry in router.registries.values():
        for outcome in COMMIT_OUTCOMES:
            counts[outcome] += _value(registry, "index_commits_total", outcome=outcome)
    most = counts["applied"] + counts["stale"] + counts["failed"] + workers * len(router.registries)
    if not counts["applied"] <= written <= most:
        yield f"counts {counts['applied']} commits as applied ({dict(counts)}), and the store has {written} of them"


def problem_of_gauges(router: Router, routers: int) -> str:
    """Return what a live router's metrics page says wrong in the quiet end, or ""."""
    core, process, registry = router.core, router.process, router.registries[router.token]
    if core is None or process is None:
        return ""
    for measure in registry._measures:
        process.run(measure)
    held = sum(follower.lease.held for follower in core.registry.followers.values())
    expected = {"store_up": 1, "routers": routers, "load_routers": routers, "load_known": 1, "leases_held": held,
                "reservations_held": 0}  # fmt: skip
    for name, value in expected.items():
        if (shown := _value(registry, name)) != value:
            return f"counters: {router.name} shows {shown} as {name}, and it is {value}"
    return ""


def _batches(router: Router, engine: Engine, lines: Sequence[str]) -> Iterator[str]:
    """Judge the batches of an engine that the router followed once, without a gap: it took in none twice.

    The engine's buffer may be read again once its replay endpoint answers. No gap was counted then, as the batches from before
    the router followed the engine were the ones that were lost (seed 600031).
    """
    core, registry = router.core, router.registries[router.token]
    follower = None if core is None else core.registry.followers.get(engine.worker)
    about = [line for line in lines if str(engine.worker) in line]
    held = sum(line.startswith(HELD) for line in about)
    is_read_again = any(READ_AGAIN in line for line in about)
    if follower is None or not follower.lease.held or held != 1 or is_read_again:
        return
    model, name = registry.worker_labels(engine.worker)

    def count(metric: str) -> int:
        return _value(registry, metric, model=model, worker=name)

    restarts, gaps, batches = (
        count(f"{metric}_total") for metric in ("stream_restarts", "stream_gaps", "ingest_batches")
    )
    sent = sum(span.life.next_seq for span in engine.spans)
    if not gaps and not restarts and batches > sent:
        yield f"counts {batches} batches of {engine.name}, which sent {sent}"
