# SPDX-License-Identifier: Apache-2.0
"""The command `kvrouter`: what it prints, its one-line errors and exit codes."""

from __future__ import annotations

import io
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from kvrouter.router.cli.commands import run
from kvrouter.router.cli.tables import workers_table
from kvrouter.router.common.errors import SettingError
from kvrouter.router.config.loading import load_config
from kvrouter.router.config.settings import FIELDS, flag_of, metavar_of

WORKER = {
    "worker_id": "w0",
    "dp_rank": 1,
    "model": "m",
    "url": "http://e:8000",
    "state": "suspect",
    "reason": "gap 5..9 [not a tag]",
    "epoch": "e",
    "seq": 4,
    "catalog": None,
    "catalog_source": "learned",
    "hash_scheme": "sha256 (verified)",
    "residency": {"g0:GPU": 3, "g1:GPU": 4, "g0:STORAGE:o": 5},
    "lag_ms": 1.25,
    "gaps": 2,
    "last_event_age_s": 1.0,
}
SELECTED = {
    "selection_id": "s",
    "model": "m",
    "worker_id": "w0",
    "dp_rank": 0,
    "endpoint": "http://e:8000",
    "overlap": {"longest_matched": 2, "gpu": 1, "cpu": 2, "disk": 2},
    "effective_prefill_tokens": 1,
    "reason": "reuses 2 of 3 tokens",
    "candidates": [
        {
            "worker_id": name,
            "dp_rank": 0,
            "overlap": {"longest_matched": disk, "gpu": 1, "cpu": 2, "disk": disk},
            "load": 0,
            "cost": 3 - disk,
            "state": "live",
            "limited_by": {"group_idx": 1, "kind": "mamba", "why": "no state"},
        }
        for name, disk in (("w0", 2), ("w1", 0))
    ],
}


