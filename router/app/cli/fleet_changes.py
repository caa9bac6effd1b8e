# SPDX-License-Identifier: Apache-2.0
"""The commands that change the fleet: `kvrouter add` and `remove`, `drain`, `undrain` and `warm`.

Each looks the worker up, makes one call, and prints a sentence, or with --json a row, for each of the worker's ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Annotated, Any
from urllib.parse import quote, urlencode

import msgspec
import typer

from kvrouter.router.app.cli.api_client import Client, ClientError
from kvrouter.router.app.cli.hand_over import (
    MaxBytes,
    Within,
    hand_over,
    has_failed,
    sentences,
    show_progress,
    size_bytes,
    summary,
)
from kvrouter.router.app.cli.options import AsJson, with_router
from kvrouter.router.app.cli.output import print_json, shaped
from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.base.common.ids import CPU
from kvrouter.router.model.config.settings import without_password
from kvrouter.router.model.workers.listed_worker import listed_worker
from kvrouter.router.model.workers.registration import UNKNOWN_MODEL
from kvrouter.router.model.workers.source_precedence import PLACES, REGISTER
from kvrouter.router.model.workers.worker_spec import body_of

Row = dict[str, Any]

ACTIVE, DRAINING = "active", "draining"
# No worker's id ends like this, because `w0@3` names rank 3 of `w0` everywhere.
RANKED = re.compile(r"(?P<id>.*)@(?P<rank>[0-9]{1,9})", re.DOTALL)

# Hidden, because typer's list of arguments would also show their Python type. The docstrings describe the arguments.
Spec = Annotated[str, typer.Argument(metavar="SPEC", hidden=True)]
Worker = Annotated[str, typer.Argument(metavar="ID", hidden=True)]
HandOver = Annotated[
    bool, typer.Option("--hand-over", help="have the other workers copy what is worth most in its CPU memory")
]
To = Annotated[
    list[str] | None, typer.Option("--to", metavar="ID", help="hand over only to this worker; may be repeated")
]
Source = Annotated[
    list[str] | None, typer.Option("--from", metavar="ID", help="fetch from this worker; may be repeated")
]
Model = Annotated[
    str | None, typer.Option("--model", "-m", metavar="NAME", help="only the worker's part of this model")
]


@with_router
def add(spec: Spec, as_json: AsJson = False, *, client: Client) -> None:
    """Register a worker by its address.

    SPEC is HTTP_URL or ID=HTTP_URL, with the same KEY=VALUE pairs as for `kvrouter serve --worker`: w2=http://10.0.0.5:8000.
    The router queries the engine for the rest.
    """
    try:
        registration = listed_worker(spec).registration
    except SettingError as error:
        raise SettingError(f"{without_password(spec)!r}: {error.message}") from None
    body = {name: value for name, value in msgspec.to_builtins(body_of(spec)).items() if value is not None}
    selection = {name: body[name] for name in ("dp_rank",) if name in body}
    wanted = {"url": registration.url, "role": registration.role.value, "handover": registration.handover.value}
    if registration.worker.model != UNKNOWN_MODEL:
        wanted["model"] = registration.worker.model
    worker_id = registration.worker.worker_id
    before = _rows(client, worker_id, selection, or_none=True)
    for row in before:
        differing = shaped(lambda: [name for name, value in wanted.items() if row[name] != value])  # noqa: B023
        if differing:
            source = shaped(lambda: row["source"])  # noqa: B023
            # A router of another version may have further sources.
            place = f"change it in {PLACES.get(source, f'the place that this router calls {source!r}')}"
            fix = f"`kvrouter remove {worker_id}` first" if source == REGISTER else place
            raise ClientError(
                f"worker {worker_id!r} is there already, with {differing[0]} {row[differing[0]]}: {fix}, or choose another id"
            )
    note = client.call("POST", "/register", body).get("note")
    loads = client.call("GET", "/loads")
    rows = _rows(client, worker_id, selection)

    def sentence(row: Row) -> str:
        reason = f": {row['reason']}" if row["reason"] else ""
        return f"is registered{' already' if before else ''} at {row['url']}; its state is {row['state']}{reason}"

    _print(rows, loads, sentence, as_json)
    if note and not as_json and not any(note in row["reason"] for row in rows):
        print(f"note: {note}")


@with_router
def remove(worker: Worker, model: Model = None, as_json: AsJson = False, *, client: Client) -> None:
    """Remove a worker and its index. It gets no new requests; requests in flight end as usual.

    ID is the worker's, as `kvrouter workers` shows it; w0@3 is one rank.
    """
    worker_id, selection = _selected(worker, model)
    before, loads = _rows(client, worker_id, selection), client.call("GET", "/loads")
    client.call("POST", "/unregister", {"worker_id": worker_id} | selection)
    _print(before, loads, lambda row: f"is removed: it gets no new requests; {_in_flight(row)}", as_json)


@with_router
def drain(
    worker: Worker,
    model: Model = None,
    with_cache: HandOver = False,
    to: To = None,
    max_bytes: MaxBytes = None,
    within: Within = None,
    as_json: AsJson = False,
    *,
    client: Client,
) -> None:
    """Send a worker no new requests. Requests in flight end as usual; the command does not wait for them.

    ID is the worker's, as `kvrouter workers` shows it; w0@3 is one rank. With --hand-over, the workers of its model fetch
    what is worth most in its CPU memory, and the command waits for that. Ctrl-C ends the hand-over, not the drain.
    """
    limit = None if max_bytes is None else size_bytes(max_bytes)
    if not with_cache and (to or max_bytes is not None or within is not None):
        raise SettingError("--to, --max-bytes and --within are for a hand-over: add --hand-over")

    def sentence(row: Row) -> str:
        return f"drains{' already' if row['draining'] else ''}: it gets no new requests; {_in_flight(row)}"

    worker_id, selection = _selected(worker, model)
    rows = _set_state(client, worker_id, selection, DRAINING, sentence, as_json and not with_cache, quiet=as_json)
    if not with_cache:
        return
    state = hand_over(client, worker_id, selection, to or None, limit, within, show_progress)
    _print_hand_over(state, as_json, {"workers": rows})


@with_router
def warm(
    worker: Worker,
    source: Source = None,
    model: Model = None,
    max_bytes: MaxBytes = None,
    within: Within = None,
    as_json: AsJson = False,
    *,
    client: Client,
) -> None:
    """Fill the CPU memory of a new worker with what is worth most to another one.

    ID is the new worker's, as `kvrouter workers` shows it. The source is the live worker of its model that holds the most
    blocks in CPU memory, unless --from names others, which are read in turn. Ctrl-C ends it; what has arrived stays.
    """
    limit = None if max_bytes is None else size_bytes(max_bytes)
    worker_id, selection = _selected(worker, model)
    rows = _rows(client, worker_id, selection)
    sources = source or shaped(lambda: [_fullest(client, rows)])
    parts: list[Row] = []
    for name in sources:
        source_id, source_selection = _selected(name, model)
        part_bytes = None if limit is None else max(1, limit // len(sources))
        part_s = None if within is None else within / len(sources)
        state = hand_over(
            client, source_id, source_selection | selection, [worker_id], part_bytes, part_s, show_progress
        )
        parts += state["parts"]
    _print_hand_over({"parts": parts}, as_json, {"sources": sources})


def _fullest(client: Client, rows: list[Row]) -> str:
    """Return the id of the live worker with the same model that holds the most blocks in CPU memory."""
    models, own = {row["model"] for row in rows}, {row["worker_id"] for row in rows}
    held: dict[str, int] = {}
    for row in client.call("GET", "/workers")["workers"]:
        if row["model"] in models and row["worker_id"] not in own and row["state"] == "live":
            blocks = sum(count for place, count in row["residency"].items() if place.endswith(f":{CPU}"))
            held[str(row["worker_id"])] = held.get(str(row["worker_id"]), 0) + blocks
    if not any(held.values()):
        raise ClientError("no live worker of this model holds blocks in CPU memory: name a source with --from")
    return max(held, key=lambda name: held[name])


def _print_hand_over(state: Row, as_json: bool, before: Row) -> None:
    """Print how a hand-over ended; exit with 1 if problems kept every worker from taking anything over.

    Args:
        state: The hand-over as it ended.
        as_json: Whether to print JSON.
        before: Further fields of the JSON, which come before it.
    """
    if as_json:
        print_json(before | {"hand_over": state})
    else:
        for text in sentences(state):
            print(text)
        print(summary(state))
    if has_failed(state):
        raise typer.Exit(1)


@with_router
def undrain(worker: Worker, model: Model = None, as_json: AsJson = False, *, client: Client) -> None:
    """Send a draining worker requests again.

    ID is the worker's, as `kvrouter workers` shows it; w0@3 is one rank.
    """

    def sentence(row: Row) -> str:
        text = "gets requests again" if row["draining"] else "was not draining: it gets requests"
        return f"{text}, once its engine answers: it is down" if row["state"] == "down" else text

    _set_state(client, *_selected(worker, model), ACTIVE, sentence, as_json)


def _set_state(
    client: Client,
    worker_id: str,
    selection: Row,
    state: str,
    sentence: Callable[[Row], str],
    as_json: bool,
    quiet: bool = False,
) -> list[Row]:
    """Change a worker's state, print that unless `quiet`, and return its rows as they are shown."""
    before = _rows(client, worker_id, selection)
    client.call("PATCH", _path(worker_id), {"state": state} | selection)
    loads = client.call("GET", "/loads")
    return _print(before, loads, sentence, as_json, draining=state == DRAINING, quiet=quiet and not as_json)


