# SPDX-License-Identifier: Apache-2.0
"""Values in Redis that no router writes: their worker loses its credit, by name, and no other worker is affected."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.store import keys
from tests.support.churn import Churn
from tests.support.fleet import (
    MODEL,
    check,
    paused,
    register,
    rows,
    two_routers,
    until,
    wait_seqs,
    wait_well,
    wrong_answers,
)
from tests.support.router_process import RouterError, RouterProcess
from tests.support.store_server import StoreServer, wait_stored

ENGINES = 3
RATE = 2_000.0
SPOILED = "w0"
TAG = f"{keys.PREFIX}{{{MODEL}/{SPOILED}}}"
META, LOG, LEASE = f"{TAG}:meta", f"{TAG}:log", f"{TAG}:lease"

Pair = tuple[RouterProcess, RouterProcess]
Spoil = Callable[[Any], None]


def field(name: str | bytes, value: bytes) -> Spoil:
    return lambda client: client.hset(META, name, value)


def residents(client: Any) -> str:
    return f"{TAG}:{client.hget(META, 'epoch').decode()}:g0:GPU"


def checkpointed(spoil: Spoil) -> Spoil:
    """Return a spoiler that also lets `meta` say that the worker has a checkpoint of one block."""

    def both(client: Any) -> None:
        client.hset(META, "places", b"g0:GPU=1")
        spoil(client)

    return both


def replaced(key: Callable[[Any], str]) -> Spoil:
    """Return a spoiler that puts a value of another type in the place of a key's."""

    def spoil(client: Any) -> None:
        name = key(client)
        with client.pipeline() as pipe:
            pipe.delete(name)
            if name in (META, LOG):
                pipe.set(name, b"x")
            else:
                pipe.rpush(name, b"x")
            pipe.execute()

    return spoil


# A key of another type holds nothing and refuses every command. The router that meets it drops it, and names it for a
# moment at most.
DROPPED = "meta of another type"
# Values that are refused when the worker is loaded, or by a transaction.
HEADS: dict[str, Spoil] = {
    "seq": field("seq", b"abc"),
    "commits": field("commits", b"1_0"),
    "epoch": field("epoch", b"\xff\xfe"),
    "places": field("places", b"g0:GPU=1 g:x:y:z=1"),
    "lease number": field("lease", b"-"),
    "the name of a field": field(b"\xff", b"1"),
    "number of the checkpoint": field("checkpoint", b"99999999"),
    "a checkpoint that is gone": checkpointed(lambda client: client.delete(residents(client))),
    "a checkpoint that is cut": checkpointed(lambda client: client.set(residents(client), b"short")),
    "end of the log": lambda client: client.xtrim(LOG, maxlen=0, approximate=False),
    "learned": field("learned", b"{"),
    "scheme": field("scheme", b'{"algo":"none"}'),
    "a checkpoint of another type": checkpointed(replaced(residents)),
    DROPPED: replaced(lambda client: META),
    "log of another type": replaced(lambda client: LOG),
}
# Values that are only read by a router that takes the worker over, that have a stand-in, or that belong to the lease.
OTHERS: dict[str, Spoil] = {
    "copies": lambda client: client.hset(f"{TAG}:{client.hget(META, 'epoch').decode()}:copies", b"x", b"y"),
    "fingerprint": field("fingerprint", b"x"),
    "gaps": field("gaps", b"many"),
    "state": field("state", b"\xff"),
    "reason": field("reason", b"\xff"),
    "engine start": field("engine_start", b"nan"),
    "engine cache": field("engine_cache", b'{"block_size": -1}'),
    "lease": lambda client: client.set(LEASE, b"\xff"),
    "lease of another type": replaced(lambda client: LEASE),
}


def failed_tasks(router: RouterProcess) -> float:
    samples = [
        line for line in router.text("/metrics").splitlines() if line.startswith("kvrouter_task_failures_total{")
    ]
    assert len(samples) > 10
    return sum(float(line.rpartition(" ")[2]) for line in samples)


def make_all_reload(client: Any) -> None:
    """Append an entry that nobody can read to the worker's log, so that all routers load the worker."""
    if client.type(LOG) == b"stream":
        client.xadd(LOG, {"kind": "junk"})


@pytest.fixture
def pair(tmp_path: Path, server: StoreServer, churn: Churn) -> Iterator[Pair]:
    with two_routers(tmp_path, server, churn, ENGINES) as pair:
        yield pair


