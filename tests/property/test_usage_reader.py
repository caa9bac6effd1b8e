# SPDX-License-Identifier: Apache-2.0
"""The usage that an engine's answer reports, read as it passes: however the bytes are cut, whatever its text contains."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.router.observe.quality.usage_reader import MAX_CANDIDATES, MAX_USAGE_BYTES, Usage, UsageReader

counts = st.integers(0, 2**31)
# Events and comments without a usage that counts.
ZEROS = {"prompt_tokens": 0, "total_tokens": 0, "completion_tokens": 0, "prompt_tokens_details": {"cached_tokens": 0}}
WITHOUT_USAGE = (
    ': ping {"usage": {}}',
    ': "usage": {"prompt_tokens": 9, "completion_tokens": 9}',
    ': a comment that is longer than what is kept of the last bytes: {"usage": {"prompt_tokens": 9}}',
    'data: {"usage": {}}',
    'data: {"usage": null}',
    f'data: {{"usage": {json.dumps(ZEROS)}}}',
    'data: {"usage": {"input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 3}}',
)
# Texts that look like usage.
texts = st.lists(
    st.sampled_from(
        ['"usage":{"prompt_tokens":9}', "\ndata: x", "data:", "usage", "\\", '"', "ä", "[DONE]", "{", "\r\n"]
    )
).map("".join)


@st.composite
def usages(draw: st.DrawFn) -> tuple[dict[str, Any], Usage]:
    """Draw a usage object as an engine writes it, and the usage that it states."""
    prompt, completion, cached = draw(counts) + 1, draw(st.none() | counts), draw(st.none() | counts)
    if cached is not None and draw(st.booleans()):
        # Anthropic counts tokens that are read from the cache, and written to it, separately.
        written = draw(st.none() | counts)
        messages = {"input_tokens": prompt, "cache_creation_input_tokens": written, "cache_read_input_tokens": cached}
        return messages | {"output_tokens": completion}, Usage(prompt + cached + (written or 0), completion, cached)
    responses = draw(st.booleans())
    names = ("input_tokens", "output_tokens") if responses else ("prompt_tokens", "completion_tokens")
    body: dict[str, Any] = {names[0]: prompt, "total_tokens": prompt, names[1]: completion}
    details = draw(st.sampled_from(["absent", "null", "object"]))
    if details == "object" or cached is not None:
        body[names[0] + "_details"] = {"audio_tokens": None, "cached_tokens": cached}
    elif details == "null":
        body[names[0] + "_details"] = None
    return body, Usage(prompt, completion, cached)


@st.composite
def cuts(draw: st.DrawFn, raw: bytes) -> list[list[bytes]]:
    """Draw reads of some parts each, which together are `raw`."""
    ends = sorted(draw(st.lists(st.integers(0, len(raw)), max_size=12)))
    pieces = [raw[a:b] for a, b in zip([0, *ends], [*ends, len(raw)], strict=True)]
    reads: list[list[bytes]] = [[]]
    for piece in pieces:
        if draw(st.booleans()):
            reads.append([])
        reads[-1].append(piece)
    return reads


def read(reads: list[list[bytes]]) -> tuple[Usage | None, int, int]:
    """Feed the reads to a reader; return the usage, the events, and the events that began."""
    reader = UsageReader(streams=True)
    begun = sum(reader.feed(parts) for parts in reads)
    return reader.usage(), reader.events, begun


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, Usage | None, int]:
    """Draw a stream, its usage, and the number of its events before the end marker."""
    end = draw(st.sampled_from(["\n\n", "\r\n\r\n"]))
    usage: Usage | None = None
    parts = []
    texts_ = draw(st.lists(texts, max_size=6))
    with_usage = draw(st.sampled_from(["never", "null", "each", "last"]))
    for text in texts_:
        event: dict[str, Any] = {"choices": [{"delta": {"content": text}}]}
        if with_usage == "null":
            event["usage"] = None
        elif with_usage == "each":
            event["usage"], usage = draw(usages())
        parts.append("data: " + json.dumps(event, ensure_ascii=draw(st.booleans())) + end)
        if draw(st.booleans()):
            parts.append(draw(st.sampled_from([": ping", *WITHOUT_USAGE[:3]])) + end)
    if with_usage == "last":
        body, usage = draw(usages())
        parts.append("data: " + json.dumps({"choices": [], "usage": body}) + end)
    events = len(texts_) + (with_usage == "last")
    if draw(st.booleans()):
        parts.append("data: [DONE]" + end)
    return "".join(parts).encode(), usage, events


@given(data=st.data())
def test_a_stream_is_read_alike_however_it_is_cut(data: st.DataObject) -> None:
    raw, expected, events = data.draw(streams())
    usage, counted, begun = read(data.draw(cuts(raw)))
    assert (usage, counted) == (expected, events)
    assert begun >= counted


@given(data=st.data())
def test_a_whole_answer_is_read_alike_however_it_is_cut(data: st.DataObject) -> None:
    body, expected = data.draw(usages())
    answer = {
        "choices": [{"message": {"content": data.draw(texts)}}],
        "tools": [{"parameters": {"properties": {"usage": {"type": "object"}}}}],
        "usage": body,
        "prompt_logprobs": [0.5] * data.draw(st.sampled_from([0, 10, 2_000])),
    }
    raw = json.dumps(answer, indent=data.draw(st.sampled_from([None, 2]))).encode()
    assert read(data.draw(cuts(raw)))[0] == expected


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"])
@pytest.mark.parametrize("done", ["", "data: [DONE]"])
@pytest.mark.parametrize("after", ["", *WITHOUT_USAGE])
def test_the_last_usage_that_counts_is_read_wherever_the_stream_is_cut(end: str, done: str, after: str) -> None:
    first, last = usage_event(7), usage_event(99)
    # As many candidates as may follow the last usage that counts, and more comments.
    tail = [after + end] * (MAX_CANDIDATES - 1 if after.startswith("data") else MAX_CANDIDATES + 1)
    if not after:
        tail = []
    raw = "".join([": keep-alive" + end, first + end, 'data: {"usage": null}' + end, last + end, *tail]).encode()
    raw += (done + end).encode() if done else b""
    events = 3 + len(tail) * after.startswith("data")
    expected = (Usage(99, 4, 96), events)
    for at in range(len(raw) + 1):
        assert read([[raw[:at]], [raw[at:]]])[:2] == expected, raw[:at]
    assert read([[raw[at : at + 1]] for at in range(len(raw))])[:2] == expected


def usage_event(prompt_tokens: int) -> str:
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 96}}
    return "data: " + json.dumps({"choices": [], "usage": usage})


def test_a_line_of_an_answer_that_is_no_stream_is_no_comment() -> None:
    raw = b'{"usage"\n:{"prompt_tokens": 3, "x": 1}, "y"\n: {"usage": {"prompt_tokens": 4}}}'
    reader = UsageReader(streams=False)
    reader.feed([raw])
    assert reader.usage() == Usage(4)


@given(st.lists(st.binary(max_size=60) | st.sampled_from([b'"usage"', b'"usage":{', b"{}", b'{"prompt_tokens":'])))
def test_whatever_comes_nothing_breaks(parts: list[bytes]) -> None:
    assert read([parts])[:2] == read([[part] for part in parts])[:2] == read([[b"".join(parts)]])[:2]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b'"usage":null',
        b'"usage":{"prompt_tokens":"9"}',
        b'"usage":{"prompt_tokens":true}',
        b'"usage":{"prompt_tokens":-1}',
        b'"usage":{"prompt_tokens":0,"completion_tokens":5}',
        b'"usage":{"input_tokens":0,"cache_creation_input_tokens":0,"cache_read_input_tokens":0}',
        b': "usage":{"prompt_tokens":1}',
        b'"usage":{"prompt_tokens":1e3}',
        b'"usage":{"completion_tokens":1}',
        b'"usage":{"prompt_tokens":' + b"9" * 4_000 + b"}",
        b'"usage":' + b'{"a":' * 2_000,
        b'"usage":{"a":' + b"[" * 4_000,
        b'"usage":{"pad":"' + b"x" * MAX_USAGE_BYTES + b'","prompt_tokens":1}',
        b'\\"usage\\":{"prompt_tokens":1}',
        b"\x1f\x8b\x08\x00garbage",
    ],
)
def test_what_is_no_usage_is_none(raw: bytes) -> None:
    assert read([[raw]])[0] is None


def test_the_last_usage_counts_also_behind_what_only_has_its_name() -> None:
    raw = b'{"usage":{"prompt_tokens":1},"usage":{"prompt_tokens":2},"x":{"usage":{"type":"object"}},"usage":null}'
    assert read([[raw]])[0] == Usage(2)


@given(st.data())
def test_sglangs_meta_info_is_read_however_it_is_cut(data: st.DataObject) -> None:
    events = [
        {
            "text": "x" * number + data.draw(texts),
            "output_ids": list(range(number)),
            "meta_info": {
                "id": "a",
                "finish_reason": {"type": "length", "length": number},
                "prompt_tokens": 9,
                "completion_tokens": number,
                "cached_tokens": 4,
                "cached_tokens_details": {"device": 4, "host": 0},
            },
        }
        for number in range(1, data.draw(st.integers(1, 5)) + 1)
    ]
    raw = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    reader = UsageReader(streams=True, key=b'"meta_info"')
    for parts in data.draw(cuts(raw.encode())):
        reader.feed(parts)
    assert (reader.usage(), reader.events) == (Usage(9, len(events), 4), len(events))
    other = UsageReader(streams=True)
    other.feed([raw.encode()])
    assert other.usage() is None


def test_what_is_kept_is_bounded() -> None:
    reader = UsageReader(streams=True)
    for _ in range(100):
        reader.feed([b'"usage":{' + b"x" * 10_000])
    kept = [*reader._candidates, reader._value or b"", reader._tail]
    assert sum(map(len, kept)) <= 5 * MAX_USAGE_BYTES + 100


def test_every_cut_and_all_of_them_are_the_same() -> None:
    raw = b'data: {"x": 1}\r\n\r\ndata: {"usage": {"prompt_tokens": 7, "completion_tokens": 3}}\n\ndata: [DONE]\n\n'
    expected = (Usage(7, 3), 2, 3)
    assert read([[raw]]) == expected
    assert read([[raw[i : i + 1]] for i in range(len(raw))]) == expected
    assert all(read([[raw[:cut]], [raw[cut:]]]) == expected for cut in range(len(raw)))


@given(st.data())
def test_an_engines_error_within_a_stream_is_found_however_it_is_cut(data: st.DataObject) -> None:
    code = data.draw(st.sampled_from([None, 400, 404, 499, 500, 503]))
    error = {"error": {"message": data.draw(texts) + '"code": 500', "type": "x", "code": code}}
    events: list[dict[str, Any]] = [
        {"choices": [{"delta": {"content": text}}]} for text in data.draw(st.lists(texts, max_size=4))
    ]
    if data.draw(st.booleans()):
        events.append(error)
    else:
        # An answer may quote an error event as text.
        events.append({"choices": [{"delta": {"content": "\ndata: " + json.dumps(error)}}]})
        code = None
    raw = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    reader = UsageReader(streams=True)
    for parts in data.draw(cuts(raw.encode())):
        reader.feed(parts)
    assert reader.failed == (code is not None and code >= 500)
