# SPDX-License-Identifier: Apache-2.0
"""`kvrouter doctor`: the faults that only a client sees, the text of findings, and the exit code."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from typing import Any

import msgspec
import pytest
from rich.text import Text

from kvrouter.contract.diagnosis import DiagnosisReport, Finding, Severity
from kvrouter.router.app.cli.commands import run
from kvrouter.router.app.cli.doctor_report import DoctorReport, explanation_text, findings_text
from kvrouter.router.base.common.version import VERSION
from kvrouter.router.observe.findings.explanations import EXPLANATIONS, explained_code
from kvrouter.router.observe.findings.finding import CODES, ROUTER, found
from tests.support.ports import free_port
from tests.support.quiet_server import QuietServer

# This time is far from the actual time, which the doctor's own clock shows.
LONG_AGO_S = 1_000_000_000.0
WELL = DiagnosisReport(VERSION, 2, 1, 40, [])


class Stub(BaseHTTPRequestHandler):
    """Router that answers each path as the test has set in `answers`, and dates its answers with `dated_s`."""

    answers: dict[str, tuple[int, bytes]]
    dated_s: float | None

    def do_GET(self) -> None:
        status, content = self.answers.get(self.path, (404, b'{"error": {"message": "none", "code": "not_found"}}'))
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def date_time_string(self, timestamp: float | None = None) -> str:
        return formatdate(self.dated_s, usegmt=True)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, type[Stub]]]:
    """Provide a router without faults, as its URL and its handler."""
    for name in ("KVROUTER_URL", "KVROUTER_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    handler = type("OneStub", (Stub,), {"answers": {}, "dated_s": None})
    answer(handler, VERSION, WELL)
    with QuietServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", handler
        server.shutdown()
        thread.join()


def answer(handler: type[Stub], version: str, report: DiagnosisReport | None) -> None:
    handler.answers["/version"] = (200, json.dumps({"name": "hybrid-kv-router", "version": version}).encode())
    handler.answers.pop("/diagnosis", None)
    if report is not None:
        handler.answers["/diagnosis"] = (200, msgspec.json.encode(report))


def doctor(capsys: pytest.CaptureFixture[str], url: str, *more: str) -> tuple[int, list[str]]:
    """Run `kvrouter doctor`; return its exit code and the codes of its findings."""
    code = run(["doctor", "--url", url, "--json", *more])
    report = msgspec.json.decode(capsys.readouterr().out, type=DoctorReport)
    assert report.ok is (code == 0)
    assert report.url == url
    return code, [finding.code for finding in report.findings]


def test_a_router_that_is_well_is_one_line(stub: Any, capsys: pytest.CaptureFixture[str]) -> None:
    url, _ = stub
    assert run(["doctor", "--url", url]) == 0
    out = capsys.readouterr().out
    assert out == f"all is well: 2 workers, 1 router, version {VERSION}; 40 checks found nothing\n"
    assert doctor(capsys, url) == (0, [])


def test_an_unreachable_router_is_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(capsys, f"http://127.0.0.1:{free_port()}") == (1, ["KV001"])


def test_another_server_is_no_router(stub: Any, capsys: pytest.CaptureFixture[str]) -> None:
    url, handler = stub
    other = (b'{"version": "0.32.0"}', b'{"name": "another", "version": "1"}')
    for status, content in ((200, b"<html>"), (200, b"[1]"), (500, b"oops"), *((200, body) for body in other)):
        handler.answers["/version"] = (status, content)
        assert doctor(capsys, url) == (1, ["KV001"])


def test_a_wrong_key_is_a_finding(stub: Any, capsys: pytest.CaptureFixture[str]) -> None:
    url, handler = stub
    refusal = {"error": {"message": "no key", "type": "invalid_request_error", "code": "invalid_api_key"}}
    handler.answers["/version"] = (401, json.dumps(refusal).encode())
    assert doctor(capsys, url, "--api-key", "wrong") == (1, ["KV002"])


def test_another_version_is_a_finding_beside_its_own(stub: Any, capsys: pytest.CaptureFixture[str]) -> None:
    url, handler = stub
    fault = found("KV101", "worker w0", "refused", "start it")
    answer(handler, "9.9", DiagnosisReport("9.9", 1, 1, 50, [fault]))
    assert doctor(capsys, url) == (1, ["KV003", "KV101"])
    # This router has no diagnosis, or another form of it.
    answer(handler, "9.9", None)
    assert doctor(capsys, url) == (1, ["KV003"])
    handler.answers["/diagnosis"] = (200, b'{"findings": 3}')
    assert doctor(capsys, url) == (1, ["KV003"])


def test_clocks_that_differ_are_a_finding(stub: Any, capsys: pytest.CaptureFixture[str]) -> None:
    url, handler = stub
    handler.dated_s = LONG_AGO_S
    assert doctor(capsys, url) == (1, ["KV004"])


def test_commands_have_the_routers_address(stub: Any, capsys: pytest.CaptureFixture[str]) -> None:
    url, handler = stub
    fault = found("KV101", "worker w0", "refused", f"curl -X DELETE {ROUTER}workers/w0")
    answer(handler, VERSION, DiagnosisReport(VERSION, 1, 1, 50, [fault]))
    assert run(["doctor", "--url", f"{url}/", "--json"]) == 1
    (finding,) = msgspec.json.decode(capsys.readouterr().out, type=DoctorReport).findings
    assert finding.fix == f"curl -X DELETE {url}/workers/w0"


def test_a_note_is_no_failure(stub: Any, capsys: pytest.CaptureFixture[str]) -> None:
    url, handler = stub
    note = found("KV505", "Redis", "it may not be seen", "ACL SETUSER")
    answer(handler, VERSION, DiagnosisReport(VERSION, 1, 1, 40, [note]))
    assert doctor(capsys, url) == (0, ["KV505"])
    assert run(["doctor", "--url", url]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"1 note (1 worker, 1 router, version {VERSION})"


def test_a_block_reads_at_80_columns_and_keeps_commands_whole(stub: Any, capsys: pytest.CaptureFixture[str]) -> None:
    url, handler = stub
    flag = "--kv-events-config-that-is-long"
    fault = found("KV201", "worker [bold]w0[/]\x1b[31m", "because " * 30, f"vllm serve {flag} " * 10)
    answer(handler, VERSION, DiagnosisReport(VERSION, 1, 1, 40, [fault]))
    assert run(["doctor", "--url", url]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "KV201 error worker [bold]w0[/]?[31m: the worker has no event endpoint"
    assert sum(line.count(flag) for line in lines) == 10
    assert any(line.strip() == "see kvrouter doctor --explain KV201" for line in lines)
    assert lines[-1].startswith("1 error (")


def test_a_code_is_explained_without_a_router(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--explain", "kv505", "--url", f"http://127.0.0.1:{free_port()}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "KV505 note Redis does not let the router see its settings"
    words = " ".join(line.strip() for line in lines)
    assert f"cause {EXPLANATIONS['KV505'].cause} remedy {EXPLANATIONS['KV505'].remedy}" in words


def test_an_explanation_as_json_has_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--explain", "KV201", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "code": "KV201",
        "severity": "error",
        "problem": "the worker has no event endpoint",
        "cause": EXPLANATIONS["KV201"].cause,
        "remedy": EXPLANATIONS["KV201"].remedy,
    }


def test_every_explanation_fits_80_columns() -> None:
    for code in CODES:
        lines = explanation_text(explained_code(code), 80).plain.splitlines()
        assert max(map(len, lines)) <= 80, code


def test_a_code_that_does_not_exist_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    for given, hint in (("KV112345", "did you mean KV11"), ("nothing", "codes are like KV001")):
        assert run(["doctor", "--explain", given]) == 2
        assert hint in capsys.readouterr().err


@pytest.mark.parametrize(("severity", "colour"), [(Severity.ERROR, "red"), (Severity.WARNING, "yellow")])
def test_each_severity_is_shown_in_its_colour(severity: Severity, colour: str) -> None:
    finding = Finding("KV101", severity, "w", "p", "e", "f", "page")
    text = findings_text(DoctorReport(False, "u", "1", 1, 1, 1, [finding]), 80)
    assert isinstance(text, Text)
    assert any(colour in str(span.style) for span in text.spans)
