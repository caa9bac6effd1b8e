# SPDX-License-Identifier: Apache-2.0
"""Several routers that follow the engines of `churn.py`, and the checks of their answers and of their store."""

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
# If nothing changes within this time, all published batches have arrived.
SETTLE_S = 0.03
# The seq of an engine of `churn.py` at which most prompts are held by some engine.
BUSY_SEQ = 100


def until(reached: Callable[[], Any], what: str, timeout_s: float = TIMEOUT_S) -> Any:
    """Call `reached` until it returns a true value, and return that value."""
    deadline = time.monotonic() + timeout_s
    while not (value := reached()):
        assert time.monotonic() < deadline, what
        time.sleep(POLL_S)
    return value


def wait_well(router: RouterProcess, workers: int) -> None:
    """Wait until `/health` has no reasons and the router lists this many workers."""
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
        # The patch is off: its port would be derived from the engine's, and another test on this machine may listen
        # there.
        router.register(worker, MODEL, events, replay, patch_endpoint="off")


def rows(router: RouterProcess) -> dict[str, dict[str, Any]]:
    return {row["worker_id"]: row for row in router.request("GET", "/workers")["workers"]}


def wait_live(router: RouterProcess) -> None:
    """Wait until all workers are live."""
    until(lambda: all(row["state"] == "live" for row in rows(router).values()), "the workers are live")


def held(router: RouterProcess) -> float:
    """Return the number of workers that the router follows."""
    return router.metric("kvrouter_leases_held")


def wait_shared(routers: Iterable[RouterProcess], workers: int) -> None:
    """Wait until the routers follow all workers, and no two routers differ by more than one worker."""

    def even() -> bool:
        counts = [held(router) for router in routers]
        return sum(counts) == workers and max(counts) - min(counts) <= 1

    until(even, "the workers are not spread evenly")


def settle(router: RouterProcess) -> None:
    """Wait until the seqs that the router shows no longer change."""
    before: object = None
    while (seqs := {name: row["seq"] for name, row in rows(router).items()}) != before:
        before = seqs
        time.sleep(SETTLE_S)


def wait_seqs(router: RouterProcess, seqs: dict[str, int]) -> None:
    """Wait until the router shows these seqs of these workers; it may not have read a worker's registration yet."""
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
    """Stop the engines and return the last seq of each worker."""
    return dict(zip(churn.workers, churn.ask("pause"), strict=True))


def wait_busy(client: Any, churn: Churn) -> None:
    """Wait until Redis has enough batches of each worker that a fault has an effect and a check compares real hits."""
    wait_stored(client, dict.fromkeys((WorkerKey(MODEL, worker) for worker in churn.workers), BUSY_SEQ))


def wrong_answers(router: RouterProcess, churn: Churn, truth: dict[str, Any]) -> list[str]:
    """Return the differences between the router's answers and the engines' blocks.

    Compared are the number of blocks in each group and the hit of every prompt.
    """
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
    """Return the differences between the residency in Redis and the engines' blocks, block by block."""
    wrong = []
    for number, worker in enumerate(churn.workers):
        tag = f"{keys.PREFIX}{{{MODEL}/{worker}}}"
        try:
            stored = read_residency(client, tag)
        except redis.ResponseError as error:
            wrong.append(f"{worker} has a key of another type: {error}")
            continue
        for group in range(len(KINDS)):
            shown = stored.get(f"g{group}:GPU", set())
            expected = set(truth["held"][number][group])
            if shown != expected:
                wrong.append(f"{worker} group {group}: {len(shown - expected)} ghosts, {len(expected - shown)} missing")
        others = [key for key in client.scan_iter(f"{keys.PREFIX}{{{MODEL}/{worker}}}:*", count=1000) if b":g" in key]
        if len(others) > len(KINDS):
            wrong.append(f"{worker} has keys of dead epochs: {others}")
    return wrong


def check(routers: Iterable[RouterProcess], client: Any, churn: Churn) -> int:
    """Pause the engines, wait for the routers, and compare the routers' answers and the store with the engines.

    Returns:
        The number of compared hits that are not zero.
    """
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
    """Call `wrong` until it returns no problems or the time is over, and return the last problems.

    A worker's change of state arrives after its commit, so answers may be wrong for a short while.
    """
    deadline = time.monotonic() + patience_s
    while (problems := wrong()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return problems


@contextlib.contextmanager
def two_empty_routers(folder: Path, url: str) -> Iterator[tuple[RouterProcess, RouterProcess]]:
    """Run two routers, in the folders a and b, that share a store."""
    with (
        RouterProcess(folder / "a", ["--redis", url]) as first,
        RouterProcess(folder / "b", ["--redis", url]) as second,
    ):
        yield first, second


@contextlib.contextmanager
def two_routers(
    folder: Path, server: StoreServer | SentinelStore, churn: Churn, engines: int
) -> Iterator[tuple[RouterProcess, RouterProcess]]:
    """Run two routers that share the workers and have answered right while the engines run.

    At the end, neither may have counted an internal error or logged a traceback.
    """
    with two_empty_routers(folder, server.url) as (first, second):
        register(first, churn)
        churn.ask("go")
        wait_shared((first, second), engines)
        check((first, second), server.client, churn)
        churn.ask("go")
        wait_busy(server.client, churn)
        yield first, second
        for router, name in ((first, "a"), (second, "b")):
            assert router.metric("kvrouter_internal_errors_total", where="stream") == 0
            log = (folder / name / "router.log").read_text(errors="replace")
            assert "Traceback" not in log, log[log.index("Traceback") :][:3000]
