# SPDX-License-Identifier: Apache-2.0
"""The law of bounds: tasks, sockets, connections, tables and objects of a router are as many as its workers need.

Tables are found by walking through the objects of a router, so a new one is judged without being named here.
"""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import msgspec

from tests.simulation.router import Router

# The host of all clients, which open as many connections as they like.
CLIENTS = "clients"

MOST_TASKS = 40
MOST_TASKS_PER_WORKER = 16
MOST_SOCKETS_PER_WORKER = 4
# A pool of connections to the store, those that wait for news, and those that have just been given up. In a slow network
# one that is given up while it opens stays for another round trip.
MOST_STORE_CONNECTIONS = 24
# The topic and its replay, the patch's two, a greeting, and HTTP; of each of two ranks. A moved rank may have some twice.
MOST_ENGINE_CONNECTIONS = 2 * 8
# Entries of a table in the quiet end: some for each worker, and for each process that there was, whose heartbeats and
# load may be remembered for a while.
MOST_ENTRIES = 24
MOST_ENTRIES_PER_WORKER = 4
MOST_ENTRIES_PER_PROCESS = 2
# Tables with another bound.
BOUNDED = {
    "SegmentMemory._entries": "as many bytes as `segment_memory_bytes`",
    "EventRing._events": "the last events, as many as the ring has",
    "DecisionLog._kept_decisions": "the last decisions, as many as `decisions_kept`",
    "TrafficSums._prompts": "the prompts since the last turn of a task that the simulation does not run",
    "MetricRegistry._names_to_collectors": "one for each name of a metric",
    "MetricRegistry._collectors": "one for each metric",
    "MetricRegistry._collector_to_names": "one for each metric",
    "MetricRegistry._of_workers": "one for each metric",
    "MetricRegistry._children_by_worker": "one for each metric",
}
PRODUCT = "kvrouter."
TABLES = (dict, set, list, deque)


def problem_of_numbers(router: Router, tasks: int, workers: int) -> str:
    """Return which tasks, sockets or connections of a router are too many, or ""."""
    if tasks > MOST_TASKS + MOST_TASKS_PER_WORKER * workers:
        return f"bounds: {router.name} has {tasks} tasks"
    if router.core is not None and len(router.context.open_sockets) > MOST_SOCKETS_PER_WORKER * workers:
        return f"bounds: {router.name} has {len(router.context.open_sockets)} sockets"
    peers = Counter(end.peer.host.name for end in router.host.ends if end.peer.host.name != CLIENTS)
    for name, number in peers.items():
        if number > (MOST_STORE_CONNECTIONS if name == "store" else MOST_ENGINE_CONNECTIONS):
            return f"bounds: {router.name} has {number} connections to {name}"
    return ""


def problem_of_tables(router: Router, workers: int, processes: int) -> str:
    """Return which table of a router is too long in the quiet end, or ""."""
    most = MOST_ENTRIES + MOST_ENTRIES_PER_WORKER * workers + MOST_ENTRIES_PER_PROCESS * processes
    for name, number in sizes(router.core, router.placer).items():
        if number > most and name not in BOUNDED:
            return f"bounds: {name} of {router.name} has {number} entries, more than {most}"
    return ""


def problem_of_followers(router: Router) -> str:
    """Return whether objects of workers that are no longer followed are left, or ""."""
    assert router.core is not None
    followers = router.core.registry.followers.values()
    kinds = {type(follower) for follower in followers}

    def count() -> int:
        return sum(
            type(thing) in kinds and thing._services.token == router.token and thing not in followers
            for thing in gc.get_objects()
        )

    # No collection has run in the world.
    if count() and gc.collect() and (left := count()):
        return f"bounds: {router.name} keeps {left} followers of workers that it no longer has"
    return ""


def sizes(*roots: object) -> dict[str, int]:
    """Return the number of entries of the longest table in each attribute of the product's classes."""
    longest: dict[str, int] = {}
    seen: set[int] = set()
    left = deque(roots)
    while left:
        thing = left.popleft()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        for name, value in attributes(thing):
            if isinstance(value, TABLES):
                title = f"{type(thing).__name__}.{name}"
                longest[title] = max(longest.get(title, 0), len(value))
            left.extend(_within(value))
    return longest


def attributes(thing: object) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object of the product."""
    kind = type(thing)
    if not kind.__module__.startswith(PRODUCT):
        return
    names = list(getattr(thing, "__dict__", ()))
    if isinstance(thing, msgspec.Struct):
        names += thing.__struct_fields__
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    for name in names:
        if hasattr(thing, name):
            yield name, getattr(thing, name)


def _within(value: object) -> Iterator[object]:
    """Yield the objects of the product that a value is or holds, also as attributes of a bound method."""
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from _within(key)
            yield from _within(entry)
    elif isinstance(value, (set, frozenset, list, tuple, deque)):
        for entry in value:
            yield from _within(entry)
    elif type(value).__module__.startswith(PRODUCT):
        yield value
    elif (owner := getattr(value, "__self__", None)) is not None and type(owner).__module__.startswith(PRODUCT):
        yield owner