def others_right(routers: Pair, churn: Churn) -> None:
    """Check that the answers for all workers but the spoiled one are what their engines hold."""
    seqs = paused(churn)
    truth = churn.ask("dump")
    seqs.pop(SPOILED)
    for router in routers:
        wait_seqs(router, seqs)
        wrong = [line for line in wrong_answers(router, churn, truth) if not line.startswith(f"{SPOILED} ")]
        assert not wrong, wrong[:5]
    churn.ask("go")


def test_a_bad_value_of_a_worker_that_is_followed_is_written_again(
    pair: Pair, server: StoreServer, churn: Churn
) -> None:
    for kind, spoil in (HEADS | OTHERS).items():
        print(kind)
        spoil(server.client)
        make_all_reload(server.client)
        others_right(pair, churn)
        for router in pair:
            wait_well(router, ENGINES)
        assert check(pair, server.client, churn) > 0
        for router in pair:
            # A state change travels behind its commit, and needs no event of the engine to arrive.
            until(partial(all_live, router, churn.workers), f"{kind}: not all are live")
        churn.ask("go")
    for router in pair:
        assert failed_tasks(router) == 0


def test_a_bad_value_of_a_worker_that_nobody_follows_is_named_and_loaded_when_it_is_repaired(
    tmp_path: Path, server: StoreServer, churn: Churn
) -> None:
    client = server.client
    with RouterProcess(tmp_path / "a", ["--redis", server.url]) as one:
        register(one, churn)
        churn.ask("go")
        until(lambda: all(row["residency"].get("g0:GPU") for row in rows(one).values()), "nothing is learned")
        seqs = paused(churn)
        wait_seqs(one, seqs)
        wait_stored(client, {WorkerKey(MODEL, worker): seq for worker, seq in seqs.items()})
        wait_well(one, ENGINES)
        residency = rows(one)[SPOILED]["residency"]
    # Take the lease as if another router followed the worker.
    client.set(keys.router_lease("another"), 1, ex=3_600)
    client.set(LEASE, "another:999999")
    saved = {key: client.dump(key) for key in client.scan_iter(f"{TAG}:*", count=1000)}
    HEADS["seq"](client)
    churn.ask("go")
    with RouterProcess(tmp_path / "b", ["--redis", server.url]) as two:
        # The router starts, whatever Redis holds, and the other workers are not affected.
        for kind, spoil in HEADS.items():
            print(kind)
            spoil(client)
            make_all_reload(client)
            if kind == DROPPED:
                until(lambda: client.type(META) != b"string", f"{kind} is kept")
            else:
                row = until(lambda: cannot_be_read(two), f"{kind} is not named")
                assert row["state"] in ("resyncing", "connecting") and not row["credited"], row
                reasons = two.request("GET", "/health")["reasons"]
                assert any(SPOILED in line and "Redis holds" in line for line in reasons)
            others = [worker for worker in churn.workers if worker != SPOILED]
            until(partial(all_live, two, others), "the others suffer")
            # Repair the values: the worker is shown as it is stored.
            with client.pipeline() as pipe:
                for key in saved.keys() | set(client.scan_iter(f"{TAG}:*", count=1000)):
                    pipe.delete(key)
                for key, value in saved.items():
                    pipe.restore(key, 0, value)
                pipe.execute()
            if kind == DROPPED:
                # If the router loaded the worker meanwhile, it knows an empty one, and a repair by hand writes no log
                # entry.
                make_all_reload(client)
            until(lambda: not cannot_be_read(two), f"{kind} is not loaded when it is repaired")
            # The problem is not shown either while the worker is being loaded, so wait for its residency.
            until(lambda: rows(two)[SPOILED]["residency"] == residency, f"{kind} is not shown as it is stored")
        assert two.metric("kvrouter_unreadable_values_total", where="worker") >= len(HEADS) - 1
        # Without the lease, the router may follow the worker again.
        client.delete(LEASE)
        wait_well(two, ENGINES)
        check([two], client, churn)
        assert "Traceback" not in two.log_tail()


def cannot_be_read(router: RouterProcess) -> dict[str, Any] | None:
    row = rows(router)[SPOILED]
    return row if "Redis holds" in row["reason"] else None


