# SPDX-License-Identifier: Apache-2.0
"""The workers as tables: a narrow one that fits a terminal, and a wide one with every column.

Pure: decoded JSON in, rich renderables out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvrouter.router.app.cli.tables import REASON_INDENT, UNKNOWN, plain, short_number, text, worker_name

Row = dict[str, Any]
# (model, worker_id, dp_rank) -> the worker's entry of `/loads`.
Loads = dict[tuple[str, str, int], Row]

LIVE, DOWN = "live", "down"
DRAINING, BREAKER_OPEN, SATURATED = "draining", "breaker open", "saturated"
# The style is that of the first of these words in a worker's standing. All other states lead to one of these.
STYLES = ((DOWN, "red"), (BREAKER_OPEN, "red"), (DRAINING, "yellow"), (SATURATED, "yellow"), (LIVE, "green"))
ON_ITS_WAY = "yellow"

# The gap between columns, and the one used if there is little room.
GAPS = (2, 1)
# The least width to which a column shrinks on a narrow terminal.
MIN_WIDTH = 8
MS_PER_S = 1_000

WIDE_COLUMNS = (
    *("WORKER", "MODEL", "ROLE", "STATE", "SEQ", "BLOCKS", "CATALOG", "HASHES", "LAG", "GAPS"),
    *("PRED/DELIV", "TOKENS", "SOURCE", "URL", "REASON"),
)
RIGHT = {"SEQ", "LAG", "GAPS", "REQS", "QUEUED", "PRED/DELIV"}


class Column(NamedTuple):
    """A column of the narrow table."""

    name: str
    # Whether it shrinks if not all columns fit; its cells then continue in the next line.
    folds: bool = False


STATE = Column("STATE", folds=True)
COLUMNS = (
    Column("WORKER", folds=True),
    STATE,
    Column("BLOCKS", folds=True),
    Column("REQS"),
    Column("QUEUED"),
    Column("PRED/DELIV"),
    Column("LAG"),
)


def loads_by_worker(models: Iterable[Row]) -> Loads:
    """Return the entries of `/loads` by worker."""
    return {
        (model["model_name"], str(load["worker_id"]), load["dp_rank"]): load
        for model in models
        for load in model["loads"]
    }


def narrow_table(workers: Sequence[Row], loads: Loads, width: int) -> RenderableType:
    """Return a table with one row for each worker, grouped by model, that fits in `width` cells of a line.

    The reason against a worker, if there is one, is on a line of its own below the row.
    """
    rows = [(worker, _cells(worker, loads.get(_key(worker)))) for worker in sorted(workers, key=_model)]
    widths, gap = _layout([[column.name for column in COLUMNS], *(cells for _, cells in rows)], width)
    parts: list[RenderableType] = []
    for model, group in groupby(rows, lambda row: _model(row[0])):
        if parts:
            parts.append(Text())
        parts.append(Text(f"model {plain(model)}", style="bold"))
        parts.append(_line([Text(column.name, style="bold") for column in COLUMNS], widths, gap))
        for worker, cells in group:
            texts = [
                Text(cell, _style(cell) if column is STATE else "") for column, cell in zip(COLUMNS, cells, strict=True)
            ]
            parts.append(_line(texts, widths, gap))
            if reason := _reason(worker):
                parts.append(Padding(Text(plain(reason)), (0, 0, 0, REASON_INDENT), expand=False))
    return Group(*parts)


def wide_table(workers: Sequence[Row]) -> Table:
    """Return a table with all columns and one row for each worker; the reason is the last column."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in WIDE_COLUMNS:
        table.add_column(name, justify="right" if name in RIGHT else "left", overflow="fold")
    for worker in workers:
        standing = _standing(worker, None)
        table.add_row(
            text(worker_name(worker)),
            text(worker["model"]),
            text(worker.get("role")),
            Text(plain(standing), _style(standing)),
            text(worker["seq"]),
            text(_blocks(worker["residency"], str)),
            text(worker["catalog_source"]),
            text(worker["hash_scheme"]),
            _lag(worker["lag_ms"]),
            text(worker["gaps"]),
            _reuse(worker),
            text((worker.get("tokens") or {}).get("way")),
            text(worker.get("source")),
            text(worker["url"]),
            text(_reason(worker)),
        )
    return table


