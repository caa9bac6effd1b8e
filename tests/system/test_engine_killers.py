# SPDX-License-Identifier: Apache-2.0
"""A prompt that kills engines costs two of them at most, or one if it is pinned.

The engines are processes, and they die.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

import pytest

from tests.support.exchange import exchange
from tests.support.mortal_engine import POISON, MortalEngine
from tests.support.prefill_pools import occupy
from tests.support.router_process import RouterProcess

ENGINES = 5
# Long enough to be computed by a prefill worker.
PROMPT = [7] * 600
POISONED = [*PROMPT, int(POISON)]


ROUTER_FLAGS = ["--health-interval-s", "0", "--handover-token-cost", "0", "--remote-prefill-min-tokens", "512"]


class Mortals:
    """The engines of one model, by name.

    An engine whose name begins with p only computes prompts, and one whose name begins with d only decodes.
    """

    def __init__(self, router: RouterProcess, stack: ExitStack, model: str, *names: str) -> None:
        self.router, self.model = router, model
        self.engines = {name: stack.enter_context(MortalEngine()) for name in names}
        for name, engine in self.engines.items():
            role = {"p": "prefill", "d": "decode"}.get(name[0], "both")
            self.router.request(
                "POST", "/register", {"worker_id": name, "model": model, "url": engine.url, "role": role}
            )
            stack.callback(router.request, "POST", "/unregister", {"worker_id": name})

    def ask(self, prompt: list[int], **headers: str) -> tuple[int, dict[str, str]]:
        body = {"model": self.model, "prompt": prompt, "max_tokens": 4}
        answer = exchange(self.router.port, "POST", "/v1/completions", body, headers)
        return answer.status, answer.headers

    def occupy(self, *names: str) -> None:
        """Reserve load at workers, as if much was queued there, so that a hand-over pays."""
        for name in names:
            occupy(self.router, self.model, name)

    def free(self, name: str) -> None:
        self.router.request("DELETE", f"/reservations/{self.model}-{name}")

    def keep_connections(self) -> None:
        """Open a connection to each engine that decodes, as after the first requests of a day."""
        for name in self.engines:
            if not name.startswith("p"):
                assert self.ask(PROMPT[:9], **{"x-kvrouter-worker": name})[0] == 200

    def dead(self) -> list[str]:
        """Return the engines that have died, after a moment in which the last one may die."""
        time.sleep(0.3)
        return [name for name, engine in self.engines.items() if engine.died]


@pytest.mark.parametrize("kept", [False, True], ids=["new connections", "kept connections"])
def test_a_prompt_that_kills_engines_kills_two_at_most(router: RouterProcess, kept: bool) -> None:
    with ExitStack() as stack:
        fleet = Mortals(router, stack, f"five-{kept}", *(f"w{n}" for n in range(ENGINES)))
        if kept:
            fleet.keep_connections()
        status, headers = fleet.ask(POISONED)
        dead = fleet.dead()
        assert (status, len(dead)) == (502, 2), (headers, dead)
        assert headers["x-kvrouter-retried"].count("reset") == 2
        # The other engines serve.
        assert all(fleet.ask(PROMPT)[0] == 200 for _ in range(ENGINES))


@pytest.mark.parametrize("kept", [False, True], ids=["new connections", "kept connections"])
def test_a_pinned_prompt_kills_one_at_most(router: RouterProcess, kept: bool) -> None:
    with ExitStack() as stack:
        fleet = Mortals(router, stack, f"pinned-{kept}", *(f"w{n}" for n in range(ENGINES)))
        if kept:
            fleet.keep_connections()
        status, headers = fleet.ask(POISONED, **{"x-kvrouter-worker": "w3"})
        assert (status, headers["x-kvrouter-retried"], fleet.dead()) == (502, "w3 reset", ["w3"])


@pytest.mark.parametrize("kept", [False, True], ids=["new connections", "kept connections"])
def test_prefill_workers_count_among_those_that_die(router: RouterProcess, kept: bool) -> None:
    with ExitStack() as stack:
        fleet = Mortals(router, stack, f"split-{kept}", "p0", "p1", "d0", "d1", "d2")
        fleet.occupy("d0", "d1", "d2")
        if kept:
            fleet.keep_connections()
            # Use each prefill worker while the other is busy, because measured speeds choose between two idle ones.
            for n, (busy, idle) in enumerate((("p0", "p1"), ("p1", "p0"))):
                fleet.occupy(busy)
                _, headers = fleet.ask([n] * len(PROMPT))
                assert headers["x-kvrouter-prefill-worker"] == idle, headers
                fleet.free(busy)
        status, headers = fleet.ask(POISONED)
        dead = fleet.dead()
        assert (status, len(dead)) == (502, 2), (headers, dead)
        assert sorted(name[0] for name in dead) == ["d", "p"], (headers, dead)


def test_a_prefill_worker_is_the_last_where_a_decode_worker_died_before(router: RouterProcess) -> None:
    with ExitStack() as stack:
        fleet = Mortals(router, stack, "late-split", "p0", "d0", "d1", "d2", "d3")
        # The first attempt is decoded where it is computed, and the second one elsewhere.
        fleet.occupy("d1", "d2", "d3")
        status, headers = fleet.ask(POISONED)
        assert (status, headers["x-kvrouter-retried"], fleet.dead()) == (502, "d0 reset, p0 reset", ["p0", "d0"])
