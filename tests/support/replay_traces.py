# SPDX-License-Identifier: Apache-2.0
"""Small request traces for replays: conversations of several turns that share the beginning of their prompts."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from kvrouter.replay.traces.request import Request, Trace

PIECE_TOKENS = 512


def conversation_rows(requests: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return rows in the form of Mooncake's traces: turns of several conversations, mixed, one every half second."""
    rng = random.Random(seed)
    next_id = 1
    talks: list[list[int]] = []
    rows = []
    for number in range(requests):
        if not talks or rng.random() < 0.3:
            talks.append([0])
        talk = rng.choice(talks[-12:])
        more = rng.randint(1, 20)
        talk += range(next_id, next_id + more)
        next_id += more
        rows.append(
            {
                "timestamp": number * 500,
                "input_length": len(talk) * PIECE_TOKENS - rng.randint(0, 400),
                "output_length": rng.randint(1, 300),
                "hash_ids": list(talk),
            }
        )
    return rows


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def small_trace(*prompts: tuple[float, list[int]], output_tokens: int = 4) -> Trace:
    """Return a trace with a request for each prompt, given as (seconds, ids of whole pieces)."""
    requests = [
        Request(time_s, len(ids) * PIECE_TOKENS, output_tokens, np.array(ids, np.uint64)) for time_s, ids in prompts
    ]
    return Trace("small", "mooncake", PIECE_TOKENS, requests)