def _key(worker: Row) -> tuple[str, str, int]:
    return _model(worker), worker["worker_id"], worker["dp_rank"]


def _model(worker: Row) -> str:
    return str(worker["model"])


def _cells(worker: Row, load: Row | None) -> list[str]:
    return [
        plain(worker_name(worker)),
        plain(_standing(worker, load)),
        plain(_blocks(worker["residency"], short_number)),
        UNKNOWN if load is None else str(load["active_requests"]),
        UNKNOWN if load is None else short_number(load["potential_prefill_tokens"]),
        _reuse(worker),
        _lag(worker["lag_ms"]),
    ]


def _layout(rows: Sequence[Sequence[str]], width: int) -> tuple[list[int], int]:
    """Return the width of each column and the gap between them.

    A column is as wide as its longest cell, or narrower if all columns together are wider than `width`.
    """
    widths = [max(map(cell_len, cells)) for cells in zip(*rows, strict=True)]
    room = [width - gap * (len(widths) - 1) for gap in GAPS]
    gap = next((gap for gap, left in zip(GAPS, room, strict=True) if sum(widths) <= left), GAPS[-1])
    excess = sum(widths) - room[-1]
    while excess > 0:
        # The widest column shrinks first, so that a long name takes its room from itself.
        widest = max((at for at, column in enumerate(COLUMNS) if column.folds), key=lambda at: widths[at])
        if widths[widest] <= MIN_WIDTH:
            break
        widths[widest] -= 1
        excess -= 1
    return widths, gap


def _line(cells: Sequence[Text], widths: Sequence[int], gap: int) -> Table:
    grid = Table.grid(padding=(0, gap, 0, 0))
    for column, width in zip(COLUMNS, widths, strict=True):
        grid.add_column(justify="right" if column.name in RIGHT else "left", width=width, overflow="fold")
    grid.add_row(*cells)
    return grid


def _standing(worker: Row, load: Row | None) -> str:
    """Return the state of the worker's stream, and whether it drains, its breaker is open, or it is saturated."""
    state = str(worker["state"])
    if worker.get("draining"):
        return f"{state}, {DRAINING}"
    if _breaker(worker):
        return f"{state}, {BREAKER_OPEN}"
    return f"{state}, {SATURATED}" if load is not None and load["saturated"] else state


def _style(standing: str) -> str:
    return next((style for word, style in STYLES if word in standing.split(", ")), ON_ITS_WAY)


def _breaker(worker: Row) -> str:
    """Return why the worker's breaker admits no requests; "" if the state already implies that."""
    return "" if worker.get("draining") or worker["state"] == DOWN else str(worker.get("closed") or "")


def _reason(worker: Row) -> str:
    return "; ".join(filter(None, (_breaker(worker), worker["reason"]))) or str(worker.get("predictions") or "")


def _blocks(residency: dict[str, int], format_count: Callable[[int], str]) -> str:
    """Return the blocks of all groups as text, by medium."""
    media: dict[str, int] = {}
    for place, count in residency.items():
        medium = place.split(":")[1] if ":" in place else place
        media[medium] = media.get(medium, 0) + count
    return " ".join(f"{medium}:{format_count(count)}" for medium, count in media.items())


def _reuse(worker: Row) -> str:
    """Return the tokens predicted to be reused, and those that the engine reported as reused."""
    reuse = worker.get("reuse")
    if reuse is None:
        return UNKNOWN
    return f"{short_number(reuse['predicted_tokens'])}/{short_number(reuse['delivered_tokens'])}"


def _lag(lag_ms: float | None) -> str:
    if lag_ms is None:
        return UNKNOWN
    return f"{lag_ms:.1f} ms" if lag_ms < MS_PER_S else f"{lag_ms / MS_PER_S:.1f} s"
