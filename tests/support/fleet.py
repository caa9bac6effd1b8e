# SPDX-License-Identifier: Apache-2.0
"""Several routers that follow the engines of `churn.py`, and what must be true of their answers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import redis

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.store import keys
from tests.support.churn import BLOCK, HASHES, KINDS, Churn
from tests.support.router_process import RouterError, RouterProcess
from tests.support.sentinel_store import SentinelStore
from tests.support.store_server import StoreServer, wait_stored
from tests.support.stored_residency import read_residency

MODEL = "m"
TIMEOUT_S = 40.0
POLL_S = 0.01
# Nothing new within this is nothing more.
SETTLE_S = 0.03
# Batches of one engine of `churn.py`: most of its prompts are held somewhere by then.
BUSY_SEQ = 100


def until(reached: Callable[[], Any], what: str, timeout_s: float = TIMEOUT_S) -> Any:
    """The first true value of `reached`."""
    deadline = time.monotonic() + timeout_s
    while not (found := reached()):
        assert time.monotonic() < deadline, what
        time.sleep(POLL_S)
    return found


def wait_well(router: RouterProcess, workers: int) -> None:
    """Until health has nothing to say."""
    reasons: list[str] = []

    def well() -> bool:
        reasons[:] = router.request("GET", "/health")["reasons"]
        return not reasons and len(rows(router)) == workers

    try:
        until(well, "")
    except AssertionError:
        raise RouterError(f"not well: {reasons}, {len(rows(router))} workers\n{router.log_tail()}") from None


def register(router: RouterProcess, churn: Churn) -> None:
    for worker, (events, replay) in zip(churn.workers, churn.endpoints, strict=True):
        # Without a look for the patch: its port is found by adding to this one, and other tests of this machine may be
        # there.
        router.register(worker, MODEL, events, replay, patch_endpoint="off")


def rows(router: RouterProcess) -> dict[str, dict[str, Any]]:
    return {row["worker_id"]: row for row in router.request("GET", "/workers")["workers"]}


def wait_live(router: RouterProcess) -> None:
    """Until each worker has said what it holds."""
    until(lambda: all(row["state"] == "live" for row in rows(router).values()), "the workers are live")


def held(router: RouterProcess) -> float:
    """Workers that the router follows."""
    return router.metric("kvrouter_leases_held")


def wait_shared(routers: Iterable[RouterProcess], workers: int) -> None:
    """Until each router follows its share: no two differ by more than one."""

    def even() -> bool:
        counts = [held(router) for router in routers]
        return sum(counts) == workers and max(counts) - min(counts) <= 1

    until(even, "the workers are not spread evenly")


def settle(router: RouterProcess) -> None:
    """Until the router has seen all that the engines published."""
    before: object = None
    while (seen := {name: row["seq"] for name, row in rows(router).items()}) != before:
        before = seen
        time.sleep(SETTLE_S)


def wait_seqs(router: RouterProcess, seqs: dict[str, int]) -> None:
    """Until the answers show these batches of these workers; a router may not have read of a worker yet."""
    late: dict[str, Any] = {}

    def all_there() -> bool:
        shown = rows(router)
        late.clear()
        for worker, seq in seqs.items():
            row = shown.get(worker)
            # -1: the engine has published nothing.
            if row is None or (-1 if row["seq"] is None else row["seq"]) < seq:
                late[worker] = (seq, row and (row["state"], row["seq"], row["reason"]))
        return not late

    try:
        until(all_there, "")
    except AssertionError:
        raise RouterError(f"not all batches are shown: {late}\n{router.log_tail()}") from None


def paused(churn: Churn) -> dict[str, int]:
    """Stop the engines; the last seq of each worker."""
    return dict(zip(churn.workers, churn.ask("pause"), strict=True))


def wait_busy(client: Any, churn: Churn) -> None:
    """Until Redis has so much of each worker that a fault meets something, and a check compares something."""
    wait_stored(client, dict.fromkeys((WorkerKey(MODEL, worker) for worker in churn.workers), BUSY_SEQ))


def wrong_answers(router: RouterProcess, churn: Churn, truth: dict[str, Any]) -> list[str]:
    """Where the router's answers differ from what the engines hold: blocks by group, and the hit of every prompt."""
    wrong = []
    shown = rows(router)
    for number, worker in enumerate(churn.workers):
        counts = {f"g{group}:GPU": len(truth["held"][number][group]) for group in range(len(KINDS))}
        if shown[worker]["residency"] != counts:
            wrong.append(f"{worker} holds {counts}, shown {shown[worker]['residency']} ({shown[worker]['reason']})")
    for chain, tokens in zip(HASHES, truth["reuse"], strict=True):
        question = {"model": MODEL, "block_hashes": chain, "num_tokens": len(chain) * BLOCK + 1}
        answer = router.request("POST", "/query_by_hash", question)["instances"]
        for worker, expected in zip(churn.workers, tokens, strict=True):
            if answer[worker]["gpu"] != expected:
                wrong.append(f"{worker} reuses {expected} tokens of {chain[0]:x}..., predicted {answer[worker]['gpu']}")
    return wrong


