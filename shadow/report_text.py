# SPDX-License-Identifier: Apache-2.0
"""The counters as one line, and the report as text that fits 80 columns. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap

from kvrouter.router.base.common.escaping import masked
from kvrouter.shadow.tally import Report, WorkerRow

COLUMNS = 80
MAX_WORKER_CHARS = 20
# Workers in the table; `--json` has all.
MAX_ROWS = 32
# If at least this share of predictions covers the whole prompt, the log may be written after the requests were served.
WHOLE_SHARE = 0.1
ROW = "{:<20} {:>9} {:>14} {:>14} {:>14}"


def counters_line(report: Report) -> str:
    """Return the counters as one line for the terminal, while the run continues."""
    minutes, seconds = divmod(int(report.elapsed_s), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [f"{hours:02}:{minutes:02}:{seconds:02}  {report.judged_requests:,} judged"]
    if report.waiting_requests:
        parts.append(f"{report.waiting_requests:,} waiting")
    if report.skipped_requests:
        parts.append(f"{report.skipped_requests:,} not judged")
    placed, ours = report.placed, report.ours
    if placed.requests:
        share = _percent(placed.reused_tokens, placed.there_tokens)
        parts.append(f"reused {placed.reused_tokens:,} of {placed.there_tokens:,} there{share}")
    if report.unplaced.requests:
        parts.append(f"{report.unplaced.there_tokens:,} there, worker unknown")
    if ours.requests:
        parts.append(f"ours {ours.ours_tokens:,}")
    return ", ".join(parts)


def report_text(report: Report) -> str:
    """Return the report as text."""
    return "\n".join(
        [*_judged(report), *_table(report.workers), *_skipped(report), "", *wrap(report.sentence, COLUMNS)]
    )


def _judged(report: Report) -> Iterator[str]:
    placed, unplaced, ours, check = report.placed, report.unplaced, report.ours, report.check
    yield f"{report.judged_requests:,} requests judged in {report.elapsed_s:,.0f} s"
    if placed.requests:
        yield from wrap(
            f"where the worker is known: {placed.requests:,} requests, {placed.prompt_tokens:,} prompt tokens; reuse reported by "
            f"engines for {placed.reported_requests:,}, predicted by the index for "
            f"{placed.requests - placed.reported_requests:,}",
            COLUMNS,
        )
        yield _line("reused here", placed.reused_tokens, placed.prompt_tokens)
        yield _line("were there", placed.there_tokens, placed.prompt_tokens)
        yield f"  {'lost':<14} {placed.there_tokens - placed.reused_tokens:>16,}  of {placed.lost_requests:,} requests"
    if unplaced.requests:
        yield f"where it is not: {unplaced.requests:,} requests, {unplaced.prompt_tokens:,} prompt tokens"
        yield _line("were there", unplaced.there_tokens, unplaced.prompt_tokens)
    if ours.requests:
        yield f"what this router would have reused: {ours.requests:,} requests"
        yield _line("ours", ours.ours_tokens, ours.there_tokens, "of what was there")
        if ours.placed_requests and ours.placed_requests < ours.requests:
            remainder = f"{ours.placed_requests:,} of them, where your router reused {ours.reused_tokens:,}"
            yield from wrap(f"{ours.placed_ours_tokens:,} of that in the {remainder}", COLUMNS)
    if check.requests:
        yield from wrap(
            f"the index predicted {check.predicted_tokens:,} tokens where engines reported {check.reported_tokens:,}; equal in "
            f"{check.equal_requests:,} of {check.requests:,} requests",
            COLUMNS,
        )
    predicted = placed.requests - placed.reported_requests
    if report.whole_requests > WHOLE_SHARE * predicted:
        yield from wrap(
            f"note: by the index, the whole prompt was there where it went in {report.whole_requests:,} of {predicted:,} requests. "
            "It may be these requests themselves, if engines were done before the index was queried: then less was reused than "
            "this says. Log the engines' cached_tokens",
            COLUMNS,
        )


def _table(rows: list[WorkerRow]) -> Iterator[str]:
    if not rows:
        return
    yield ""
    yield ROW.format("WORKER", "REQUESTS", "REUSED", "LOST HERE", "UNUSED HERE")
    for row in rows[:MAX_ROWS]:
        name = masked(row.worker)
        name = name if len(name) <= MAX_WORKER_CHARS else f"{name[: MAX_WORKER_CHARS - 3]}..."
        numbers = (row.requests, row.reused_tokens, row.lost_tokens, row.unused_tokens)
        yield ROW.format(name, *(f"{number:,}" for number in numbers))
    if len(rows) > MAX_ROWS:
        yield f"... and {len(rows) - MAX_ROWS:,} more"


def _skipped(report: Report) -> Iterator[str]:
    if not report.skipped:
        return
    yield ""
    yield f"not judged: {report.skipped_requests:,}"
    for row in report.skipped:
        detail = f" (last: {row.detail})" if row.detail else ""
        yield from wrap(
            f"{row.requests:>9,}  {row.reason}: {row.text}{detail}",
            COLUMNS,
            drop_whitespace=True,
            subsequent_indent=" " * 11,
            break_long_words=True,
        )


def _line(name: str, tokens: int, whole: int, of: str = "of the prompts") -> str:
    share = f"{100 * tokens / whole:>6.1f} % {of}" if whole else ""
    return f"  {name:<14} {tokens:>16,}{share}"


def _percent(tokens: int, whole: int) -> str:
    return f" ({100 * tokens / whole:.0f} %)" if whole else ""
