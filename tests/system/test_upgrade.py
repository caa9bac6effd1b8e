# SPDX-License-Identifier: Apache-2.0
"""The former version's data in Redis, and its routers beside the present ones.

Nothing is misread, no worker has to register again, and everything is known again when the old routers are gone.
`schema_2.json` was written by that version (`tests/golden/make_former_schema.py`); its routers run from the
repository's history, if it is there.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.store import keys
from tests.support import former_release
from tests.support.churn import BLOCK, HASHES, Churn
from tests.support.fleet import (
    MODEL,
    check,
    paused,
    register,
    rows,
    until,
    wait_busy,
    wait_seqs,
    wait_shared,
    wrong_answers,
)
from tests.support.former_release import Stored
from tests.support.router_process import RouterProcess
from tests.support.store_server import StoreServer

FIXTURE = Path(__file__).parents[1] / "golden" / "schema_2.json"
ENGINES, RATE = 2, 3_000.0
FORMER_REGISTRY = keys.registry(MODEL, keys.FORMER_PREFIX)
OWN = (keys.PREFIX.encode(), keys.SCHEMAS.encode())
# The workers of the fixture; `w0` and `w1` are engines that stored blocks.
WORKERS = {"w0", "w1", "drained", "prefill", "a/b:{c}", "stated"}


def moved(stored: Stored, churn: Churn) -> Stored:
    """Return the fixture with the addresses of engines that run."""
    fields = []
    for field, text in stored[FORMER_REGISTRY]["value"]:
        registration = json.loads(text)
        for worker, (events, replay) in zip(churn.workers, churn.endpoints, strict=True):
            if field == f"{worker}@0":
                registration |= {"events": events, "replay": replay}
        fields.append((field, json.dumps(registration)))
    return stored | {FORMER_REGISTRY: {"type": "hash", "value": fields}}


@pytest.fixture
def left(server: StoreServer, churn: Churn) -> Stored:
    """Write the data that the former version left to `server`, and return it."""
    stored = moved(former_release.read(FIXTURE), churn)
    former_release.load(server.client, stored)
    return stored


def others(server: StoreServer) -> Stored:
    """Return all entries that are not this schema's and do not expire."""
    entries = former_release.dump(server.client, without=OWN)
    return {key: entry for key, entry in entries.items() if "expires_ms" not in entry}


def start(tmp_path: Path, server: StoreServer, name: str = "new", *flags: str) -> RouterProcess:
    return RouterProcess(tmp_path / name, ["--redis", server.url, *flags])


def over_credited(router: RouterProcess, churn: Churn, truth: dict[str, Any]) -> list[str]:
    """Return where more is predicted than the engines hold, which stand still."""
    excesses = []
    for chain, tokens in zip(HASHES, truth["reuse"], strict=True):
        question = {"model": MODEL, "block_hashes": chain, "num_tokens": len(chain) * BLOCK + 1}
        answer = router.request("POST", "/query_by_hash", question)["instances"]
        for worker, most in zip(churn.workers, tokens, strict=True):
            if worker in answer and answer[worker]["gpu"] > most:
                excesses.append(f"{worker}: {answer[worker]['gpu']} of {most}")
    return excesses


def test_the_fixture_is_what_the_former_version_wrote() -> None:
    stored = former_release.read(FIXTURE)
    assert all(key.startswith(keys.FORMER_PREFIX) for key in stored.keys() - {keys.SCHEMAS})
    metas = [dict(entry["value"]) for key, entry in stored.items() if key.endswith("/w0}:meta")]
    # The old version held blocks, and wrote no checksums yet.
    assert [keys.META_SUM in meta for meta in metas] == [False] and int(metas[0]["seq"]) > 0


def test_what_the_former_version_left_is_registered_and_its_index_is_void_by_name(
    tmp_path: Path, server: StoreServer, churn: Churn, left: Stored
) -> None:
    """Take over the registrations of engines that hold other blocks than the old index has.

    No block of the old index may be credited.
    """
    before = others(server)
    churn.ask("go")
    time.sleep(0.5)
    paused(churn)
    truth = churn.ask("dump")
    with start(tmp_path, server) as router:
        shown = rows(router)
        assert set(shown) == WORKERS
        assert shown["drained"]["draining"] and shown["prefill"]["role"] == "prefill"
        assert (shown["a/b:{c}"]["model"], shown["stated"]["dp_rank"]) == ("m{}:/", 3)
        assert shown["stated"]["catalog"]["groups"]
        # Nothing is over-credited from the router's first answer on, until it knows all.
        until(lambda: not over_credited(router, churn, truth) and rows(router)["w0"]["state"] == "live", "w0 is live")
        check([router], server.client, churn)
        health = router.request("GET", "/health")
        assert any("schema 2 of an earlier version" in warning for warning in health["warnings"])
        assert router.metric("kvrouter_other_schema", which="former") == 1
        assert router.metric("kvrouter_other_schema", which="newer") == 0
        assert router.metric("kvrouter_registrations_left") == 0
        log = router.log_tail()
        assert "registrations taken over" in log and "Traceback" not in log
        findings = router.request("GET", "/diagnosis")["findings"]
        assert [finding["code"] for finding in findings if finding["subject"] == "Redis"].count("KV507") == 1
        # Registrations are taken over once: a worker that is dropped here stays dropped.
        router.unregister("drained")
    assert others(server) == before
    with start(tmp_path, server, "again") as router:
        assert set(rows(router)) == WORKERS - {"drained"}
        assert "registrations taken over" not in router.log_tail()
        # Delete the old keys as in docs/how-to/upgrade.md.
        for key in list(server.client.scan_iter("kvr:2:*")):
            server.client.unlink(key)
        until(lambda: "warnings" not in router.request("GET", "/health"), "it is still said")
        assert others(server) == {} and set(rows(router)) == WORKERS - {"drained"}


