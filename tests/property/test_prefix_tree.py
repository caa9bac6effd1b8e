# SPDX-License-Identifier: Apache-2.0
"""The tree of prefixes, against its definition: for each name, the time at which it expires at each worker.

It holds in whichever order prompts came, whatever else was sent, and whichever workers a node forgot in between.
"""

from __future__ import annotations

import random

import pytest

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.route.load import prefix_tree
from kvrouter.router.route.load.prefix_tree import (
    ARRIVING,
    COMPUTING,
    PENDING_TTL_S,
    PrefixTree,
    PromptPrefixes,
    settle,
    tokens_at,
)

STEP_TOKENS = 256
WORKERS = [WorkerKey("m", f"w{number}") for number in range(4)]
KINDS = (COMPUTING, ARRIVING)


def names_along(path: list[int]) -> list[int]:
    """Return one name for each beginning of the path; different beginnings have different names."""
    names, name = [], 1
    for turn in path:
        name = name * 3 + turn
        names.append(name)
    return names


@pytest.mark.parametrize("seed", range(4))
def test_a_worker_has_as_much_on_its_way_as_its_longest_prefix_that_has_not_ended(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Forget so often that it happens with few workers.
    monkeypatch.setattr(prefix_tree, "FORGET_EVERY", 2)
    rng = random.Random(seed)

    def prompt() -> list[int]:
        """Return the names of a path in a small tree."""
        return names_along([rng.randrange(2) for _ in range(rng.randrange(6))])

    tree = PrefixTree()
    ends_s: dict[tuple[int, WorkerKey, int], int] = {}
    requests: list[PromptPrefixes] = []
    now = 100
    for _ in range(3_000):
        now += rng.choice((0, 0, 1, 2, 5))
        worker, kind = rng.choice(WORKERS), rng.choice(KINDS)
        sends = not requests or rng.random() < 0.5
        if sends:
            request = PromptPrefixes([prompt() for _ in range(rng.choice((1, 1, 2)))], STEP_TOKENS)
            requests = [*requests[-20:], request]
            ttl_s = rng.randint(1, int(PENDING_TTL_S))
            tree.sent(request, worker, now, ttl_s, kind)
        else:
            request = rng.choice(requests)
            settled_s = now + rng.choice((0, 1))
            settle(request, worker, settled_s, kind)
        for name in {name for names in request.prompts for name in names}:
            known_end_s = ends_s.get((name, worker, kind))
            if sends:
                ends_s[name, worker, kind] = max(known_end_s or 0, now + ttl_s)
            elif known_end_s is not None:
                ends_s[name, worker, kind] = min(known_end_s, settled_s)
        names = prompt()
        num_tokens = max(1, len(names) * STEP_TOKENS + 1 - rng.randint(0, STEP_TOKENS))
        for kind in KINDS:
            expected = {}
            for worker in WORKERS:
                reach = [number for number, name in enumerate(names, 1) if ends_s.get((name, worker, kind), -1) > now]
                if reach:
                    expected[worker] = min(max(reach) * STEP_TOKENS, num_tokens - 1)
            assert tokens_at(tree.find(names), STEP_TOKENS, num_tokens, now, kind) == expected


@pytest.mark.parametrize("seed", range(40))
def test_any_names_that_clients_send_keep_the_tree_within_its_bounds(seed: int) -> None:
    """Block hashes serve as names, so a client can repeat them and put them in any order."""
    rng = random.Random(seed)
    max_names, max_nodes = rng.randint(1, 12), rng.randint(1, 6)
    tree = PrefixTree(max_names, max_nodes)
    requests = []
    for _ in range(60):
        names = [rng.randrange(7) for _ in range(rng.randrange(8))]
        requests.append(request := PromptPrefixes([names]))
        tree.sent(request, WORKERS[0], 0.0, 10.0)
        settle(rng.choice(requests), WORKERS[0], 5.0)
        assert len(tree) == sum(len(node.names) for node in tree._nodes) <= max_names
        assert len(tree._nodes) <= max_nodes
        assert all(node in tree._nodes and name in node.names for name, node in tree._node_of.items())
        assert all(node.names for node in tree._nodes)
        assert all(0 < end <= len(names) for end, _ in tree.find(names))