def wrong_index(client: Any, churn: Churn, truth: dict[str, Any]) -> list[str]:
    """Where what Redis holds differs from what the engines hold, block by block."""
    wrong = []
    for number, worker in enumerate(churn.workers):
        tag = f"{keys.PREFIX}{{{MODEL}/{worker}}}"
        try:
            stored = read_residency(client, tag)
        except redis.ResponseError as error:
            wrong.append(f"{worker} has a key of another type: {error}")
            continue
        for group in range(len(KINDS)):
            there = stored.get(f"g{group}:GPU", set())
            expected = set(truth["held"][number][group])
            if there != expected:
                wrong.append(f"{worker} group {group}: {len(there - expected)} ghosts, {len(expected - there)} missing")
        others = [key for key in client.scan_iter(f"{keys.PREFIX}{{{MODEL}/{worker}}}:*", count=1000) if b":g" in key]
        if len(others) > len(KINDS):
            wrong.append(f"{worker} has keys of dead epochs: {others}")
    return wrong


def check(routers: Iterable[RouterProcess], client: Any, churn: Churn) -> int:
    """Pause the engines, wait for the answers, compare everything; returns how many hits were compared that were not
    zero."""
    seqs = paused(churn)
    truth = churn.ask("dump")
    for router in routers:
        wait_seqs(router, seqs)
        wrong = until_right(partial(wrong_answers, router, churn, truth))
        assert not wrong, "\n".join([*wrong[:10], router.log_tail()])
    wait_stored(client, {WorkerKey(MODEL, worker): seq for worker, seq in seqs.items()})
    wrong = until_right(partial(wrong_index, client, churn, truth))
    assert not wrong, wrong[:10]
    return sum(tokens > 0 for row in truth["reuse"] for tokens in row)


def until_right(wrong: Callable[[], list[str]], patience_s: float = 10.0) -> list[str]:
    """What is wrong for good: a state change travels behind its commit, so answers are looked at again for a while."""
    deadline = time.monotonic() + patience_s
    while (found := wrong()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


@contextlib.contextmanager
def two_routers(
    folder: Path, server: StoreServer | SentinelStore, churn: Churn, engines: int
) -> Iterator[tuple[RouterProcess, RouterProcess]]:
    """Two that share the workers and answer right while the engines run; at the end, none may have met a bug of its
    own."""
    with (
        RouterProcess(folder / "a", ["--redis", server.url]) as one,
        RouterProcess(folder / "b", ["--redis", server.url]) as two,
    ):
        register(one, churn)
        churn.ask("go")
        wait_shared((one, two), engines)
        check((one, two), server.client, churn)
        churn.ask("go")
        wait_busy(server.client, churn)
        yield one, two
        for router, name in ((one, "a"), (two, "b")):
            assert router.metric("kvrouter_internal_errors_total", where="stream") == 0
            whole = (folder / name / "router.log").read_text(errors="replace")
            assert "Traceback" not in whole, whole[whole.index("Traceback") :][:3000]