def test_a_registration_that_cannot_be_taken_over_is_named_and_the_others_are_there(
    tmp_path: Path, server: StoreServer, left: Stored
) -> None:
    server.client.hset(FORMER_REGISTRY, "bad@0", b'{"worker":7}')
    server.client.hset(FORMER_REGISTRY, "w@x", b"\xff")
    foreign = {"worker": [MODEL, "far", 0], "url": "http://192.0.2.1:8000"}
    server.client.hset(FORMER_REGISTRY, "far@0", json.dumps(foreign))
    before = others(server)
    with start(tmp_path, server, "new", "--allow-host", "127.0.0.1") as router:
        assert set(rows(router)) == WORKERS
        reasons = [reason for reason in router.request("GET", "/health")["reasons"] if "not all taken over" in reason]
        assert sorted(
            word for word in ("bad@0", "the name of a field", "worker far") if word in str(reasons)
        ) == sorted(("bad@0", "the name of a field", "worker far"))
        assert router.metric("kvrouter_registrations_left") == 3 == len(reasons)
        assert others(server) == before
        server.client.hdel(FORMER_REGISTRY, "bad@0", "w@x")
        server.client.hset(FORMER_REGISTRY, "far@0", json.dumps(foreign | {"url": "http://127.0.0.1:9"}))
        server.client.incr(keys.FORMER_REGISTRATIONS)
        until(lambda: router.metric("kvrouter_registrations_left") == 0, "it is not taken over")
        assert set(rows(router)) == WORKERS | {"far"}


def test_what_a_node_lost_of_the_former_registry_takes_no_worker_away(
    tmp_path: Path, server: StoreServer, left: Stored
) -> None:
    """Lose the former registry without a change that was counted.

    Only a counted change takes a worker away.
    """
    with start(tmp_path, server) as router:
        assert set(rows(router)) == WORKERS
        registry = server.client.hgetall(FORMER_REGISTRY)
        server.client.delete(FORMER_REGISTRY)
    with start(tmp_path, server, "again") as router:
        assert set(rows(router)) == WORKERS
        # The registry is back, without a worker that a router of that version dropped.
        server.client.hset(FORMER_REGISTRY, mapping={name: raw for name, raw in registry.items() if name != b"w1@0"})
        server.client.incr(keys.FORMER_REGISTRATIONS)
        until(lambda: set(rows(router)) == WORKERS - {"w1"}, "what was dropped there is still here")


def test_beside_a_newer_schema_a_router_keeps_to_its_own_and_says_so(
    tmp_path: Path, server: StoreServer, churn: Churn
) -> None:
    newer = {b"kvr:4:models": b"of another form", b"kvr:4:{m/w0}:meta": b"x"}
    server.client.mset(newer)
    with start(tmp_path, server) as router:
        register(router, churn)
        churn.ask("go")
        assert "warnings" not in router.request("GET", "/health")
        server.client.hset(keys.SCHEMAS, mapping={"4": "9.9", "x": "y"})
        until(lambda: router.metric("kvrouter_other_schema", which="newer") == 1, "the newer schema is not seen")
        (caution,) = router.request("GET", "/health")["warnings"]
        assert "schema 4" in caution and "9.9" in caution and caution in router.log_tail()
        wait_busy(server.client, churn)
        check([router], server.client, churn)
        assert server.client.mget(list(newer)) == list(newer.values())
        server.client.hdel(keys.SCHEMAS, "4")
        until(lambda: "warnings" not in router.request("GET", "/health"), "it is still said")
        # A store that comes back empty, or with a value that no router writes, gets its schema's number again.
        for spoil in (lambda: None, lambda: server.client.set(keys.SCHEMAS, "x")):
            server.client.flushall()
            spoil()
            until(
                lambda: server.client.type(keys.SCHEMAS) == b"hash" and server.client.hkeys(keys.SCHEMAS) == [b"3"],
                "the schema is not noted again",
            )
        assert "Traceback" not in router.log_tail()