class Stub(BaseHTTPRequestHandler):
    """Answers what the test put into `answers`, and keeps the requests."""

    answers: dict[str, tuple[int, bytes]]
    asked: list[tuple[str, str, bytes, str | None]]

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        self.asked.append((self.command, self.path, body, self.headers.get("authorization")))
        status, content = self.answers.get(self.path, (404, b"nothing"))
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = answer

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def stub() -> Iterator[tuple[str, type[Stub]]]:
    handler = type("OneStub", (Stub,), {"answers": {}, "asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", handler
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVROUTER_URL", "KVROUTER_API_KEY", "KVROUTER_CONFIG"):
        monkeypatch.delenv(name, raising=False)


def failing(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The exit code and the one line on stderr; nothing on stdout."""
    code = run(list(arguments))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvrouter: ") and err.count("\n") == 1
    return code, err


def test_workers_as_a_table(stub: Any, capsys: pytest.CaptureFixture[str]) -> None:
    url, handler = stub
    handler.answers["/workers"] = (200, json.dumps({"workers": [WORKER]}).encode())
    assert run(["workers", "--url", url]) == 0
    row = capsys.readouterr().out.splitlines()[1]
    for cell in ("w0@1", "m", "suspect", "GPU:7 STORAGE:5", "sha256 (verified)", "1.2 ms", "gap 5..9 [not a tag]"):
        assert cell in row


def test_workers_as_json(stub: Any, capsys: pytest.CaptureFixture[str]) -> None:
    url, handler = stub
    handler.answers["/workers"] = (200, json.dumps({"workers": [WORKER]}).encode())
    assert run(["workers", "--url", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"workers": [WORKER]}


def test_no_workers_says_what_to_do(stub: Any, capsys: pytest.CaptureFixture[str]) -> None:
    url, handler = stub
    handler.answers["/workers"] = (200, b'{"workers": []}')
    assert run(["workers", "--url", url]) == 0
    assert "--worker" in capsys.readouterr().out


def test_url_and_key_come_from_the_environment_too(
    stub: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, handler = stub
    handler.answers["/workers"] = (200, b'{"workers": []}')
    monkeypatch.setenv("KVROUTER_URL", url + "/")
    monkeypatch.setenv("KVROUTER_API_KEY", "k")
    assert run(["workers"]) == 0
    assert handler.asked == [("GET", "/workers", b"", "Bearer k")]


def test_explain_shows_every_candidate_and_the_reason(
    stub: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, handler = stub
    handler.answers["/select"] = (200, json.dumps(SELECTED).encode())
    monkeypatch.setattr("sys.stdin", io.StringIO("[1, 2,\n3]"))
    assert run(["explain", "--url", url, "--model", "m", "--tokens", "-", "--lora-name", "a"]) == 0
    assert json.loads(handler.asked[0][2]) == {"model": "m", "explain": True, "token_ids": [1, 2, 3], "lora_name": "a"}
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r">\s+w0\s+1\s+2\s+2\s+1\s+0\s+1\s+live\s+group 1 \(mamba\): no state", lines[1])
    assert re.match(r"\s+w1\s+1\s+2\s+0\s+3\s+0\s+3\s+live", lines[2])
    assert lines[-1] == "w0 (http://e:8000): reuses 2 of 3 tokens"


def test_explain_as_json_and_from_a_file(stub: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    url, handler = stub
    handler.answers["/select"] = (200, json.dumps(SELECTED).encode())
    (tmp_path / "t").write_text("7 8")
    assert run(["explain", "--url", url, "-m", "m", "--tokens", str(tmp_path / "t"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == SELECTED
    assert json.loads(handler.asked[0][2])["token_ids"] == [7, 8]


@pytest.mark.parametrize("whole", [False, True], ids=["messages", "a body"])
def test_explain_takes_a_chat_and_names_the_source_of_its_tokens(
    stub: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, whole: bool
) -> None:
    url, handler = stub
    tokens = {"source": "render", "num_tokens": 3, "known_tokens": 3, "problem": ""}
    handler.answers["/select"] = (200, json.dumps(SELECTED | {"tokens": tokens}).encode())
    chat = {"messages": [{"role": "user", "content": "Hi"}], "tools": []}
    (tmp_path / "c").write_text(json.dumps(chat | {"model": "theirs"} if whole else chat["messages"]))
    assert run(["explain", "--url", url, "-m", "m", "--messages", str(tmp_path / "c")]) == 0
    sent = json.loads(handler.asked[0][2])
    assert sent == (chat if whole else {"messages": chat["messages"]}) | {"model": "m", "explain": True}
    assert capsys.readouterr().out.startswith("3 tokens (source: render)\n")


def test_explain_says_how_many_tokens_are_unknown(stub: Any, capsys: pytest.CaptureFixture[str]) -> None:
    url, handler = stub
    tokens = {"source": "none", "num_tokens": 9, "known_tokens": 0, "problem": "no engine [x] to ask"}
    handler.answers["/select"] = (200, json.dumps(SELECTED | {"tokens": tokens}).encode())
    assert run(["explain", "--url", url, "-m", "m", "--prompt", "hi"]) == 0
    assert "about 9 tokens, 0 of them known (source: none): no engine [x] to ask" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["", "{", "3", "{}", '{"messages": "x"}'])
def test_a_file_without_a_chat(capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str) -> None:
    (tmp_path / "c").write_text(content)
    code, line = failing(capsys, "explain", "-m", "m", "--messages", str(tmp_path / "c"))
    assert code == 2 and '"role": "user"' in line


def test_the_routers_error_message_is_shown(stub: Any, capsys: pytest.CaptureFixture[str]) -> None:
    url, handler = stub
    error = {"error": {"message": "send\n token_ids", "type": "t", "code": "tokens_required"}}
    handler.answers["/select"] = (400, json.dumps(error).encode())
    assert failing(capsys, "explain", "--url", url, "-m", "m", "--prompt", "hi") == (1, "kvrouter: send token_ids\n")
    assert json.loads(handler.asked[0][2])["prompt"] == "hi"


def test_a_wrong_key_says_how_to_give_one(stub: Any, capsys: pytest.CaptureFixture[str]) -> None:
    url, handler = stub
    error = {"error": {"message": "no key", "type": "t", "code": "invalid_api_key"}}
    handler.answers["/workers"] = (401, json.dumps(error).encode())
    code, line = failing(capsys, "workers", "--url", url)
    assert code == 1 and "--api-key" in line


@pytest.mark.parametrize("content", [b"<html>", b"[1]", b'{"x": 1}', b"\xff"])
def test_a_server_that_is_not_a_router_is_detected(
    stub: Any, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    url, handler = stub
    handler.answers["/workers"] = (200, content)
    code, line = failing(capsys, "workers", "--url", url)
    assert code == 1 and "check --url" in line
    handler.answers["/workers"] = (500, content)
    code, line = failing(capsys, "workers", "--url", url)
    assert code == 1 and "500" in line


def test_no_router_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    # Port 9 is discard; nothing listens there in any test environment.
    code, line = failing(capsys, "workers", "--url", "http://127.0.0.1:9")
    assert code == 1 and "kvrouter serve" in line


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["workers", "--url", "127.0.0.1:30000"], "http://"),
        (["serve", "--prot", "1"], "--prot"),
        (["serve", "--port", "x"], "--port is 'x'"),
        (["serve", "--worker", "w0"], "--worker 'w0'"),
        (["serve", "--redis", "redis://h", "--data-dir", "d"], "--redis and --data-dir"),
        (["serve", "--config", "/nope.yaml"], "/nope.yaml"),
        (["explain", "--model", "m"], "--tokens FILE, --prompt TEXT, --messages FILE"),
        (["explain", "--model", "m", "--tokens", "f", "--prompt", "x"], "give exactly one of --tokens FILE"),
        (["explain", "--model", "m", "--messages", "/nope"], "/nope"),
        (["explain", "--prompt", "x"], "--model"),
        (["explain", "--model", "m", "--tokens", "/nope"], "/nope"),
        (["nonsense"], "nonsense"),
    ],
)
def test_wrong_usage_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], named: str) -> None:
    code, line = failing(capsys, *arguments)
    assert named in line
    assert code == (1 if arguments[:2] == ["workers", "--url"] else 2)


@pytest.mark.parametrize("content", ["", "[]", "1 x", "1.5", "-1", "[[1]]"])
def test_a_file_without_token_ids(capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str) -> None:
    (tmp_path / "t").write_text(content)
    code, line = failing(capsys, "explain", "-m", "m", "--tokens", str(tmp_path / "t"))
    assert code == 2 and "ids like [1, 2, 3]" in line


def test_a_port_that_is_taken_is_one_line(stub: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    port = stub[0].rpartition(":")[2]
    code, line = failing(capsys, "serve", "--port", port, "--data-dir", str(tmp_path / "d"))
    assert code == 2 and f"port {port}" in line
    assert not (tmp_path / "d").exists()


def test_help_shows_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--help"]) == 0
    shown = capsys.readouterr().out
    for name in FIELDS:
        assert f"{flag_of(name)} {metavar_of(name)}" in shown
    assert run([]) == 0
    assert "explain" in capsys.readouterr().out


def test_the_schema_of_the_settings_is_valid_and_refuses_what_a_start_refuses(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)
    for settings, valid in (
        ({"port": 30_000, "api_key": "k", "workers": ["w0=http://h:1"]}, True),
        ({"prot": 30_000}, False),
        ({"port": 70_000}, False),
        ({"api_key": "k\n"}, False),
        ({"policy": "best"}, False),
    ):
        assert validator.is_valid(settings) == valid, settings
        file = tmp_path / "settings.yaml"
        file.write_text(yaml.safe_dump(settings))
        if valid:
            load_config(file, {}, {})
        else:
            with pytest.raises(SettingError):
                load_config(file, {}, {})


def test_the_page_of_settings_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "markdown"]) == 0
    page = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "settings.md").read_text()
    assert page.endswith(capsys.readouterr().out), "kvrouter config markdown prints what its table should be"


@pytest.mark.parametrize(
    ("changes", "state", "reason"),
    [
        ({}, "suspect", "gap 5..9"),
        ({"draining": True, "closed": "it drains: ..."}, "suspect, draining", "gap 5..9"),
        ({"closed": "5 failures in a row"}, "suspect, breaker open", "5 failures in a row; gap 5..9"),
        ({"state": "down", "closed": "not tried", "reason": "gone"}, "down", "gone"),
        ({"state": "live", "reason": "", "predictions": "untrue"}, "live", "untrue"),
    ],
)
def test_the_table_says_why_a_worker_gets_no_requests(changes: dict[str, Any], state: str, reason: str) -> None:
    table = workers_table([WORKER | changes])
    cells = {str(column.header): str(next(iter(column.cells))) for column in table.columns}
    assert cells["STATE"] == state and cells["REASON"].startswith(reason)
