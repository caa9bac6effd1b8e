# SPDX-License-Identifier: Apache-2.0
"""Claim: `kvrouter doctor` names each fault of an operator with its fix, and finds nothing in a healthy fleet.

Each fault of `FAULTS` is made in a fleet of a real router and simulated replicas. The doctor examines it every half
second, as `kvrouter doctor` does, until it names the expected code with the expected fix; then the fault is mended, and
the findings must go. A finding of a fleet that is healthy (just started, idle, mended) is a false alarm. The exit code
is 1 if a fault is not named, is named otherwise, or an alarm is false.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.fault_fleet import ENGINE_KEY, FaultFleet, has_found_seed, is_followed, nowhere
from benchmarks.report import parser_of
from kvrouter.contract.diagnosis import Finding

LOOK_S = 0.5
# The longest that an operator waits. Faults that show in requests need some tens of them.
NAMED_LIMIT_S = 30.0
WELL_LIMIT_S = 30.0
# For how long a healthy fleet is watched: after each repair, at its start and idle.
QUIET_S = 3.0
IDLE_S = 20.0
# A fix is shown by its first words.
SHOWN_CHARS = 60


class Fault(NamedTuple):
    """One fault, and what the doctor has to say about it."""

    number: int
    name: str
    # Makes the fault, until the exit mends it.
    make: Callable[[FaultFleet], AbstractContextManager[None]]
    # The code that names it; "" if the router solves it by itself, so that nothing is to be said.
    code: str = ""
    # A text in the finding's fix, in which EVENTS and REPLAY stand for w1's own endpoints.
    fix: str = ""
    # Sends requests between two looks.
    ask: Callable[[FaultFleet], object] = FaultFleet.rest
    # Returns the address that the doctor examines in place of the router's.
    at: Callable[[FaultFleet], str] | None = None
    # Returns whether the router has solved the fault; for faults without a code.
    solved: Callable[[FaultFleet], bool] = lambda fleet: True


class Row(msgspec.Struct):
    """The doctor's report about one fault."""

    number: int
    fault: str
    code: str
    fix: str
    named_s: float | None
    well_s: float | None
    problem: str = ""


def _same(fleet: FaultFleet) -> None:
    fleet.complete("w1")


def _too_long(fleet: FaultFleet) -> None:
    # More than the context of one engine, and less than that of the other.
    for worker in ("w0", "w1"):
        for _ in range(REQUESTS_A_LOOK):
            fleet.complete(worker, max_tokens=LONG_TOKENS)


def _with_key(fleet: FaultFleet) -> None:
    fleet.complete("w1", key=ENGINE_KEY)


KEY = ("--api-key", ENGINE_KEY)
LONG_TOKENS, SHORT_CONTEXT = 1_000, 600
REQUESTS_A_LOOK = 8

