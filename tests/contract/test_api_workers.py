# SPDX-License-Identifier: Apache-2.0
"""Registering, changing, dropping and listing workers over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from kvrouter.contract.worker_status import WorkerStatus
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.redis_client.errors import StoreUnavailable
from kvrouter.router.model.workers.registration import BASE_PATH_LEFT_OUT, CatalogSpec, GroupSpec, Registration
from kvrouter.router.model.workers.registration_from_body import MAX_LORAS, MAX_PATH_CHARS
from kvrouter.router.serve.api.http.http_api import HttpApi
from kvrouter.router.serve.api.workers import ROWS_A_TURN
from tests.contract.api_support import TinyCore, ask_app, build, call, status

BARE = {"worker_id": "w0", "model": "m", "endpoint": "tcp://10.0.0.5:5557"}
W0 = WorkerKey("m", "w0", 0)


@pytest.fixture
def core() -> TinyCore:
    return TinyCore()


@pytest.mark.parametrize("path", ["/register", "/workers"])
def test_a_registration_with_every_field_is_read(core: TinyCore, path: str) -> None:
    body = {
        **BARE,
        "replay_endpoint": "ipc:///run/replay.sock",
        "dp_rank": 3,
        "url": "https://engine:8000/base",
        "block_size": 16,
        "lora_name": "a",
        "unknown": 1,
        "catalog": {
            "groups": [
                {"group_idx": 0, "kind": "Full_Attention", "block_size": 16, "unknown": 1},
                {"group_idx": 1, "kind": "sliding_window", "block_size": 16, "sliding_window": 128, "eagle": True},
                {"group_idx": None, "kind": "mamba", "block_size": 64, "prefix_cacheable": False},
            ],
            "hash_block_size": 16,
            "scheduler_block_size": 64,
            "hash_algo": "sha256_cbor",
            "none_hash": "0x" + "AB" * 32,
            "none_hash_seed": 0,
            "hash_lookahead_tokens": 0,
            "partial_hits": True,
            "offload_blocks_per_chunk": 4,
            "offload_connector": "SimpleCPUOffloadConnector",
            "lora_paths": {"a": "/loras/a"},
        },
    }
    answer = call(build(core)[0], "POST", path, body)
    assert answer.status == 200
    assert answer.json().items() >= {"status": "ok", "worker_id": "w0"}.items()
    assert core.registrations() == [
        Registration(
            worker=WorkerKey("m", "w0", 3),
            events="tcp://10.0.0.5:5557",
            replay="ipc:///run/replay.sock",
            url="https://engine:8000/base",
            block_size=16,
            lora_name="a",
            catalog=CatalogSpec(
                groups=(
                    GroupSpec(0, "full_attention", 16),
                    GroupSpec(1, "sliding_window", 16, sliding_window=128, eagle=True),
                    GroupSpec(None, "mamba", 64, prefix_cacheable=False),
                ),
                hash_block_size=16,
                scheduler_block_size=64,
                hash_algo="sha256_cbor",
                none_hash="ab" * 32,
                none_hash_seed="0",
                hash_lookahead_tokens=0,
                partial_hits=True,
                offload_blocks_per_chunk=4,
                offload_connector="SimpleCPUOffloadConnector",
                lora_paths={"a": "/loras/a"},
            ),
        )
    ]


@pytest.mark.parametrize(
    "body",
    [
        {"instance_id": 42, "model_name": "m", "endpoint": "tcp://h:5557", "block_size": 16, "tenant_id": "default"},
        {"instance_id": "42", "modelname": "m", "endpoint": "tcp://h:5557", "type": "vLLM", "dp_rank": 0},
        {"worker_id": 42, "instance_id": "42", "model": "m", "endpoint": "tcp://h:5557", "block_size": 16},
    ],
)
def test_a_bare_dynamo_or_mooncake_registration_works(core: TinyCore, body: dict[str, Any]) -> None:
    answer = call(build(core)[0], "POST", "/register", body)
    # An id that was sent as a number is returned as a number.
    assert answer.json() == {
        "status": "ok",
        "worker_id": "42" if body["instance_id"] == "42" and "worker_id" not in body else 42,
    }
    assert list(core.registered) == [WorkerKey("m", "42", 0)]


GROUP = {"group_idx": 0, "kind": "mamba", "block_size": 16}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"worker_id": None}, "worker_id"),
    ({"worker_id": ""}, "worker_id"),
    ({"worker_id": "x" * 600}, "worker_id"),
    ({"worker_id": True}, "worker_id"),
    ({"worker_id": "w0@1"}, "worker_id must not end in '@1', which stands for a rank: write dp_rank=1"),
    ({"instance_id": "other"}, "contradict"),
    ({"model": None}, "model"),
    ({"model": " "}, "model"),
    ({"model_name": "n"}, "contradict"),
    ({"endpoint": None}, "endpoint"),
    ({"endpoint": "10.0.0.5:5557"}, "endpoint"),
    ({"endpoint": "tcp://*:5557"}, "endpoint"),
    ({"endpoint": "tcp://h:0"}, "endpoint"),
    ({"endpoint": "tcp://h:70000"}, "endpoint"),
    ({"endpoint": "inproc://x"}, "endpoint"),
    ({"endpoint": "tcp://h:1\n"}, "endpoint"),
    ({"replay_endpoint": "http://h:1"}, "replay_endpoint"),
    ({"endpoint": None, "url": "http://h", "replay_endpoint": "tcp://h:1"}, "replay_endpoint"),
    ({"url": "ftp://h"}, "url"),
    ({"url": "http://"}, "url"),
    ({"url": "http://h:99999"}, "url"),
    ({"url": "http://[::1"}, "url"),
    ({"dp_rank": -1}, "dp_rank"),
    ({"dp_rank": "0"}, "dp_rank"),
    ({"block_size": 0}, "block_size"),
    ({"catalog": {"hash_block_size": 0}}, "catalog.hash_block_size"),
    ({"catalog": {"scheduler_block_size": 2**40}}, "catalog.scheduler_block_size"),
    ({"catalog": {"hash_algo": "md5"}}, "catalog.hash_algo"),
    ({"catalog": {"offload_connector": "a b"}}, "catalog.offload_connector"),
    ({"catalog": {"none_hash": "xy"}}, "catalog.none_hash"),
    ({"catalog": {"none_hash": "abc" * 7}}, "catalog.none_hash"),
    ({"catalog": {"none_hash": "ab" * 16}}, "catalog.none_hash must be 64 hex digits, as hash_algo is sha256"),
    ({"catalog": {"none_hash": "ab" * 32, "hash_algo": "xxhash"}}, "catalog.none_hash must be 32 hex digits"),
    ({"catalog": {"hash_lookahead_tokens": -1}}, "catalog.hash_lookahead_tokens"),
    ({"catalog": {"groups": [GROUP, {**GROUP, "group_idx": 1, "kind": "magic"}]}}, "catalog.groups[1].kind"),
    ({"catalog": {"groups": [{**GROUP, "block_size": 0}]}}, "catalog.groups[0].block_size"),
    ({"catalog": {"groups": [{**GROUP, "sliding_window": -5}]}}, "catalog.groups[0].sliding_window"),
    ({"catalog": {"groups": [{**GROUP, "group_idx": -1}]}}, "catalog.groups[0].group_idx"),
    ({"catalog": {"groups": [GROUP, GROUP]}}, "group_idx twice"),
    ({"catalog": {"groups": [{"group_idx": 0, "kind": "mamba"}]}}, "block_size"),
    ({"catalog": {"groups": [{**GROUP, "group_idx": i} for i in range(65)]}}, "catalog.groups"),
]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        *BAD,
        ({"catalog": {"lora_paths": {f"l{number}": "p" for number in range(MAX_LORAS + 1)}}}, "lora_paths"),
        ({"catalog": {"lora_paths": {"l": "p" * (MAX_PATH_CHARS + 1)}}}, "lora_paths"),
        ({"catalog": {"lora_paths": {"l" * 513: "p"}}}, "lora_paths"),
        ({"catalog": {"none_hash_seed": "s" * 513}}, "none_hash_seed"),
        ({"lora_name": "l" * 513}, "lora_name"),
    ],
)
def test_a_bad_registration_is_400_and_names_the_field(core: TinyCore, change: dict[str, Any], named: str) -> None:
    answer = call(build(core)[0], "POST", "/register", {**BARE, **change})
    assert answer.status == 400
    assert named in answer.error["message"]
    assert not core.registered


def test_a_worker_without_events_is_allowed(core: TinyCore) -> None:
    assert (
        call(build(core)[0], "POST", "/register", {"worker_id": "w0", "model": "m", "url": "http://h:1"}).status == 200
    )


def test_unregister_drops_one_rank_or_all(app: HttpApi) -> None:
    for rank in range(3):
        call(app, "POST", "/register", {**BARE, "dp_rank": rank})
    answer = call(app, "POST", "/unregister", {"instance_id": "w0", "dp_rank": 1})
    assert (answer.status, answer.json()["dropped"]) == (200, 1)
    assert call(app, "POST", "/unregister", {"worker_id": "w0"}).json()["dropped"] == 2
    answer = call(app, "POST", "/unregister", {"worker_id": "w0"})
    assert (answer.status, answer.error["code"]) == (404, "unknown_worker")


def test_delete_takes_rank_and_model_from_the_query(core: TinyCore, app: HttpApi) -> None:
    for rank in range(2):
        call(app, "POST", "/register", {**BARE, "worker_id": "a/b c", "dp_rank": rank})
    assert call(app, "DELETE", "/workers/a/b c", query="dp_rank=1&model=other").status == 404
    assert call(app, "DELETE", "/workers/a/b c", query="dp_rank=1").status == 200
    assert list(core.registered) == [WorkerKey("m", "a/b c", 0)]
    answer = call(app, "DELETE", "/workers/a/b c", query="dp_rank=x")
    assert answer.status == 400
    assert "dp_rank" in answer.error["message"]


def test_patch_keeps_what_is_absent_and_unsets_null(core: TinyCore, app: HttpApi) -> None:
    call(app, "POST", "/register", {**BARE, "url": "http://h:1", "replay_endpoint": "tcp://h:2", "block_size": 16})
    answer = call(app, "PATCH", "/workers/w0", {"url": "http://h:9", "replay_endpoint": None})
    assert answer.status == 200 and answer.json().items() >= {"status": "ok", "worker_id": "w0"}.items()
    assert core.registered[W0] == Registration(W0, events=BARE["endpoint"], url="http://h:9", block_size=16)


def test_a_contradictory_patch_is_refused(core: TinyCore, app: HttpApi) -> None:
    assert call(app, "PATCH", "/workers/w0", {"url": "http://h:1"}).error["code"] == "unknown_worker"
    for rank in range(2):
        call(app, "POST", "/register", {**BARE, "dp_rank": rank})
    before = dict(core.registered)
    assert call(app, "PATCH", "/workers/w0", {"endpoint": "tcp://h:1"}).status == 409
    assert call(app, "PATCH", "/workers/w0", {"url": "nope"}).status == 400
    assert call(app, "PATCH", "/workers/w0", {"dp_rank": 1, "endpoint": None}).status == 400
    assert core.registered == before
    assert call(app, "PATCH", "/workers/w0", {"dp_rank": 1, "endpoint": "tcp://h:1"}).status == 200
    assert core.registered[WorkerKey("m", "w0", 1)].events == "tcp://h:1"
    assert core.registered[W0].events == BARE["endpoint"]


def test_workers_lists_every_field(app: HttpApi) -> None:
    call(app, "POST", "/register", {**BARE, "url": "http://h:1"})
    row = {
        "worker_id": "w0",
        "dp_rank": 0,
        "model": "m",
        "url": "http://h:1",
        "state": "live",
        "state_age_s": 3.5,
        "credited": True,
        "approximate": False,
        "reason": "",
        "epoch": "e1",
        "seq": 7,
        "catalog": None,
        "catalog_source": "learned",
        "hash_scheme": "sha256 (verified)",
        "residency": {"g0:GPU": 3},
        "lag_ms": 0.5,
        "gaps": 0,
        "recovery": {
            "missed_batches": 2,
            "replays": 0,
            "snapshots": 0,
            "relearned": 0,
            "ghost_blocks": 0,
            "lost_blocks": 0,
        },
        "last_event_age_s": 1.5,
        "patch": None,
        "refused_blocks": 0,
        "tokens": None,
        "source": "register",
        "draining": False,
        "draining_s": None,
        "closed": "",
        "role": "both",
        "handover": "kv_transfer_params",
        "engine": "vllm",
        "engine_cache": {"prefix_caching": None, "block_size": None, "blocks": None, "tokens": None},
        "predictions": "",
        "reuse": None,
    }
    assert call(app, "GET", "/workers").json() == {"workers": [row]}
    packed = call(app, "GET", "/workers", headers={"accept": "application/msgpack"})
    assert msgspec.msgpack.decode(packed.body) == {"workers": [row]}


def test_one_worker_has_the_rows_of_all_its_ranks_and_models(app: HttpApi) -> None:
    for worker_id, model, rank in (("w0", "m", 0), ("w0", "m", 1), ("w0", "n", 0), ("w1", "m", 0), ("a/b c", "m", 0)):
        call(app, "POST", "/register", {"worker_id": worker_id, "model": model, "dp_rank": rank, "url": "http://h:1"})
    every = call(app, "GET", "/workers").json()["workers"]

    def rows(path: str, query: str = "") -> list[dict[str, Any]]:
        answer = call(app, "GET", path, query=query)
        assert answer.status == 200
        listed: list[dict[str, Any]] = answer.json()["workers"]
        return listed

    assert rows("/workers/w0") == [row for row in every if row["worker_id"] == "w0"] and len(rows("/workers/w0")) == 3
    assert rows("/workers/w0", "dp_rank=1") == [row for row in every if row["dp_rank"] == 1]
    assert rows("/workers/w0", "model=n") == [row for row in every if row["model"] == "n"]
    assert len(rows("/workers/a/b c")) == 1
    for path, query, named in (
        ("/workers/w9", "", "no worker 'w9' is registered; GET /workers lists"),
        ("/workers/w0", "dp_rank=7", "no worker 'w0' rank 7"),
        ("/workers/w1", "model=n", "of model 'n'"),
    ):
        answer = call(app, "GET", path, query=query)
        assert (answer.status, answer.error["code"]) == (404, "unknown_worker") and named in answer.error["message"]
    assert call(app, "GET", "/workers/w0", query="dp_rank=x").status == 400


def test_a_worker_that_its_source_drains_is_not_shown_as_active(core: TinyCore, app: HttpApi) -> None:
    core.registered[W0] = Registration(worker=W0, url="http://h:1", source="kubernetes", retiring=True)
    answer = call(app, "PATCH", "/workers/w0", {"state": "active"})
    assert (answer.status, answer.error["code"]) == (409, "kept_by_source")
    assert "is drained by Kubernetes" in answer.error["message"]
    assert call(app, "PATCH", "/workers/w0", {"state": "draining"}).status == 200


def test_a_worker_registers_with_messagepack(core: TinyCore) -> None:
    raw = msgspec.msgpack.encode(BARE)
    assert call(build(core)[0], "POST", "/register", raw, headers={"content-type": "application/msgpack"}).status == 200
    assert W0 in core.registered


def test_a_store_that_is_down_is_503(core: TinyCore) -> None:
    core.fail = StoreUnavailable("no connection to the server")
    answer = call(build(core)[0], "POST", "/register", BARE)
    assert (answer.status, answer.error["code"]) == (503, "store_unavailable")


def test_a_role_is_kept_changed_and_unset(core: TinyCore, app: HttpApi) -> None:
    body = {"worker_id": "w0", "model": "m", "url": "http://h:1"}
    call(app, "POST", "/register", body | {"role": "prefill"})
    (worker,) = core.registered
    assert (core.registered[worker].role, core.registered[worker].handover) == ("prefill", "kv_transfer_params")
    assert call(app, "PATCH", "/workers/w0", {"role": "decode", "handover": "header"}).status == 200
    assert call(app, "PATCH", "/workers/w0", {"url": "http://h:2"}).status == 200
    assert (core.registered[worker].role, core.registered[worker].handover) == ("decode", "header")
    assert call(app, "PATCH", "/workers/w0", {"role": None, "handover": None}).status == 200
    assert (core.registered[worker].role, core.registered[worker].handover) == ("both", "kv_transfer_params")


@pytest.mark.parametrize("method", ["POST", "PATCH"])
def test_an_unknown_role_lists_the_known_ones(app: HttpApi, method: str) -> None:
    body = {"worker_id": "w0", "model": "m", "url": "http://h:1"}
    path = "/register" if method == "POST" else "/workers/w0"
    call(app, "POST", "/register", body)
    for more, named in (
        ({"role": "prefiller"}, "role must be one of both, prefill, decode"),
        ({"handover": "nixl"}, "handover must be one of kv_transfer_params, header"),
    ):
        answer = call(app, method, path, body | more)
        assert answer.status == 400 and named in answer.error["message"]


def test_a_worker_drains_until_it_is_active_again(core: TinyCore, app: HttpApi) -> None:
    body = {"worker_id": "w0", "model": "m", "url": "http://h:1"}
    call(app, "POST", "/register", body)
    (worker,) = core.registered
    assert call(app, "PATCH", "/workers/w0", {"state": "draining"}).status == 200
    assert core.registered[worker].draining
    # An engine that registers again does not know that it is drained.
    call(app, "POST", "/register", body | {"url": "http://h:2"})
    assert (core.registered[worker].draining, core.registered[worker].url) == (True, "http://h:2")
    call(app, "PATCH", "/workers/w0", {"url": "http://h:3"})
    assert core.registered[worker].draining
    call(app, "PATCH", "/workers/w0", {"state": "active"})
    assert not core.registered[worker].draining
    assert call(app, "PATCH", "/workers/w0", {"state": "gone"}).status == 400


def test_a_change_answers_with_the_workers_state(app: HttpApi) -> None:
    call(app, "POST", "/register", {"worker_id": "w0", "model": "m", "url": "http://h:1"})
    answer = call(app, "PATCH", "/workers/w0", {"state": "draining"}).json()
    assert answer.items() >= {"lifecycle": "incomplete", "routing_group": "default", "state": "live"}.items()
    assert {"draining", "draining_s"} <= answer.keys()


def test_a_base_path_that_is_left_out_is_in_the_answer(core: TinyCore, app: HttpApi) -> None:
    body = {"worker_id": "w0", "model": "m", "url": "http://h:1"}
    assert "note" not in call(app, "POST", "/register", body).json()
    for method, path in (("POST", "/register"), ("POST", "/workers"), ("PATCH", "/workers/w0")):
        answer = call(app, method, path, body | {"url": "http://h:2/v1/"}).json()
        assert (answer["note"], answer["endpoint"]) == (BASE_PATH_LEFT_OUT, "http://h:2")
        assert core.registered[W0].url == "http://h:2" and core.registered[W0].note == ""
    assert "note" not in call(app, "PATCH", "/workers/w0", {"url": "http://h:3"}).json()


class TurnsCore(TinyCore):
    """A core with `rows` workers that records the turn of the event loop in which each row was made."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.turn = 0
        self.turns: list[int] = []

    def statuses(self, worker_id: str | None = None) -> Iterator[WorkerStatus]:  # type: ignore[override]
        for n in range(self.rows):
            self.turns.append(self.turn)
            yield status(WorkerKey("m", f"w{n}", 0), None)

    async def count_turns(self) -> None:
        while True:
            self.turn += 1
            await asyncio.sleep(0)


def test_a_long_list_of_workers_lets_others_have_their_turn() -> None:
    async def listed(core: TurnsCore) -> int:
        counter = asyncio.create_task(core.count_turns())
        answer = await ask_app(build(core)[0], "GET", "/workers")
        counter.cancel()
        return len(answer.json()["workers"])

    core = TurnsCore(3 * ROWS_A_TURN)
    assert asyncio.run(listed(core)) == core.rows
    assert max(core.turns.count(turn) for turn in core.turns) <= ROWS_A_TURN