@pytest.mark.skipif(not former_release.is_known(), reason="the repository's history is not here")
def test_two_routers_of_each_version_side_by_side(tmp_path: Path, server: StoreServer, churn: Churn) -> None:
    former = former_release.environment(tmp_path / "former")
    flags = ["--redis", server.url]
    with (
        start(tmp_path, server, "c") as three,
        RouterProcess(tmp_path / "a", flags, former) as one,
        RouterProcess(tmp_path / "b", flags, former) as two,
    ):
        register(one, churn)
        churn.ask("go")
        wait_shared((one, two), len(churn.workers))
        wait_seqs(two, dict.fromkeys(churn.workers, 20))
        # The new router knows a worker that is registered at an old one, and follows all workers by itself.
        until(lambda: set(rows(three)) == set(churn.workers), "a worker of the old routers is not known")
        until(lambda: three.metric("kvrouter_leases_held") == len(churn.workers), "the new router follows less")
        assert check((one, two, three), server.client, churn) > 20
        one.request("PATCH", "/workers/w0", {"state": "draining"})
        until(lambda: rows(three)["w0"]["draining"], "a change at an old router is not known")
        one.request("PATCH", "/workers/w0", {"state": "active"})
        two.request("POST", "/register", {"worker_id": "late", "model": MODEL, "url": "http://127.0.0.1:9"})
        until(lambda: "late" in rows(three), "a late worker is not known")
        two.unregister("late")
        until(lambda: "late" not in rows(three) and not rows(three)["w0"]["draining"], "it is still there")
        # Nothing comes from the new routers to the old ones.
        three.request("POST", "/register", {"worker_id": "new", "model": "x", "url": "http://127.0.0.1:9"})
        churn.ask("go")
        with start(tmp_path, server, "d") as four:
            wait_shared((three, four), len(churn.workers) + 1)
            check((one, two, three, four), server.client, churn)
            assert set(rows(one)) == set(churn.workers)
            before = others(server)
            one.__exit__()
            churn.ask("go")
            check((two, three, four), server.client, churn)
            two.__exit__()
            churn.ask("go")
            check((three, four), server.client, churn)
            # The old routers' heartbeats and leases are gone by themselves, and nobody wrote to the other keys that
            # they left.
            after = others(server)
            assert {key for key in after if key.endswith(":workers")} <= set(before)
            assert not [key for key in after if key not in before]
            for router in (three, four):
                assert set(rows(router)) == {*churn.workers, "new"}
                assert router.metric("kvrouter_stream_gaps_total") == 0
                assert "Traceback" not in router.log_tail()
                assert router.metric("kvrouter_index_commits_total", outcome="fenced") == 0


def test_one_router_after_the_other_on_its_private_store(tmp_path: Path, left: Stored) -> None:
    """Stop the router, and start another one with the same data directory."""
    with RouterProcess(tmp_path / "first") as router, router.store() as client:
        client.flushall()
        former_release.load(client, left)
    with RouterProcess(tmp_path / "first") as router:
        assert set(rows(router)) == WORKERS
        with router.store() as client:
            assert client.hget(keys.SCHEMAS, "3") and client.exists(keys.registry("m"))
            assert client.hget(keys.registry("m"), keys.registry_field(WorkerKey("m", "w0", 0)))


@pytest.mark.skipif(not former_release.is_known(), reason="the repository's history is not here")
def test_the_way_back_credits_nothing_that_is_gone(tmp_path: Path, server: StoreServer, churn: Churn) -> None:
    """Replace the old router by the new one under traffic, and go back to the old one with the data that it left."""
    former = former_release.environment(tmp_path / "former")
    flags = ["--redis", server.url]
    with RouterProcess(tmp_path / "a", flags, former) as one:
        register(one, churn)
        churn.ask("go")
        wait_seqs(one, dict.fromkeys(churn.workers, 20))
        with start(tmp_path, server, "b") as two:
            wait_seqs(two, dict.fromkeys(churn.workers, 40))
            one.__exit__()
            seqs = dict(zip(churn.workers, churn.ask("seqs"), strict=True))
            wait_seqs(two, {worker: seq + 20 for worker, seq in seqs.items()})
            with RouterProcess(tmp_path / "c", flags, former) as again:
                two.__exit__()
                seqs = paused(churn)
                truth = churn.ask("dump")
                # The index that the old router left is out of date, so no block may be credited that is gone.
                until(lambda: not over_credited(again, churn, truth), "more is predicted than the engines hold")
                wait_seqs(again, seqs)
                until(lambda: not wrong_answers(again, churn, truth), "the old router's answers are wrong")
                assert not over_credited(again, churn, truth)
