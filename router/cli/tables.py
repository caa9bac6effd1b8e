# SPDX-License-Identifier: Apache-2.0
"""Answers of the API as tables. Pure: decoded JSON in, rich tables out."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.table import Table

UNKNOWN = "-"
DOWN = "down"


def text(value: Any) -> str:
    """A value for a cell: `-` for what is not known, no control characters, no markup."""
    if value is None or value == "":
        return UNKNOWN
    return escape("".join(c if c.isprintable() else "?" for c in str(value)))


def workers_table(workers: list[dict[str, Any]]) -> Table:
    """One row a worker. `blocks` are those of all groups, by medium."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in (
        "WORKER",
        "MODEL",
        "ROLE",
        "STATE",
        "SEQ",
        "BLOCKS",
        "CATALOG",
        "HASHES",
        "LAG",
        "GAPS",
        "TOKENS",
        "SOURCE",
        "URL",
        "REASON",
    ):
        table.add_column(name, justify="right" if name in ("SEQ", "LAG", "GAPS") else "left", overflow="fold")
    for worker in workers:
        lag = worker["lag_ms"]
        table.add_row(
            text(worker_name(worker)),
            text(worker["model"]),
            text(worker.get("role")),
            text(_standing(worker)),
            text(worker["seq"]),
            text(_blocks(worker["residency"])),
            text(worker["catalog_source"]),
            text(worker["hash_scheme"]),
            UNKNOWN if lag is None else f"{lag:.1f} ms",
            text(worker["gaps"]),
            text((worker.get("tokens") or {}).get("way")),
            text(worker.get("source")),
            text(worker["url"]),
            text(_reason(worker)),
        )
    return table


def candidates_table(answer: dict[str, Any], num_tokens: int) -> Table:
    """One row a candidate of `/select` with `explain`, the chosen one marked; counts in tokens."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "WORKER", "GPU", "+CPU", "+DISK", "UNCACHED", "LOAD", "COST", "STATE", "LIMITED BY"):
        left = name in ("", "WORKER", "STATE", "LIMITED BY")
        table.add_column(name, justify="left" if left else "right", overflow="fold")
    chosen = (answer["worker_id"], answer["dp_rank"])
    for candidate in answer["candidates"]:
        overlap = candidate["overlap"]
        table.add_row(
            ">" if (candidate["worker_id"], candidate["dp_rank"]) == chosen else "",
            text(worker_name(candidate)),
            text(overlap["gpu"]),
            text(overlap["cpu"]),
            text(overlap["disk"]),
            text(num_tokens - overlap["disk"]),
            text(candidate["load"]),
            text(candidate["cost"]),
            text(candidate["state"]),
            text(_limit(candidate)),
        )
    return table


def tokens_line(tokens: dict[str, Any]) -> str:
    """How many tokens a text has, their source, and how many are unknown."""
    known, whole = tokens["known_tokens"], tokens["num_tokens"]
    count = f"{whole} tokens" if known == whole else f"about {whole} tokens, {known} of them known"
    problem = f": {text(tokens['problem'])}" if tokens["problem"] else ""
    return f"{count} (source: {text(tokens['source'])}){problem}"


def worker_name(worker: dict[str, Any]) -> str:
    """`w0`, or `w0@3` for another rank than 0."""
    rank = worker["dp_rank"]
    return f"{worker['worker_id']}@{rank}" if rank else str(worker["worker_id"])


def _standing(worker: dict[str, Any]) -> str:
    """The state of its stream, and whether it drains or its breaker is open."""
    state = str(worker["state"])
    if worker.get("draining"):
        return f"{state}, draining"
    return f"{state}, breaker open" if _breaker(worker) else state


def _breaker(worker: dict[str, Any]) -> str:
    """Why its breaker admits no requests; empty if its state says that already."""
    return "" if worker.get("draining") or worker["state"] == DOWN else str(worker.get("closed") or "")


def _reason(worker: dict[str, Any]) -> str:
    return "; ".join(filter(None, (_breaker(worker), worker["reason"]))) or str(worker.get("predictions") or "")


def _blocks(residency: dict[str, int]) -> str:
    media: dict[str, int] = {}
    for place, count in residency.items():
        medium = place.split(":")[1] if ":" in place else place
        media[medium] = media.get(medium, 0) + count
    return " ".join(f"{medium}:{count}" for medium, count in media.items())


def _limit(candidate: dict[str, Any]) -> str:
    limit = candidate.get("limited_by")
    reason = str(candidate.get("reason") or "")
    if limit is None:
        return reason
    group = "" if limit["group_idx"] is None else f"group {limit['group_idx']} "
    return f"{group}({limit['kind']}): {limit['why']}" + (f"; {reason}" if reason else "")
