# SPDX-License-Identifier: Apache-2.0
"""The report of `kvrouter doctor`: the findings of a router and of the client, and what a code means, as text."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any

import msgspec
from rich.text import Text

from kvrouter.contract.diagnosis import DiagnosisReport, ExplainedCode, Finding, Severity
from kvrouter.router.app.cli.api_client import Client, ClientError
from kvrouter.router.app.cli.tables import MIN_READING_WIDTH
from kvrouter.router.app.diagnosis.clocks import SET_CLOCKS, clock_difference
from kvrouter.router.base.common.escaping import masked
from kvrouter.router.base.common.version import PACKAGE, VERSION
from kvrouter.router.observe.findings.finding import ROUTER, argument, found

INDENT = "      "
COLOURS = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.NOTE: "bold cyan"}
LABEL = "dim"


class DoctorReport(msgspec.Struct, frozen=True):
    """A diagnosis as the client reports it. `ok` means that neither an error nor a warning was found.

    The other fields are those of `DiagnosisReport`; they are empty if no router answered.
    """

    ok: bool
    url: str
    version: str
    workers: int
    routers: int
    checks: int
    findings: list[Finding]


def explanation_text(explained_code: ExplainedCode, width: int) -> Text:
    """Return the meaning of a code as text for a terminal of this width."""
    text = Text()
    _add_title(text, explained_code.code, explained_code.severity, explained_code.problem)
    _add_part(text, "cause", explained_code.cause, width)
    _add_part(text, "remedy", explained_code.remedy, width)
    text.rstrip()
    return text


def diagnose(client: Client, url: str, wall_clock: Callable[[], float]) -> DoctorReport:
    """Query the router for its diagnosis; a router that does not answer is a finding itself.

    `wall_clock` returns seconds since 1970.
    """
    findings: list[Finding] = []
    report = DiagnosisReport("", 0, 0, 0, [])
    try:
        router_version = _version(client.call("GET", "/version"))
        findings += _of_client(router_version, client.date, wall_clock())
        report = _report(client, of_other_version=router_version != VERSION)
    except ClientError as error:
        findings.append(_unanswered(error, url))
    address = argument(url.rstrip("/")) + "/"
    findings += [
        msgspec.structs.replace(finding, fix=finding.fix.replace(ROUTER, address)) for finding in report.findings
    ]
    return DoctorReport(
        all(finding.severity is Severity.NOTE for finding in findings),
        url,
        report.version,
        report.workers,
        report.routers,
        report.checks,
        findings,
    )


def _version(answer: Any) -> str:
    """Return the router's version. Raises ClientError for another program's: engines have a /version, too."""
    try:
        name, version = answer["name"], str(answer["version"])
    except (KeyError, TypeError):
        name = version = ""
    if name != PACKAGE:
        raise ClientError(f"the server there is not a router: its /version does not name {PACKAGE}; check --url")
    return version


def _report(client: Client, *, of_other_version: bool) -> DiagnosisReport:
    """Return the router's diagnosis, or an empty one if a router of another version has another form of it, or none."""
    try:
        return msgspec.convert(client.call("GET", "/diagnosis"), DiagnosisReport)
    except msgspec.ValidationError as error:
        if not of_other_version:
            raise ClientError(f"its answer to /diagnosis is no diagnosis: {error}; check --url") from None
    except ClientError as error:
        if not of_other_version or error.status != HTTPStatus.NOT_FOUND:
            raise
    return DiagnosisReport("", 0, 0, 0, [])


def _of_client(version: str, date: str | None, now_s: float) -> list[Finding]:
    findings = []
    if version != VERSION:
        findings.append(
            found(
                "KV003",
                "client",
                f"this command has version {VERSION}, the router {version}",
                f"install version {version} here as the router was installed, or update the router",
            )
        )
    try:
        ahead_s = 0.0 if date is None else now_s - parsedate_to_datetime(date).timestamp()
    except ValueError:
        ahead_s = 0.0
    if (differs := clock_difference(ahead_s)) is not None:
        evidence = f"this machine's clock is {differs} the router's, by the Date of its answer"
        findings.append(found("KV004", "client", evidence, SET_CLOCKS))
    return findings


def _unanswered(error: ClientError, url: str) -> Finding:
    if error.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return found("KV002", url, str(error))
    return found("KV001", url, str(error))


def findings_text(report: DoctorReport, width: int) -> Text:
    """Return one block for each finding and a summary line; only that line if nothing was found.

    `width` is that of the terminal.
    """
    blocks = Text()
    for finding in report.findings:
        _add_title(blocks, finding.code, finding.severity, f"{finding.subject}: {finding.problem}")
        more = f"kvrouter doctor --explain {finding.code}"
        for label, value in (("why", finding.evidence), ("fix", finding.fix), ("see", more)):
            _add_part(blocks, label, value, width)
        blocks.append("\n")
    return blocks + _summary(report)


def _add_title(text: Text, code: str, severity: Severity, title: str) -> None:
    text.append(f"{masked(code)} {severity.value} ", COLOURS[severity])
    text.append(f"{masked(title)}\n", "bold")


def _add_part(text: Text, label: str, value: str, width: int) -> None:
    """Append one labelled part, whose lines after the first are indented."""
    lines = textwrap.wrap(
        masked(value),
        # The label and the two spaces before it take more of the first line than the indent of the others.
        max(width, MIN_READING_WIDTH) - max(len(INDENT), len(label) + 3),
        # Words are not broken, so that an address or a flag can be copied.
        break_long_words=False,
        break_on_hyphens=False,
    )
    text.append(f"  {label} ", LABEL)
    text.append(f"\n{INDENT}".join(lines) + "\n")


def _summary(report: DoctorReport) -> Text:
    looked = f"{_count(report.workers, 'worker')}, {_count(report.routers, 'router')}, version {report.version}"
    if not report.findings:
        return Text("all is well", "bold green") + Text(f": {looked}; {report.checks} checks found nothing")
    counts = [
        _count(sum(finding.severity is severity for finding in report.findings), severity.value)
        for severity in Severity
        if any(finding.severity is severity for finding in report.findings)
    ]
    return Text(f"{', '.join(counts)} ({looked})" if report.version else ", ".join(counts))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
