# SPDX-License-Identifier: Apache-2.0
"""Tables and lines made of the API's answers: values as cells, and the candidates of a choice.

Pure: decoded JSON in, text out.
"""

from __future__ import annotations

import textwrap
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.markup import escape
from rich.text import Text

from kvrouter.contract.choices import CostTerms
from kvrouter.contract.tiers import TIERS
from kvrouter.router.base.common.escaping import masked

UNKNOWN = "-"
# All digits of smaller numbers are shown.
WHOLE_MAX = 10_000
UNITS = (("G", 1_000_000_000), ("M", 1_000_000), ("k", 1_000))
# A scaled value from here on is shown without a digit behind the point.
HUNDRED = 100

# The columns of candidates that contain text. All other columns contain numbers and are aligned to the right.
LEFT_COLUMNS = ("", "WORKER", "STATE")
# The hit with the blocks of a source, and the source. Only shown if a candidate has one.
PEER_COLUMN = "+PEER"
COLUMN_GAP = "  "
# The terms of a cost (`CostTerms`) that are subtracted.
SUBTRACTED_TERMS = ("copy", "junction", "session")
# The columns before COST show these terms.
COLUMN_TERMS = ("prefill", "queued", "decode")
# A reason is printed below its row with this indent.
REASON_INDENT = 4
# Text is not folded more narrowly than this, because lines would then consist of single words.
MIN_READING_WIDTH = 40


def plain(value: Any) -> str:
    """Return a value as text without control characters; `-` if it is unknown."""
    if value is None or value == "":
        return UNKNOWN
    return masked(str(value))


def text(value: Any) -> str:
    """Return a value like `plain`, escaped for a cell that may have markup."""
    return escape(plain(value))


def short_number(value: int) -> str:
    """Return a number like `812`, `62.5k` or `1.2M`: three digits of large ones."""
    if value < WHOLE_MAX:
        return str(value)
    unit, size = next((unit, size) for unit, size in UNITS if value >= size)
    scaled = value / size
    return f"{scaled:.0f}{unit}" if scaled >= HUNDRED else f"{scaled:.1f}{unit}"


def share(part: int, whole: int) -> str:
    """Return a part as a percentage of the whole; `-` if the whole is 0."""
    return f"{100 * part / whole:.0f}%" if whole else UNKNOWN


def outcome_line(answer: dict[str, Any]) -> str:
    """Return a line about the outcome of a decision, and about the attempts before it."""
    outcome = answer["outcome"]
    if outcome is None:
        line = "no outcome: the request runs, or the choice was made without one"
    else:
        values = (
            ("predicted", outcome["predicted_tokens"], "tokens"),
            ("reused", outcome["delivered_tokens"], "tokens"),
            ("fetched", outcome.get("fetched_tokens"), "tokens"),
            ("generated", outcome["completion_tokens"], "tokens"),
            ("first token after", outcome["ttft_s"] and round(outcome["ttft_s"], 3), "s"),
            ("over after", round(outcome["e2e_s"], 3), "s"),
        )
        facts = (f"{label} {value} {unit}" for label, value, unit in values if value is not None)
        line = f"outcome: {text(outcome['outcome'])}; {', '.join(facts)}"
    if earlier := answer.get("earlier"):
        line += f"; attempts before it: {', '.join(map(text, earlier))}"
    return line


def pull_line(pull: dict[str, Any]) -> str:
    """Return a line about the blocks that the chosen worker fetches."""
    return (
        f"fetches {pull['fetched_tokens']} tokens from {text(worker_name(pull))}, waits {pull['timeout_s']:g} s at most"
    )


def prompts_text(answer: dict[str, Any]) -> str:
    """Return the numbers of prompts and answers of a decision as part of a line, or "" for one of each."""
    prompts, answers = answer.get("num_prompts", 1), answer.get("answers", 1)
    text = f" of {prompts} prompts" if prompts > 1 else ""
    return f"{text}, {answers} answers{' to each' if text else ''}" if answers > 1 else text


def candidates_text(answer: dict[str, Any], num_tokens: int, width: int) -> Text:
    """Return the candidates in an explained choice as a table, with the chosen one marked; counts are in tokens.

    The reason that limits a candidate's hit is below its row, folded at `width`, followed by the terms of its cost if the
    columns do not show all of them.
    """
    peer_heading = (PEER_COLUMN,) if any("peer" in candidate for candidate in answer["candidates"]) else ()
    rows = [("", "WORKER", *[tier.heading for tier in TIERS], *peer_heading, "UNCACHED", "LOAD", "COST", "STATE")]
    chosen = (answer["worker_id"], answer["dp_rank"])
    for candidate in answer["candidates"]:
        overlap = candidate["overlap"]
        values = (
            ">" if (candidate["worker_id"], candidate["dp_rank"]) == chosen else " ",
            worker_name(candidate),
            *[overlap[tier.name] for tier in TIERS],
            *[_peer(candidate.get("peer")) for _ in peer_heading],
            num_tokens - overlap["longest_matched"],
            *[candidate[name] for name in ("load", "cost", "state")],
        )
        rows.append(tuple(map(plain, values)))
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    lines = [
        COLUMN_GAP.join(
            (" " * (width - cell_len(cell)) + cell) if name not in LEFT_COLUMNS else set_cell_size(cell, width)
            for name, cell, width in zip(rows[0], row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]
    indent = " " * REASON_INDENT
    text = Text(lines[0], "bold")
    for line, candidate in zip(lines[1:], answer["candidates"], strict=True):
        reasons = [
            reason_line
            for reason in filter(None, (_limit(candidate), _terms(candidate["parts"])))
            for reason_line in textwrap.wrap(
                plain(reason),
                max(width, MIN_READING_WIDTH),
                initial_indent=indent,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
        ]
        text.append("\n".join(["", line, *reasons]), "not bold")
    return text


def tokens_line(tokens: dict[str, Any]) -> str:
    """Return a line with the number of a text's tokens, their source, and how many are known."""
    known, whole = tokens["known_tokens"], tokens["num_tokens"]
    count = f"{whole} tokens" if known == whole else f"about {whole} tokens, {known} of them known"
    problem = f": {text(tokens['problem'])}" if tokens["problem"] else ""
    return f"{count} (source: {text(tokens['source'])}){problem}"


def worker_name(worker: dict[str, Any]) -> str:
    """Return the worker's name: `w0`, or `w0@3` for a rank other than 0."""
    rank = worker["dp_rank"]
    return f"{worker['worker_id']}@{rank}" if rank else str(worker["worker_id"])


def _peer(peer: dict[str, Any] | None) -> str | None:
    """Return the tokens that a worker would reuse with a source, and the source; None without one."""
    return None if peer is None else f"{peer['tokens']} ({worker_name(peer)})"


def _limit(candidate: dict[str, Any]) -> str:
    limit = candidate.get("limited_by")
    reason = str(candidate.get("reason") or "")
    if limit is None:
        return reason
    group = "" if limit["group_idx"] is None else f"group {limit['group_idx']} "
    return f"{group}({limit['kind']}): {limit['why']}" + (f"; {reason}" if reason else "")


def _terms(parts: dict[str, int]) -> str:
    """Return the terms of a cost as text, or "" if the columns show all of them."""
    terms = [(name, parts[name]) for name in CostTerms.__struct_fields__ if parts[name]]
    if all(name in COLUMN_TERMS for name, _ in terms):
        return ""
    return "cost: " + ", ".join(f"{name} {-tokens if name in SUBTRACTED_TERMS else tokens}" for name, tokens in terms)
