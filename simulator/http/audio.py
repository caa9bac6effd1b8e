# SPDX-License-Identifier: Apache-2.0
"""Answers to audio in the shapes of vLLM 0.32.0. A recording counts as a prompt whose tokens follow from its length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvrouter.simulator.cache import tokenizer
from kvrouter.simulator.http.replies import DONE

# 16 kHz WAV has 32 kB a second; Whisper makes 50 tokens of a second.
BYTES_PER_SECOND = 32_000
BYTES_PER_TOKEN = BYTES_PER_SECOND // 50
ANSWER_TOKENS = 8


def reply(text: str, size_bytes: int) -> dict[str, Any]:
    """Return a whole transcription."""
    return {"text": text, "usage": {"type": "duration", "seconds": -(-size_bytes // BYTES_PER_SECOND)}}


def stream(request_id: str, model: str, created: int, tokens: Sequence[int]) -> bytes:
    """Return a transcription as a stream of events, one for each token."""
    head = {"id": f"trsc-{request_id}", "object": "transcription.chunk", "created": created, "model": model}
    events = []
    for number, token in enumerate(tokens, 1):
        finish = "stop" if number == len(tokens) else None
        choice = {"delta": {"content": tokenizer.decode((token,))}, "finish_reason": finish, "stop_reason": None}
        events.append(b"data: " + msgspec.json.encode(head | {"choices": [choice]}) + b"\n\n")
    return b"".join([*events, DONE])
