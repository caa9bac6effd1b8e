# SPDX-License-Identifier: Apache-2.0
"""`kvrouter workers`, `add`, `remove`, `drain` and `undrain`: their tables, requests, and messages when the router refuses."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from rich.console import Console

from kvrouter.router.app.cli.commands import run
from kvrouter.router.app.cli.worker_table import loads_by_worker, narrow_table, wide_table
from tests.support.stub_router import LOAD, WORKER, StubRouter, loads, unset_client_variables

LIVE = WORKER | {"state": "live", "reason": "", "dp_rank": 0}
TERMINAL_WIDTH = 80


@pytest.fixture
def stub() -> Iterator[StubRouter]:
    with StubRouter() as router:
        router.answer("/workers", {"workers": [WORKER]})
        router.answer("/loads", loads(LOAD))
        yield router


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    unset_client_variables(monkeypatch)


def printed(shown: Any, width: int = TERMINAL_WIDTH, **console: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=width, **console).print(shown)
    return out.getvalue()


def narrow(*workers: dict[str, Any], load: Sequence[dict[str, Any]] = (), width: int = TERMINAL_WIDTH) -> str:
    return printed(narrow_table(workers, loads_by_worker(load), width), width)


def test_workers_shows_what_an_operator_needs_and_the_reason_on_its_own_line(
    stub: StubRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["workers", "--url", stub.url]) == 0
    model, _, row, reason = capsys.readouterr().out.splitlines()
    assert model == "model m"
    assert row.split() == ["w0@1", "suspect", "GPU:7", "STORAGE:5", "3", "20.5k", "12.3k/1024", "1.2", "ms"]
    assert reason == "    gap 5..9 [not a tag]"


def test_wide_workers_has_every_column(stub: StubRouter, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["workers", "--url", stub.url, "--wide"]) == 0
    row = capsys.readouterr().out.splitlines()[1]
    cells = ("w0@1", "m", "both", "suspect", "GPU:7 STORAGE:5", "sha256 (verified)", "1.2 ms", "12.3k/1024", "register")
    for cell in (*cells, "http://e:8000", "gap 5..9 [not a tag]"):
        assert cell in row


def test_workers_are_printed_as_json(stub: StubRouter, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["workers", "--url", stub.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"workers": [WORKER]}


def test_an_empty_list_says_how_to_register_a_worker(stub: StubRouter, capsys: pytest.CaptureFixture[str]) -> None:
    stub.answer("/workers", {"workers": []})
    assert run(["workers", "--url", stub.url]) == 0
    assert "--worker" in capsys.readouterr().out


def test_no_line_is_wider_than_the_terminal() -> None:
    rows = [
        WORKER | {"worker_id": name, "state": state, "draining": drains, "residency": residency}
        for name, state, drains, residency in (
            ("w0", "live", False, {"g0:GPU": 62_500}),
            ("vllm-engines-7d9c5b6f4-x2k8p", "catching_up", True, {"g0:GPU": 62_500, "g0:CPU": 812_000}),
            ("q" * 300, "down", False, {"g0:GPU": 1, "g0:CPU": 2, "g0:STORAGE:o": 9_999_999, "g0:" + "O" * 40: 4}),
        )
    ]
    busy = [LOAD | {"worker_id": row["worker_id"], "active_requests": 4096} for row in rows]
    for width in (TERMINAL_WIDTH, 60, 200):
        table = narrow(*rows, load=loads(*busy), width=width)
        assert max(map(len, table.splitlines())) <= width, table
        assert table.count("4096") == len(rows)
    # No cell is cut with three dots: all of a name can be read.
    assert "".join(re.findall("q", narrow(*rows))) == "q" * 300


def test_each_model_has_a_heading_and_its_own_rows() -> None:
    table = narrow(LIVE | {"model": "b"}, LIVE | {"model": "a", "worker_id": "w1"}, LIVE | {"model": "b", "dp_rank": 2})
    lines = [line.split()[0] for line in table.splitlines() if line]
    assert lines == ["model", "WORKER", "w1", "model", "WORKER", "w0", "w0@2"]


@pytest.mark.parametrize(
    ("changes", "load", "state", "reason"),
    [
        ({}, {}, "suspect", "gap 5..9"),
        ({"draining": True, "closed": "it drains: ..."}, {}, "suspect, draining", "gap 5..9"),
        ({"closed": "5 failures in a row"}, {}, "suspect, breaker open", "5 failures in a row; gap 5..9"),
        ({"state": "down", "closed": "not tried", "reason": "gone"}, {}, "down", "gone"),
        ({"state": "live", "reason": "", "predictions": "untrue"}, {}, "live", "untrue"),
        ({"state": "live", "reason": ""}, {"saturated": True}, "live, saturated", ""),
    ],
)
def test_the_tables_say_why_a_worker_gets_no_requests(
    changes: dict[str, Any], load: dict[str, Any], state: str, reason: str
) -> None:
    row, *details = narrow(WORKER | changes, load=loads(LOAD | load)).splitlines()[2:]
    assert re.split(r" {2,}", row)[1] == state
    assert (details[0].strip() if details else "").startswith(reason) and bool(details) == bool(reason)
    wide = printed(wide_table([WORKER | changes]), 400).splitlines()[1]
    assert state.removesuffix(", saturated") in wide and reason in wide


def test_an_unknown_value_is_shown_as_a_dash() -> None:
    row = narrow(LIVE | {"residency": {}, "lag_ms": None, "reuse": None}).splitlines()[2]
    assert row.split() == ["w0", "live", "-", "-", "-", "-", "-"]


@pytest.mark.parametrize(
    ("changes", "colour"),
    [
        ({"state": "live"}, "32"),
        ({"state": "suspect"}, "33"),
        ({"state": "down"}, "31"),
        ({"state": "live", "draining": True}, "33"),
        ({"state": "live", "closed": "5 failures"}, "31"),
    ],
)
def test_states_have_colours_on_a_terminal_and_none_with_no_color(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], colour: str
) -> None:
    def shown(table: Any) -> str:
        return printed(table, 400, force_terminal=True, color_system="standard", legacy_windows=False)

    tables = [narrow_table([LIVE | changes], {}, TERMINAL_WIDTH), wide_table([LIVE | changes])]
    for table in tables:
        assert f"\x1b[{colour}m{changes['state']}" in shown(table)
    monkeypatch.setenv("NO_COLOR", "1")
    for table in tables:
        assert not re.search(r"\x1b\[3[0-7]m", shown(table))


@pytest.mark.parametrize(
    ("command", "state", "before", "said"),
    [
        ("drain", "draining", False, "w0 (model m) drains: it gets no new requests; 3 are in flight there"),
        ("drain", "draining", True, "w0 (model m) drains already: it gets no new requests; 3 are in flight there"),
        ("undrain", "active", True, "w0 (model m) gets requests again"),
        ("undrain", "active", False, "w0 (model m) was not draining: it gets requests"),
    ],
)
def test_drain_and_undrain_change_the_state_and_say_what_follows(
    stub: StubRouter, capsys: pytest.CaptureFixture[str], command: str, state: str, before: bool, said: str
) -> None:
    stub.answer("/workers/w0", {"workers": [LIVE | {"draining": before}]})
    stub.answer("/loads", loads(LOAD | {"dp_rank": 0}, LOAD) + loads(LOAD | {"dp_rank": 0}, model="other"))
    assert run([command, "w0", "--url", stub.url, "--api-key", "k"]) == 0
    assert capsys.readouterr().out == said + "\n"
    (changed,) = [request for request in stub.received if request[0] == "PATCH"]
    assert changed == ("PATCH", "/workers/w0", json.dumps({"state": state}, separators=(",", ":")).encode(), "Bearer k")


@pytest.mark.parametrize(("in_flight", "said"), [(0, "none is in flight there"), (1, "1 is in flight there")])
def test_one_line_for_each_rank_and_model_of_the_id(
    stub: StubRouter, capsys: pytest.CaptureFixture[str], in_flight: int, said: str
) -> None:
    stub.answer("/workers/a%2Fb", {"workers": [LIVE | {"worker_id": "a/b", "dp_rank": rank} for rank in (0, 1)]})
    entries = [LOAD | {"worker_id": "a/b", "dp_rank": rank, "active_requests": in_flight} for rank in (0, 1)]
    stub.answer("/loads", loads(*entries))
    # The command sends its PATCH to the path of the answer above.
    assert run(["drain", "a/b", "--url", stub.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["a/b", "a/b@1"] and all(line.endswith(said) for line in lines)


def test_a_rank_and_a_model_select_what_drains(stub: StubRouter, capsys: pytest.CaptureFixture[str]) -> None:
    stub.answer("/workers/w0?dp_rank=3&model=m+1", {"workers": [LIVE | {"dp_rank": 3, "model": "m 1"}]})
    stub.answer("/workers/w0", {"status": "ok"})
    assert run(["drain", "w0@3", "--model", "m 1", "--url", stub.url, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["workers"]
    assert row == {
        "worker_id": "w0",
        "dp_rank": 3,
        "model": "m 1",
        "url": "http://e:8000",
        "state": "live",
        "draining": True,
        "active_requests": 0,
    }
    assert json.loads(stub.received[1][2]) == {"state": "draining", "dp_rank": 3, "model": "m 1"}


def test_a_refusal_of_the_router_is_the_error_line(stub: StubRouter, capsys: pytest.CaptureFixture[str]) -> None:
    error = {"error": {"message": "no worker 'w9' is registered", "type": "t", "code": "unknown_worker"}}
    stub.answer("/workers/w9", error, 404)
    assert run(["drain", "w9", "--url", stub.url]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err == "kvrouter: no worker 'w9' is registered\n"
    assert [request[0] for request in stub.received] == ["GET"]


ADDED = LIVE | {"handover": "kv_transfer_params"}


def after_registration(stub: StubRouter, *rows: dict[str, Any]) -> None:
    """Let `/workers/w0` be unknown until `/register` was called, and then have these rows."""

    def on_request(number: int) -> None:
        if stub.received[-1][1] == "/register":
            stub.answer("/workers/w0", {"workers": [*rows]})

    stub.on_request = on_request
    error = {"error": {"message": "no worker 'w0' is registered", "type": "t", "code": "unknown_worker"}}
    stub.answer("/workers/w0", error, 404)


def test_add_registers_what_its_spec_says(stub: StubRouter, capsys: pytest.CaptureFixture[str]) -> None:
    after_registration(stub, ADDED | {"state": "connecting", "reason": "no connection yet"})
    stub.answer("/register", {"status": "ok", "worker_id": "w0", "note": "the url is another"})
    spec = "w0=http://e:8000/v1,events=tcp://e:1,block_size=16,hash_algo=xxhash"
    assert run(["add", spec, "--url", stub.url, "--api-key", "k"]) == 0
    assert capsys.readouterr().out == (
        "w0 (model m) is registered at http://e:8000; its state is connecting: no connection yet\nnote: the url is another\n"
    )
    (sent,) = [request for request in stub.received if request[0] == "POST"]
    assert json.loads(sent[2]) == {
        "worker_id": "w0",
        "url": "http://e:8000/v1",
        "endpoint": "tcp://e:1",
        "block_size": 16,
        "catalog": {"hash_algo": "xxhash"},
    }


def test_add_leaves_a_worker_with_the_same_values(stub: StubRouter, capsys: pytest.CaptureFixture[str]) -> None:
    stub.answer("/workers/w0", {"workers": [ADDED]})
    stub.answer("/register", {"status": "ok", "worker_id": "w0"})
    assert run(["add", "w0=http://e:8000,model=m", "--url", stub.url]) == 0
    assert capsys.readouterr().out == "w0 (model m) is registered already at http://e:8000; its state is live\n"


@pytest.mark.parametrize(
    ("spec", "source", "said"),
    [
        ("w0=http://other:1", "register", "with url http://e:8000: `kvrouter remove w0` first, or choose another id"),
        ("w0=http://e:8000,model=n", "register", "with model m: `kvrouter remove w0` first"),
        ("w0=http://e:8000,role=decode", "register", "with role both: `kvrouter remove w0` first"),
        ("w0=http://other:1", "static", "with url http://e:8000: change it in --worker or KVROUTER_WORKERS, or choose"),
        (
            "w0=http://other:1",
            "nomad",
            "with url http://e:8000: change it in the place that this router calls 'nomad', or",
        ),
    ],
)
def test_add_replaces_no_worker(
    stub: StubRouter, capsys: pytest.CaptureFixture[str], spec: str, source: str, said: str
) -> None:
    stub.answer("/workers/w0", {"workers": [ADDED | {"source": source}]})
    assert run(["add", spec, "--url", stub.url]) == 1
    assert f"kvrouter: worker 'w0' is there already, {said}" in capsys.readouterr().err
    assert [request[0] for request in stub.received] == ["GET"]


def test_remove_drops_the_worker_that_it_names(stub: StubRouter, capsys: pytest.CaptureFixture[str]) -> None:
    stub.answer("/workers/w0?dp_rank=1", {"workers": [WORKER]})
    stub.answer("/unregister", {"status": "ok", "worker_id": "w0", "dropped": 1})
    assert run(["remove", "w0@1", "--url", stub.url]) == 0
    assert capsys.readouterr().out == ("w0@1 (model m) is removed: it gets no new requests; 3 are in flight there\n")
    (sent,) = [request for request in stub.received if request[0] == "POST"]
    assert json.loads(sent[2]) == {"worker_id": "w0", "dp_rank": 1}
    assert run(["remove", "w0@1", "--url", stub.url, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["workers"]
    assert (row["worker_id"], row["dp_rank"], row["active_requests"]) == ("w0", 1, 3)


def test_a_worker_that_comes_back_is_not_removed(stub: StubRouter, capsys: pytest.CaptureFixture[str]) -> None:
    stub.answer("/workers/w0", {"workers": [LIVE]})
    stub.answer("/unregister", {"error": {"message": "it would come back", "type": "t", "code": "kept_by_source"}}, 409)
    assert run(["remove", "w0", "--url", stub.url]) == 1
    assert capsys.readouterr() == ("", "kvrouter: it would come back\n")