# The faults of an operator's first day, by the numbers that earlier records use.
FAULTS = (
    Fault(
        1, "wrong model name", lambda fleet: fleet.listed(w1={"model": "other"}), "KV102", "--served-model-name other"
    ),
    Fault(
        2,
        "--kv-events-config forgotten",
        lambda fleet: fleet.restarted("--no-kv-events"),
        "KV201",
        "--kv-events-config",
    ),
    Fault(
        3,
        "wrong event port",
        lambda fleet: fleet.listed(w1={"endpoint": nowhere().replace("http", "tcp")}),
        "KV205",
        "register events=EVENTS,replay=REPLAY",
    ),
    Fault(
        4,
        "event port is the HTTP port",
        lambda fleet: fleet.listed(w1={"endpoint": fleet.engines[1].url.replace("http", "tcp")}),
        "KV206",
        "register events=EVENTS,replay=REPLAY",
    ),
    Fault(
        5,
        "event and replay endpoint swapped",
        lambda fleet: fleet.listed(
            w1={"endpoint": fleet.engines[1].replay, "replay_endpoint": fleet.engines[1].events}
        ),
        "KV204",
        "register events=EVENTS,replay=REPLAY",
    ),
    Fault(
        6,
        "two workers, one event endpoint",
        lambda fleet: fleet.listed(
            w1={"endpoint": fleet.engines[0].events, "replay_endpoint": fleet.engines[0].replay}
        ),
        "KV203",
        "endpoints of its own engine",
    ),
    Fault(7, "engine killed", lambda fleet: fleet.killed(), "KV101", "start the engine"),
    Fault(
        8,
        "engine restarted with another block size",
        lambda fleet: fleet.restarted("--block-size", "32"),
        "KV305",
        "--block-size",
        ask=FaultFleet.converse,
    ),
    Fault(9, "Redis stopped", lambda fleet: fleet.without_store(), "KV501", "start it"),
    Fault(10, "one worker drains", lambda fleet: fleet.drained(), "KV111", "active"),
    Fault(
        11,
        "cached tokens not reported",
        lambda fleet: fleet.restarted("--no-prompt-tokens-details"),
        "KV401",
        "--enable-prompt-tokens-details",
        ask=_same,
    ),
    Fault(
        12,
        "PYTHONHASHSEED=42, not declared",
        lambda fleet: fleet.restarted("--hash-seed", "42"),
        ask=_same,
        solved=has_found_seed,
    ),
    Fault(
        13,
        "engine not there at the start",
        lambda fleet: fleet.listed({"worker_id": "w2", "url": nowhere()}),
        "KV104",
        "start the engine",
    ),
    Fault(
        14,
        "engine wants a key that nobody sends",
        lambda fleet: fleet.restarted(*KEY),
        "KV109",
        "--worker-api-key",
        ask=_same,
    ),
    Fault(
        15,
        "engine wants a key that clients alone send",
        lambda fleet: fleet.restarted(*KEY),
        "KV109",
        "--worker-api-key",
        ask=_with_key,
    ),
    Fault(16, "the same, address only", lambda fleet: fleet.spare(*KEY), "KV104", "--worker-api-key"),
    Fault(
        17,
        "prefix caching off",
        lambda fleet: fleet.spare("--no-prefix-caching"),
        "KV202",
        "--enable-prefix-caching",
    ),
    Fault(
        18,
        "prefix caching off after a restart",
        lambda fleet: fleet.restarted("--no-prefix-caching"),
        "KV202",
        "--enable-prefix-caching",
    ),
    Fault(
        19,
        "one engine registered twice",
        lambda fleet: fleet.listed({"worker_id": "w2", "url": fleet.engines[0].url}),
        "KV110",
        "take it out of",
    ),
    Fault(20, "no worker", lambda fleet: fleet.empty(), "KV005", "--worker"),
    Fault(20, "wrong URL of the router", lambda fleet: nullcontext(), "KV001", "--url", at=lambda fleet: nowhere()),
    Fault(
        20,
        "another program at the router's URL",
        lambda fleet: nullcontext(),
        "KV001",
        "--url",
        at=lambda fleet: fleet.engines[0].url,
    ),
    Fault(21, "worker URL with /v1", lambda fleet: fleet.spare(path="/v1"), solved=is_followed("w2")),
    Fault(22, "the same with a slash", lambda fleet: fleet.spare(path="/v1/"), solved=is_followed("w2")),
    Fault(23, "the same with model=", lambda fleet: fleet.spare(path="/v1", model="sim"), solved=is_followed("w2")),
    Fault(24, "https:// where the engine speaks HTTP", lambda fleet: fleet.spare(scheme="https"), "KV104", "http://"),
    Fault(
        25,
        "one engine with a shorter context",
        lambda fleet: fleet.restarted("--max-text-tokens", str(SHORT_CONTEXT)),
        "KV112",
        "--max-model-len",
        ask=_too_long,
    ),
)


def walk(fleet: FaultFleet, fault: Fault) -> Row:
    """Make one fault, have the doctor look until it names it, mend it, and have it look until nothing is left."""
    row = Row(fault.number, fault.name, fault.code or "none", "", None, None)
    with fault.make(fleet):
        if fault.code:
            _wait_named(fleet, fault, row)
        else:
            row.named_s = _wait_well(fleet, row, fault.ask, fault.solved)
            row.fix = "none needed"
    if not fault.at:
        row.well_s = _wait_well(fleet, row)
    return row