def _selected(worker: str, model: str | None) -> tuple[str, Row]:
    """Return the worker's id, and the rank and the model that limit a call to a part of the worker."""
    ranked = RANKED.fullmatch(worker)
    worker_id, dp_rank = (worker, None) if ranked is None else (ranked["id"], int(ranked["rank"]))
    return worker_id, {name: value for name, value in (("dp_rank", dp_rank), ("model", model)) if value is not None}


def _path(worker_id: str) -> str:
    return f"/workers/{quote(worker_id, safe='')}"


def _rows(client: Client, worker_id: str, selection: Row, *, or_none: bool = False) -> list[Row]:
    """Return the entries of the worker's ranks. Raises ClientError if there are none, unless `or_none`."""
    try:
        answer = client.call("GET", _path(worker_id) + (f"?{urlencode(selection)}" if selection else ""))
    except ClientError as error:
        if or_none and error.status == HTTPStatus.NOT_FOUND:
            return []
        raise
    return shaped(lambda: list(answer["workers"]))  # type: ignore[no-any-return]


def _print(
    rows: list[Row],
    loads: list[Row],
    sentence: Callable[[Row], str],
    as_json: bool,
    draining: bool | None = None,
    quiet: bool = False,
) -> list[Row]:
    """Print a sentence for each row, or the rows as JSON, and return the rows as they are shown.

    Args:
        rows: The workers as they were listed.
        loads: The answer of `/loads`.
        sentence: Returns the sentence for a row.
        as_json: Whether to print JSON.
        draining: The value to print in place of each row's `draining`, if the command changed it.
        quiet: Whether to print nothing.
    """
    from kvrouter.router.app.cli.tables import plain, worker_name
    from kvrouter.router.app.cli.worker_table import loads_by_worker

    load_of = shaped(lambda: loads_by_worker(loads))
    texts, shown = [], []
    for row in rows:
        load = load_of.get((row["model"], row["worker_id"], row["dp_rank"]), {"active_requests": 0})
        counted = row | {"active_requests": load["active_requests"]}
        texts.append(shaped(lambda: f"{worker_name(row)} (model {plain(row['model'])}) {sentence(counted)}"))  # noqa: B023
        fields = {name: counted[name] for name in ("worker_id", "dp_rank", "model", "url", "state", "active_requests")}
        shown.append(fields | {"draining": row["draining"] if draining is None else draining})
    if as_json:
        print_json({"workers": shown})
    elif not quiet:
        for text in texts:
            print(plain(text))
    return shown


def _in_flight(row: Row) -> str:
    count = row["active_requests"]
    flying = {0: "none is in flight there", 1: "1 is in flight there"}
    return flying.get(count, f"{count} are in flight there")