REGISTRY: dict[str, Spoil] = {
    "a field without a rank": lambda client: client.hset(keys.registry(MODEL), "w9", b"x"),
    "a field that is no text": lambda client: client.hset(keys.registry(MODEL), b"\xff@0", b"x"),
    "a model that is no text": lambda client: client.sadd(keys.MODELS, b"\xff"),
    "a registration of another worker": lambda client: client.hset(
        keys.registry(MODEL), "w9@0", client.hget(keys.registry(MODEL), "w1@0")
    ),
    "a registration that is none": lambda client: client.hset(keys.registry(MODEL), "w0@0", b'{"worker":7}'),
    "workers of another type": lambda client: (
        client.set(keys.registry("other"), b"x") and client.sadd(keys.MODELS, "other")
    ),
}


@pytest.mark.parametrize("kind", REGISTRY)
def test_a_bad_entry_of_the_registry_is_named_and_left_out(
    kind: str, tmp_path: Path, pair: Pair, server: StoreServer, churn: Churn
) -> None:
    one, two = pair
    client = server.client
    saved = {
        key: client.dump(key)
        for key in client.scan_iter("kvr:*")
        if key in (keys.MODELS.encode(), keys.registry(MODEL).encode())
    }
    REGISTRY[kind](client)
    # Registrations of other workers are still known.
    events, replay = churn.endpoints[0]
    one.register("late", "m2", events, replay, patch_endpoint="off")
    until(lambda: "late" in rows(two), "registrations at the other router are no longer known")
    for router in pair:
        until(partial(named, router), "it is not named")
        assert SPOILED in rows(router)
    assert two.metric("kvrouter_unreadable_values_total", where="registry") >= 1
    # A new router starts, too.
    with RouterProcess(tmp_path / "c", ["--redis", server.url]) as three:
        assert {"w1", "w2", "late"} <= set(rows(three))
        assert named(three)
    one.unregister("late")
    client.delete(keys.registry("other"))
    for key, value in saved.items():
        client.restore(key, 0, value, replace=True)
    client.incr(keys.REGISTRATIONS)
    for router in pair:
        wait_well(router, ENGINES)
    check(pair, client, churn)


def all_live(router: RouterProcess, names: list[str]) -> bool:
    workers = rows(router)
    return all(workers[name]["state"] == "live" for name in names)


def knows(router: RouterProcess, names: set[str]) -> bool:
    return names <= set(rows(router))


def named(router: RouterProcess) -> bool:
    return any("no router writes" in line for line in router.request("GET", "/health")["reasons"])


def test_a_bad_version_of_the_registry_is_begun_again(pair: Pair, server: StoreServer, churn: Churn) -> None:
    one, two = pair
    events, replay = churn.endpoints[0]
    for number, spoil in enumerate((b"abc", b"1e3", None)):
        if spoil is None:
            server.client.delete(keys.REGISTRATIONS)
            server.client.sadd(keys.REGISTRATIONS, b"x")
        else:
            server.client.set(keys.REGISTRATIONS, spoil)

        def registered(name: str = f"late{number}") -> bool:
            try:
                one.register(name, "m2", events, replay, patch_endpoint="off")
            except RouterError:
                return False
            return name in rows(two)

        until(registered, "registrations at the other router are no longer known")
    for number in range(3):
        one.unregister(f"late{number}")
    for router in pair:
        wait_well(router, ENGINES)
    check(pair, server.client, churn)


def test_bad_words_of_other_routers_change_nothing(
    tmp_path: Path, pair: Pair, server: StoreServer, churn: Churn
) -> None:
    client = server.client
    client.hset(keys.ROUTERS, mapping={b"\xff\xfe": b"x", b"other": b"\xff"})
    client.hset(keys.CLAIMS, mapping={b"\xff": b"x", b"gone": b"\xff", b"other": b'{"workers":{"static":[["w0"]]}}'})
    for message in (b"junk", b"\xff", b"\x97\xa1a\xc3\x91\x96\xa1m\xa2w0\x00\xff\x00\x00\x90\x90\x90"):
        client.xadd(keys.LOADS, {b"m": message})
    client.xadd(keys.LOADS, {b"\xff": b"\xff"})
    specs = [f"{name}=http://127.0.0.1:9,model=m3,events={churn.endpoints[0][0]}" for name in ("s0", "s1")]
    flags = [part for spec in specs for part in ("--worker", spec)]
    with RouterProcess(tmp_path / "c", ["--redis", server.url, *flags]) as three:
        for router in pair:
            until(partial(knows, router, {"s0", "s1"}), "workers of a source are not registered")
        for name in ("s0", "s1"):
            with pytest.raises(RouterError, match="kept_by_source"):
                three.unregister(name)
        assert failed_tasks(three) == 0
    others_right(pair, churn)
