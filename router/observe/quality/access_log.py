# SPDX-License-Identifier: Apache-2.0
"""The access log: one line for each proxied request, once it is over. Off by default.

A line contains no text of a prompt, only the hashes of its pieces. A reader who knows a prompt can see that it was
sent, and `kvrouter replay` can see which parts prompts share.
"""

from __future__ import annotations

import logging
from typing import Any

from kvrouter.router.index.matching.piece_names import piece_names
from kvrouter.router.index.matching.question import Question
from kvrouter.router.observe.quality.reuse_report import ReuseReport

LOGGER = "kvrouter.access"
MESSAGE = "request"

# The same size as in published traces: a prompt of 12,000 tokens has 24 pieces.
PIECE_TOKENS = 512
# `kvrouter replay` multiplies ids, and JSON's numbers are exact up to this size.
ID_BITS = 52

log = logging.getLogger(LOGGER)


def set_up_access_log(*, wanted: bool) -> None:
    """Turn the access log on or off. Its lines go where all lines go, whatever level is set for those."""
    log.setLevel(logging.INFO if wanted else logging.CRITICAL)


def pieces_of(question: Question) -> list[int]:
    """Return the ids of the prompt's pieces, all below 2**52; empty if not all tokens are known.

    Each id is chained over the pieces before it. The last piece is the rest of the prompt.
    """
    if question.token_ids is None or len(question.token_ids) != question.num_tokens:
        return []
    return [name >> (64 - ID_BITS) for name in piece_names(question, PIECE_TOKENS, with_rest=True)]


def list_fields(question: Question) -> dict[str, Any]:
    """Return the fields of a list: the number of its prompts, and the length and pieces of each that was looked up."""
    return {
        "num_prompts": question.num_prompts,
        "prompts": [[part.num_tokens, pieces_of(part)] for part in question.parts],
    }


def write_line(fields: dict[str, Any], pieces: list[int], report: ReuseReport | None, e2e_s: float) -> None:
    """Write the line of one request.

    Args:
        fields: Names and values with which the line begins.
        pieces: The ids of the prompt's pieces.
        report: The facts about reuse and latency; None if there was no answer.
        e2e_s: The duration of the request, used if there is no report.
    """
    facts = {"e2e_s": e2e_s} if report is None else report.fields()
    log.info(MESSAGE, extra=fields | {name: _rounded(value) for name, value in facts.items()} | {"pieces": pieces})


def _rounded(value: float | None) -> float | None:
    return round(value, 6) if isinstance(value, float) else value
