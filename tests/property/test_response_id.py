# SPDX-License-Identifier: Apache-2.0
"""The id of a response, read as its answer passes: however the bytes are cut, whatever stands before and behind it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.router.observe.quality.response_id import MAX_HEAD_BYTES, ResponseIdReader

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | st.just("id"), inner, max_size=3),
    max_leaves=8,
)
# Fields before the id; objects within them may have ids of their own.
before = st.dictionaries(st.text(max_size=6).filter(lambda name: name not in ("id", "response")), values, max_size=3)
response_ids = st.text(min_size=1, max_size=40)


def read(reads: list[list[bytes]], *, streams: bool) -> tuple[list[str], int]:
    """Return the ids that were found, and how often the reader missed one."""
    found: list[str] = []
    missed: list[None] = []
    reader = ResponseIdReader(found.append, lambda: missed.append(None), streams=streams)
    for parts in reads:
        if reader.feed(parts):
            break
    return found, len(missed)


@given(st.data(), before, response_ids, before, st.booleans(), st.booleans(), st.sampled_from(["\n", "\r\n"]))
def test_the_id_is_found_wherever_the_bytes_are_cut(
    data: st.DataObject,
    first: dict[str, Any],
    response_id: str,
    last: dict[str, Any],
    streams: bool,
    spaced: bool,
    line_end: str,
) -> None:
    body: dict[str, Any] = {**first, "id": response_id, **last}
    if streams:
        body = {**first, "response": body, "type": "response.created"}
    text = json.dumps(body, separators=None if spaced else (",", ":"), ensure_ascii=spaced)
    if streams:
        text = f": ping{line_end}event: response.created{line_end}data: {text}{line_end}{line_end}data: {{}}{line_end}"
    raw = text.encode("utf-8", "surrogatepass")
    ends = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    pieces = [raw[a:b] for a, b in zip([0, *ends], [*ends, len(raw)], strict=True)]
    assert read([[piece] for piece in pieces], streams=streams) == ([response_id], 0)


@pytest.mark.parametrize(
    ("raw", "streams"),
    [
        (b'{"error":{"id":"x"}}', False),
        (b"[1]", False),
        (b'{"id":7}', False),
        (b'{"object":"list"}', False),
        (b'data: {"error":{"message":"a"}}\n\n', True),
        (b'data: {"response":{"object":"response"},"id":"x"}\n\n', True),
        (b"data: [DONE]\n\n", True),
        (b'{"output":"' + b"x" * MAX_HEAD_BYTES + b'","id":"resp_1"}', False),
    ],
)
def test_an_answer_without_an_id_at_its_beginning_is_missed_once(raw: bytes, streams: bool) -> None:
    assert read([[raw[:40]], [raw[40:]], [b"more"]], streams=streams) == ([], 1)


def test_a_reader_keeps_no_more_than_the_head() -> None:
    reader = ResponseIdReader(lambda found: None, lambda: None, streams=True)
    for _ in range(100):
        reader.feed([b": ping\n" * 1_000])
    assert len(reader._head) == MAX_HEAD_BYTES
