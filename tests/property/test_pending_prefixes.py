# SPDX-License-Identifier: Apache-2.0
"""Pending prefixes, against their definition: how many of a prompt's first names are still expected at a worker.

It holds in whichever order prompts came, and whatever else was sent.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.route.load.pending_prefixes import PendingPrefixes

STEP_TOKENS = 256
WORKERS = [WorkerKey("m", f"w{number}") for number in range(3)]

# A prompt is a path in a small tree; its names are those of the paths to each of its nodes.
paths = st.lists(st.integers(0, 1), max_size=4)
events = st.lists(
    st.tuples(st.sampled_from(["sent", "settle"]), st.sampled_from(WORKERS), paths, st.integers(0, 4)), max_size=25
)


def names_along(path: list[int]) -> list[int]:
    """Return one name for each beginning of the path; different beginnings have different names."""
    names, name = [], 1
    for turn in path:
        name = name * 3 + turn
        names.append(name)
    return names


@given(events=events, path=paths, now=st.integers(0, 5), short_by=st.integers(0, STEP_TOKENS))
def test_a_worker_has_as_much_on_its_way_as_its_longest_prefix_that_has_not_ended(
    events: list[tuple[str, WorkerKey, list[int], int]], path: list[int], now: int, short_by: int
) -> None:
    pending = PendingPrefixes()
    ends_s: dict[tuple[int, WorkerKey], int] = {}
    for kind, worker, sent, at_s in events:
        for name in names_along(sent):
            known_end_s = ends_s.get((name, worker))
            if kind == "sent":
                ends_s[name, worker] = at_s if known_end_s is None else max(known_end_s, at_s)
            elif known_end_s is not None:
                ends_s[name, worker] = min(known_end_s, at_s)
        if kind == "sent":
            pending.sent(worker, names_along(sent), at_s)
        else:
            pending.settle(worker, names_along(sent), at_s)

    names = names_along(path)
    num_tokens = max(1, len(names) * STEP_TOKENS + 1 - short_by)
    expected = {}
    for worker in WORKERS:
        reach = [number for number, name in enumerate(names, 1) if ends_s.get((name, worker), -1) > now]
        if reach:
            expected[worker] = min(max(reach) * STEP_TOKENS, num_tokens - 1)
    assert pending.tokens(names, STEP_TOKENS, num_tokens, now) == expected
