# SPDX-License-Identifier: Apache-2.0
"""The reader of a trace returns requests that can be replayed, or one line that says what is wrong with the file."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.replay.traces.formats import AUTO, FORMATS, read_trace
from kvrouter.replay.traces.pieces import ID_BITS
from kvrouter.replay.traces.request import TraceError
from tests.support.examples import examples

GOOD = {
    "mooncake": '{"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}',
    "openai": '{"timestamp": 5, "messages": [{"role": "user", "content": "Hi"}], "usage": {"prompt_tokens": 9}}',
    "vllm": (
        "INFO 11-24 10:00:02 [logger.py:41] Received request cmpl-2: prompt: 'Hi', params: SamplingParams(max_tokens=5), "
        "prompt_token_ids: [1, 2, 3], lora_request: None."
    ),
}
FIELDS = (
    *("timestamp", "time", "created", "input_length", "output_length", "hash_ids", "messages", "prompt", "body"),
    *("usage", "max_tokens", "tools", "response"),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(("role", "content", "text")), inner),
    max_leaves=8,
)
objects = st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=6).map(json.dumps).map(str.encode)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """Draw a good line with a few of its bytes replaced, dropped or repeated."""
    line = bytearray(GOOD[draw(st.sampled_from(sorted(GOOD)))].encode())
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(line)))
        line[place : place + draw(st.integers(0, 6))] = draw(st.binary(max_size=6))
    return bytes(line)


@pytest.mark.property
@settings(max_examples=examples(600), deadline=None)
@given(
    st.lists(
        st.sampled_from([line.encode() for line in GOOD.values()]) | mutated() | objects | st.binary(), max_size=5
    ),
    st.sampled_from((AUTO, *FORMATS)),
)
def test_any_file_gives_requests_or_one_line(content: list[bytes], form: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        path.write_bytes(b"\n".join(content))
        try:
            trace = read_trace(path, form)
        except TraceError as error:
            assert "\n" not in error.message and len(error.message) < 500
            return
    assert trace.requests and trace.requests[0].time_s == 0
    times = [request.time_s for request in trace.requests]
    assert times == sorted(times)
    for request in trace.requests:
        assert request.prompt_tokens >= 1 and request.output_tokens >= 0
        assert len(request.pieces) * trace.piece_tokens >= request.prompt_tokens
        assert len(request.pieces) == 0 or int(request.pieces.max()) < 1 << ID_BITS