def _wait_named(fleet: FaultFleet, fault: Fault, row: Row) -> None:
    url = fault.at(fleet) if fault.at else None
    fix = fault.fix.replace("EVENTS", fleet.engines[1].events).replace("REPLAY", fleet.engines[1].replay)
    begun_s = time.monotonic()
    while True:
        findings = fleet.report(url).findings
        named = [finding for finding in findings if finding.code == fault.code]
        took_s = time.monotonic() - begun_s
        if named and fix in named[0].fix:
            break
        if took_s > NAMED_LIMIT_S:
            row.problem = f"not named as expected: {_texts(findings) or 'all is well'}"
            return
        fault.ask(fleet)
        time.sleep(LOOK_S)
    row.named_s, row.fix = took_s, named[0].fix
    others = [finding for finding in findings if finding.code != fault.code]
    if len(named) > 1 or others:
        row.problem = f"named beside it: {_texts([*named[1:], *others])}"


def _wait_well(
    fleet: FaultFleet,
    row: Row,
    ask: Callable[[FaultFleet], object] = FaultFleet.converse,
    solved: Callable[[FaultFleet], bool] = FaultFleet.is_whole,
) -> float | None:
    """Return after how many seconds the fleet was solved and nothing was found.

    Return None, with the row's problem, if that took too long, or if something was found afterwards.
    """
    begun_s = time.monotonic()
    while (findings := fleet.report().findings) or not solved(fleet):
        if time.monotonic() - begun_s > WELL_LIMIT_S:
            row.problem = row.problem or f"false alarm: {_texts(findings) or 'none, but the fleet is not well'}"
            return None
        ask(fleet)
        time.sleep(LOOK_S)
    took_s = time.monotonic() - begun_s
    alarm = _alarm(fleet, QUIET_S, ask)
    row.problem = row.problem or alarm
    return None if alarm else took_s


def _alarm(fleet: FaultFleet, seconds: float, ask: Callable[[FaultFleet], object]) -> str:
    """Return the first finding of a fleet that is healthy for so long; "" if there is none."""
    begun_s = time.monotonic()
    while (since_s := time.monotonic() - begun_s) < seconds:
        if findings := fleet.report().findings:
            return f"false alarm after {since_s:.1f} s: {_texts(findings)}"
        ask(fleet)
        time.sleep(LOOK_S)
    return ""


def healthy(fleet: FaultFleet) -> list[Row]:
    """Look at fleets in which nothing is wrong: a router just started, idle, with traffic, and started again."""
    rows = []
    for name, seconds, ask in (
        ("fleet just started", QUIET_S, FaultFleet.rest),
        ("fleet idle", IDLE_S, FaultFleet.rest),
        ("fleet with traffic", QUIET_S, FaultFleet.converse),
    ):
        rows.append(Row(0, name, "none", "none needed", None, None, _alarm(fleet, seconds, ask)))
    with fleet.another_router():
        rows.append(
            Row(0, "router restarted", "none", "none needed", None, None, _alarm(fleet, QUIET_S, FaultFleet.rest))
        )
    return rows


def _texts(findings: list[Finding]) -> str:
    return "; ".join(f"{finding.code} {finding.subject}: {finding.evidence}" for finding in findings)


def table(rows: list[Row]) -> str:
    """Return the rows as a table for a page."""
    lines = ["| # | fault | code | fix | named after | well after | |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        fix = row.fix if len(row.fix) <= SHOWN_CHARS else row.fix[:SHOWN_CHARS].rstrip() + " ..."
        times = " | ".join("" if value is None else f"{value:.1f} s" for value in (row.named_s, row.well_s))
        mark = f"FAIL: {row.problem}" if row.problem else "PASS"
        lines.append(f"| {row.number or ''} | {row.fault} | {row.code} | {fix} | {times} | {mark} |")
    return "\n".join(lines)


def main() -> None:
    """Walk through the faults, and print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", type=int, action="append", help="the number of a fault; may be repeated")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    arguments = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="kvr-walk-") as folder, FaultFleet(Path(folder)) as fleet:
        if not arguments.only:
            rows += healthy(fleet)
        for fault in FAULTS:
            if arguments.only and fault.number not in arguments.only:
                continue
            rows.append(walk(fleet, fault))
            print(table(rows[-1:]).rpartition("\n")[2], file=sys.stderr, flush=True)
    print(table(rows))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(msgspec.to_builtins(rows), indent=2) + "\n")
    if failed := [row.fault for row in rows if row.problem]:
        sys.exit(f"{len(failed)} of {len(rows)} failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
