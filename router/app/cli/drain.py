# SPDX-License-Identifier: Apache-2.0
"""The commands `kvrouter drain` and `kvrouter undrain`: whether a worker gets new requests."""

from __future__ import annotations

import re
from typing import Annotated, Any
from urllib.parse import quote, urlencode

import typer

from kvrouter.router.app.cli.api_client import Client
from kvrouter.router.app.cli.options import AsJson, with_router
from kvrouter.router.app.cli.output import print_json, shaped

ACTIVE, DRAINING = "active", "draining"
# No worker's id has this end, because `w0@3` names rank 3 of `w0` everywhere.
RANKED = re.compile(r"(?P<id>.*)@(?P<rank>[0-9]{1,9})", re.DOTALL)

Worker = Annotated[
    str, typer.Argument(metavar="ID", help="the worker, as `kvrouter workers` shows it; w0@3 is one rank")
]
Model = Annotated[
    str | None, typer.Option("--model", "-m", metavar="NAME", help="only the worker's part of this model")
]


@with_router
def drain(worker: Worker, model: Model = None, as_json: AsJson = False, *, client: Client) -> None:
    """Give a worker no new requests. Those in flight end as usual; nothing waits for them."""
    _set_state(client, worker, model, DRAINING, as_json)


@with_router
def undrain(worker: Worker, model: Model = None, as_json: AsJson = False, *, client: Client) -> None:
    """Give a worker requests again."""
    _set_state(client, worker, model, ACTIVE, as_json)


def _set_state(client: Client, worker: str, model: str | None, state: str, as_json: bool) -> None:
    ranked = RANKED.fullmatch(worker)
    worker_id, dp_rank = (worker, None) if ranked is None else (ranked["id"], int(ranked["rank"]))
    chosen: dict[str, Any] = {
        name: value for name, value in (("dp_rank", dp_rank), ("model", model)) if value is not None
    }
    path = f"/workers/{quote(worker_id, safe='')}"
    # Query the worker's previous state, and whether it exists.
    before = client.call("GET", path + (f"?{urlencode(chosen)}" if chosen else ""))
    client.call("PATCH", path, {"state": state} | chosen)
    loads = client.call("GET", "/loads")
    rows = shaped(lambda: [_row(row, loads, state) for row in before["workers"]])
    if as_json:
        print_json({"workers": [row for row, _ in rows]})
        return
    for row, drained in rows:
        print(_sentence(row, drained, state))


def _row(worker: dict[str, Any], loads: list[dict[str, Any]], state: str) -> tuple[dict[str, Any], bool]:
    """Return the worker's row as it is now, and whether the worker was draining before."""
    in_flight = sum(
        load["active_requests"]
        for model in loads
        for load in model["loads"]
        if (model["model_name"], str(load["worker_id"]), load["dp_rank"])
        == (worker["model"], worker["worker_id"], worker["dp_rank"])
    )
    named = {name: worker[name] for name in ("worker_id", "dp_rank", "model", "url", "state")}
    return {**named, "draining": state == DRAINING, "active_requests": in_flight}, bool(worker["draining"])


def _sentence(row: dict[str, Any], drained: bool, state: str) -> str:
    from kvrouter.router.app.cli.tables import plain, worker_name

    name = f"{plain(worker_name(row))} (model {plain(row['model'])})"
    if state == ACTIVE:
        text = f"{name} gets requests again" if drained else f"{name} was not draining: it gets requests"
        down = row["state"] == "down"
        return f"{text}, once its engine answers: it is down" if down else text
    flying = {0: "none is in flight there", 1: "1 is in flight there"}
    count = row["active_requests"]
    begun = "drains already" if drained else "drains"
    return f"{name} {begun}: it gets no new requests; {flying.get(count, f'{count} are in flight there')}"
