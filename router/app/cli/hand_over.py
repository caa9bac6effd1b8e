# SPDX-License-Identifier: Apache-2.0
"""`kvrouter drain --hand-over` and `kvrouter warm`: begin a hand-over, show its progress, and end it with Ctrl-C."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Annotated, Any
from urllib.parse import quote

import typer

from kvrouter.contract.hand_overs import DEFAULT_WITHIN_S
from kvrouter.router.app.cli.api_client import Client, ClientError
from kvrouter.router.app.cli.output import shaped
from kvrouter.router.base.common.errors import SettingError

Row = dict[str, Any]

# The pause between queries of the progress.
POLL_S = 0.5
# The pause between lines of progress.
SHOW_S = 2.0
# After this many queries in a row in which an engine did not answer, it is no longer waited for.
MAX_SILENCES = 6
# How much longer than its time limit a hand-over is waited for: its last batch may still be under way.
GRACE_S = 5.0
# The ends of a hand-over in which the receiver took all that it could within the bounds.
GOOD_ENDS = frozenset({"complete", "bytes", "time", "room"})
LOST = "lost"

SIZE = re.compile(r"(?P<number>[0-9]{1,15})(?P<unit>|[KMGT]i?B?)", re.ASCII)
UNITS = "KMGT"

MaxBytes = Annotated[
    str | None,
    typer.Option("--max-bytes", metavar="BYTES", help="copy at most this, like 20G or 20GiB; by default 64GiB"),
]
Within = Annotated[
    float | None, typer.Option("--within", metavar="SECONDS", help="end after this time; by default 60 s")
]


def size_bytes(text: str) -> int:
    """Return the bytes of a text such as 500M, 20G or 20GiB. Raises SettingError.

    Every unit is a power of 1024, as for memory.
    """
    match = SIZE.fullmatch(text)
    if match is None or not int(match["number"]):
        raise SettingError(f"--max-bytes {text!r}: write a number of bytes, or one like 500M, 20G or 20GiB")
    unit = match["unit"][:1]
    return int(match["number"]) << (10 * (UNITS.index(unit) + 1) if unit else 0)


def hand_over(
    client: Client,
    worker_id: str,
    selection: Row,
    to: list[str] | None,
    max_bytes: int | None,
    within_s: float | None,
    show: Callable[[str], None],
) -> Row:
    """Hand a worker's cache over, and return the hand-over as it ended. Raises ClientError.

    Args:
        client: The router.
        worker_id: The worker that hands over.
        selection: The rank and the model that limit it.
        to: The workers that take over; None: all that can.
        max_bytes: Bytes to copy; None: the router's default.
        within_s: The time limit; None: the router's default.
        show: Shows a line of progress.
    """
    given: Row = {"to": to, "max_bytes": max_bytes, "within_s": within_s}
    body = selection | {name: value for name, value in given.items() if value is not None}
    reply = client.call("POST", f"/workers/{quote(worker_id, safe='')}/hand_over", body)
    try:
        return _followed(client, reply, within_s, show)
    except KeyboardInterrupt:
        stopped = client.call("DELETE", f"/hand_overs/{shaped(lambda: reply['number'])}")
        show(f"stopped: {summary(stopped)}; blocks that have arrived stay")
        raise


def _followed(client: Client, reply: Row, within_s: float | None, show: Callable[[str], None]) -> Row:
    """Query the progress until every part has ended, and return the last state."""
    parts = {_name(part): part for part in shaped(lambda: list(reply["parts"]))}
    silences = dict.fromkeys(parts, 0)
    limit_s = (within_s or DEFAULT_WITHIN_S) + GRACE_S
    begun_s = shown_s = time.monotonic()
    while any(not part["end"] for part in parts.values()):
        if time.monotonic() - begun_s > limit_s:
            break
        time.sleep(POLL_S)
        try:
            known_parts = client.call("GET", f"/hand_overs/{reply['number']}")["parts"]
        except ClientError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            known_parts = []
        current = {_name(part): part for part in known_parts}
        for name, part in parts.items():
            silences[name] = 0 if name in current else silences[name] + 1
            if name in current:
                parts[name] = current[name]
            elif not part["end"] and silences[name] >= MAX_SILENCES:
                parts[name] = part | {"end": LOST, "problem": "no longer answers: its engine ended, or restarted"}
        if time.monotonic() - shown_s > SHOW_S:
            shown_s = time.monotonic()
            show(summary({"parts": list(parts.values())}))
    return {"number": reply["number"], "parts": list(parts.values())}


def summary(state: Row) -> str:
    """Return one line about all parts of a hand-over."""
    parts = shaped(lambda: list(state["parts"]))
    fetched, size = sum(part["fetched"] for part in parts), sum(part["fetched_bytes"] for part in parts)
    going_on = sum(not part["end"] for part in parts)
    workers = "1 worker" if len(parts) == 1 else f"{len(parts)} workers"
    text = f"{fetched:,} chunks ({shown_bytes(size)}) handed over to {workers}"
    return f"{text}, {going_on} still copy" if going_on else text


def sentences(state: Row) -> list[str]:
    """Return a sentence for each part of a hand-over that has ended."""
    return [shaped(lambda: _sentence(part)) for part in shaped(lambda: list(state["parts"]))]  # noqa: B023


def has_failed(state: Row) -> bool:
    """Return whether no worker took anything over because of problems."""
    return not any(part["end"] in GOOD_ENDS or part["fetched"] for part in state["parts"])


def _sentence(part: Row) -> str:
    name = _name(part)
    if part["problem"] and not part["fetched"]:
        return f"{name} takes nothing over: it {part['problem']}"
    ends = {
        "complete": "all of its share",
        "bytes": "as much as --max-bytes allows",
        "time": "as much as the time allowed",
        "room": "as much as it has room for",
        "": "it still copies",
    }
    ending = ends.get(part["end"], f"then it ended: {part['problem'] or part['end']}")
    counted = {"present": "were there", "evicted": "made room", "missed": "did not come"}
    more = "".join(f", {part[field]:,} {meaning}" for field, meaning in counted.items() if part[field])
    size = shown_bytes(part["fetched_bytes"])
    return f"{name} took over {part['fetched']:,} of {part['offered']:,} chunks ({size}{more}): {ending}"


def shown_bytes(size: int) -> str:
    """Return a size with its unit, such as 1.5 GiB."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def show_progress(text: str) -> None:
    """Print a line of progress, which is no part of the output."""
    print(f"kvrouter: {text}", file=sys.stderr, flush=True)


def _name(part: Row) -> str:
    from kvrouter.router.app.cli.tables import plain, worker_name

    return f"{worker_name(part)} (model {plain(part['model'])})"
