# SPDX-License-Identifier: Apache-2.0
"""Readers of traces: the fields of each format, its recognition, and the messages for broken lines."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvrouter.replay.traces import formats
from kvrouter.replay.traces.formats import AUTO, read_trace, recognised
from kvrouter.replay.traces.pieces import pieces_of_text, pieces_of_tokens
from kvrouter.replay.traces.reader import ReadOptions
from kvrouter.replay.traces.request import Trace, TraceError
from tests.support.replay_traces import conversation_rows, write_rows

ROW = {"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}


def read(path: Path, form: str = AUTO, **options: Any) -> Trace:
    name = recognised(path) if form == AUTO else form
    reading = ReadOptions(options.pop("piece_tokens", formats.FORMATS[name].piece_tokens))
    requests = options.pop("requests", 0)
    for option, value in options.items():
        setattr(reading, option, value)
    return read_trace(path, name, reading, requests=requests)


def lines(path: Path, *found: Any) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in found))
    return path


# -- Mooncake


def test_a_mooncake_trace_is_read_as_it_is(tmp_path: Path) -> None:
    rows = conversation_rows(20)
    trace = read(write_rows(tmp_path / "t.jsonl", rows))
    assert (trace.format, trace.piece_tokens, trace.notes) == ("mooncake", 512, ())
    assert [request.prompt_tokens for request in trace.requests] == [row["input_length"] for row in rows]
    assert [request.pieces.tolist() for request in trace.requests] == [row["hash_ids"] for row in rows]
    assert trace.span_s == rows[-1]["timestamp"] / 1000


def test_requests_come_in_the_order_of_their_times_from_second_0(tmp_path: Path) -> None:
    rows = [ROW | {"timestamp": at, "output_length": at} for at in (9000, 4000, 6000, 4000)]
    trace = read(lines(tmp_path / "t", *rows))
    assert [(request.time_s, request.output_tokens) for request in trace.requests] == [
        (0, 4000),
        (0, 4000),
        (2, 6000),
        (5, 9000),
    ]


def test_only_the_first_requests_are_read(tmp_path: Path) -> None:
    trace = read(lines(tmp_path / "t", ROW, ROW, "no JSON"), "mooncake", requests=2)
    assert len(trace.requests) == 2


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "is not JSON"),
        ("[1]", "is not a JSON object"),
        ("[" * 100_000, "line 2"),
        (ROW | {"input_length": 0}, "input_length is 0, not a whole number"),
        (ROW | {"input_length": 2**40}, "input_length is"),
        (ROW | {"output_length": -1}, "output_length is -1"),
        (ROW | {"timestamp": -1}, "timestamp is -1"),
        (ROW | {"timestamp": "soon"}, "timestamp"),
        (ROW | {"hash_ids": [1]}, "600 tokens need 2 hash_ids of 512 tokens, not 1"),
        (ROW | {"hash_ids": [1, -2]}, "hash_ids has one that is not from 0"),
        (ROW | {"hash_ids": [1, 2**52]}, "hash_ids has one that is not from 0"),
        (ROW | {"hash_ids": [1, 10**30]}, "line 2"),
        ({"timestamp": 1}, "is no request of a Mooncake trace"),
        (ROW | {"session_id": [1]}, "is no request of a Mooncake trace"),
    ],
)
def test_a_broken_line_is_named_by_its_number(tmp_path: Path, line: Any, problem: str) -> None:
    with pytest.raises(TraceError) as error:
        read(lines(tmp_path / "t.jsonl", ROW, line), "mooncake")
    assert problem in str(error.value)
    assert "t.jsonl line 2: " in str(error.value)


def test_files_without_a_trace_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TraceError, match="No such file"):
        recognised(tmp_path / "none")
    with pytest.raises(TraceError, match="Is a directory"):
        recognised(tmp_path)
    for content in ("", "\n\n", "hello\n", '{"a": 1}\n', "\x00\xff" * 100):
        with pytest.raises(TraceError, match="none of the known formats"):
            recognised(lines(tmp_path / "t", content))
    with pytest.raises(TraceError, match="has no requests"):
        read(lines(tmp_path / "t", ""), "mooncake")
    monkeypatch.setattr("kvrouter.replay.traces.lines.LINE_BYTES_MAX", 100)
    with pytest.raises(TraceError, match="line 1: the line is longer"):
        recognised(lines(tmp_path / "t", "x" * 101))


def test_a_trace_that_does_not_fit_says_how_much_of_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "PIECES_MAX", 5)
    with pytest.raises(TraceError, match=r"line 3: .* replay the first 2 with --requests"):
        read(lines(tmp_path / "t", ROW, ROW, ROW))


# -- pieces


def test_equal_ids_mean_equal_prefixes() -> None:
    ids, other_ids = list(range(40)), [*range(20), 99, *range(21, 40)]
    a, b = pieces_of_tokens(ids, 16), pieces_of_tokens(other_ids, 16)
    assert (len(a), a[0] == b[0], a[1] == b[1]) == (3, True, False)
    # The same tokens behind another beginning are another piece.
    assert a[2] != b[2]
    assert int(max(a)) < 1 << 52


def test_text_is_counted_by_its_bytes() -> None:
    ids, tokens = pieces_of_text(b"x" * 130, 16, 4.0)
    assert (len(ids), tokens) == (3, 33)
    longer, _ = pieces_of_text(b"x" * 128 + b"yy", 16, 4.0)
    assert ids[:2].tolist() == longer[:2].tolist()
    assert ids[2] != longer[2]
    assert pieces_of_text(b"", 16, 4.0)[1] == 1


# -- OpenAI


LISTS = [(4.5, 1, 5), (4.5, 2, 5), (5.5, 1, 12), (5.5, 2, 12)]


def test_bodies_of_every_kind_are_read(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi " * 100}], "max_tokens": 7}
    path = lines(
        tmp_path / "t",
        {"timestamp": 1.5, **chat},
        {"timestamp": 2, "body": chat, "custom_id": "a", "response": {"body": {"usage": {"completion_tokens": 9}}}},
        {"timestamp": 3, "prompt": "Hi " * 100},
        {"timestamp": 4, "prompt": list(range(100)), "max_tokens": 1},
        {"timestamp": 5, "prompt": ["one", [1, 2, 3]], "max_tokens": 2},
        # The usage of a list is the sum over its prompts.
        {"timestamp": 6, "prompt": [[1], [2, 3]], "n": 2, "usage": {"completion_tokens": 9}},
        {"timestamp": 7, "prompt": [[1], [2, 3]], "n": 3, "max_tokens": 4},
    )
    trace = read(path)
    assert trace.format == "openai"
    requests = [(request.time_s, request.prompt_tokens, request.output_tokens) for request in trace.requests]
    assert (requests[0][2], requests[1][1:]) == (7, (requests[0][1], 9))
    assert requests[2:] == [(1.5, 75, 256), (2.5, 100, 1), (3.5, 1, 2), (3.5, 3, 2), *LISTS]
    assert trace.requests[0].pieces.tolist() == trace.requests[1].pieces.tolist()
    assert any("estimated from text" in note for note in trace.notes)


def test_bodies_of_the_engines_own_paths_are_read(tmp_path: Path) -> None:
    ids = list(range(100))
    path = lines(
        tmp_path / "t",
        {"time": 1, "token_ids": ids, "sampling_params": {"max_tokens": 7}},
        {"time": 2, "body": {"input_ids": ids, "sampling_params": {"max_new_tokens": 8}}},
        {"time": 3, "input_ids": [ids, [1]], "sampling_params": [{}]},
        {"time": 4, "text": "Hi " * 100, "response": {"meta_info": {"prompt_tokens": 75, "completion_tokens": 3}}},
    )
    trace = read(path)
    assert trace.format == "openai"
    assert [(request.prompt_tokens, request.output_tokens) for request in trace.requests] == [
        (100, 7),
        (100, 8),
        (100, 256),
        (1, 256),
        (75, 3),
    ]
    assert trace.requests[0].pieces.tolist() == trace.requests[1].pieces.tolist()


def test_sessions_that_a_trace_names_are_read(tmp_path: Path) -> None:
    """Read sessions as numbers: equal names give equal numbers, in every format."""
    body = {"time": 1, "prompt": [1, 2], "usage": {"completion_tokens": 1}}
    bodies = [
        body | {"session_id": "a", "user": "u"},
        body | {"user": "a"},
        {"time": 2, "body": body | {"session_id": "a"}},
        body | {"user": "7"},
        body | {"user": "", "session_id": None},
    ]
    sessions = [request.session for request in read(lines(tmp_path / "t", *bodies), "openai").requests]
    mooncake = [ROW | {"session_id": "a"}, ROW | {"session_id": 7}, ROW]
    others = [request.session for request in read(lines(tmp_path / "m", *mooncake), "mooncake").requests]
    assert sorted(sessions, key=str) == sorted([others[0]] * 3 + [others[1], None], key=str)
    assert others[0] != others[1] is not None and others[2] is None


def test_a_next_turn_begins_with_the_pieces_of_the_one_before(tmp_path: Path) -> None:
    first = [
        {"role": "system", "content": "s" * 700},
        {"role": "user", "content": [{"type": "text", "text": "u" * 90}]},
    ]
    turns = [*first, {"role": "assistant", "content": "a" * 50}, {"role": "user", "content": "more"}]
    other_chat = [{"role": "system", "content": "t" + "s" * 699}]
    path = lines(tmp_path / "t", *({"time": n, "messages": m} for n, m in enumerate((first, turns, other_chat))))
    a, b, c = (request.pieces.tolist() for request in read(path).requests)
    assert a[:-1] == b[: len(a) - 1]
    assert not set(a) & set(c)


@pytest.mark.parametrize(
    ("time", "seconds"),
    [(1_700_000_000, 0), (1_700_000_000_500, 0.5), (1.7000000005e18, 0.5), ("2023-11-14T22:13:21Z", 1)],
)
def test_times_are_read_in_every_unit(tmp_path: Path, time: Any, seconds: float) -> None:
    path = lines(tmp_path / "t", {"timestamp": 1_700_000_000, "prompt": "a"}, {"timestamp": time, "prompt": "b"})
    assert read(path).requests[1].time_s == pytest.approx(seconds, abs=1e-3)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({"prompt": "a"}, "its time (timestamp, time, created_at, created) is missing"),
        ({"time": "yesterday", "prompt": "a"}, "is neither a number nor ISO 8601"),
        ({"time": -1, "prompt": "a"}, "its time"),
        ({"time": 1e300, "prompt": "a"}, "its time"),
        ({"time": 1, "prompt": []}, "has no messages, and its prompt is []"),
        ({"time": 1, "prompt": 5}, "its prompt is 5"),
        ({"time": 1, "prompt": [1, -1]}, "no token id"),
        ({"time": 1, "prompt": [[True]]}, "no token id"),
        ({"time": 1, "messages": []}, "messages is []"),
        ({"time": 1, "messages": ["hi"]}, "messages has 'hi'"),
        ({"time": 1, "body": 3}, "body is 3"),
        ({"time": 1, "prompt": "a", "max_tokens": "many"}, "max_tokens is 'many'"),
        ({"time": 1, "prompt": "a", "usage": {"completion_tokens": -4}}, "completion_tokens is -4"),
        ({"time": 1, "prompt": [1], "session_id": 1.5}, "session_id is 1.5, not a text or a whole number"),
        ({"time": 1, "prompt": [1], "user": {}}, "user is {}, not a text or a whole number"),
    ],
)
def test_a_body_that_cannot_be_read_is_named(tmp_path: Path, line: Any, problem: str) -> None:
    with pytest.raises(TraceError, match=re.escape("line 1: ")) as error:
        read(lines(tmp_path / "t", line), "openai")
    assert problem in str(error.value)


def test_usage_shows_how_far_off_an_estimate_is(tmp_path: Path) -> None:
    path = lines(tmp_path / "t", {"time": 1, "prompt": "x" * 600, "usage": {"prompt_tokens": 100}})
    assert any("--bytes-per-token 6.00" in note for note in read(path).notes)
    assert not any("--bytes-per-token" in note for note in read(path, bytes_per_token=6.0).notes)


def test_a_tokenizer_makes_text_exact_and_what_it_cannot_read_is_estimated(tmp_path: Path) -> None:
    def tokenize(kind: str, body: dict[str, Any]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        if "picture" in str(body):
            raise ValueError("a picture")
        return np.arange(40 if kind == "chat" else 20)

    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    with_picture = {"messages": [{"role": "user", "content": [{"type": "picture"}]}], "max_tokens": 1}
    path = lines(
        tmp_path / "t", {"time": 1, **chat}, {"time": 2, "prompt": "Hi", "max_tokens": 1}, {"time": 3, **with_picture}
    )
    trace = read(path, tokenize=tokenize)
    chat_, text, picture = trace.requests
    assert (chat_.prompt_tokens, text.prompt_tokens) == (40, 20)
    assert chat_.pieces[0] == text.pieces[0]
    assert picture.prompt_tokens > 1
    assert any("(a picture)" in note for note in trace.notes)


# -- vLLM's log

START = "(APIServer pid=7) INFO 11-24 10:00:00 [api_server.py:10] Started server process [7]"
PARAMS = "params: SamplingParams(n=1, max_tokens=16, min_tokens=0), lora_request: None"
TWO_LINES = (
    START,
    "DEBUG 11-24 10:00:00 [entrypoints/logger.py:52] Request cmpl-1 details: prompt: 'it\\'s, prompt_token_ids: [9]', "
    f"prompt_token_ids: {list(range(40))}, prompt_embeds shape: None.",
    f"INFO 11-24 10:00:00 [entrypoints/logger.py:63] Received request cmpl-1: {PARAMS}.",
    "INFO 11-24 10:00:01 [logger.py:85] Generated response cmpl-1: output: 'x', output_token_ids: [4, 5, 6], "
    "finish_reason: stop",
)


def test_the_log_lines_of_a_request_and_its_answer_are_joined(tmp_path: Path) -> None:
    trace = read(lines(tmp_path / "log", *TWO_LINES))
    (request,) = trace.requests
    assert (trace.format, request.prompt_tokens, request.output_tokens) == ("vllm", 40, 3)
    assert request.pieces.tolist() == pieces_of_tokens(list(range(40)), 16).tolist()


def test_the_log_lines_of_all_versions_are_read(tmp_path: Path) -> None:
    older = (
        "INFO 11-24 10:00:02 [logger.py:41] Received request cmpl-2: prompt: 'Hi', params: SamplingParams(n=1, "
        "max_tokens=5), prompt_token_ids: [1, 2, 3], prompt_embeds shape: None, lora_request: None."
    )
    newer = (
        "INFO 11-24 10:00:02 [logger.py:90] Received request cmpl-3: params: SamplingParams(max_tokens=6), "
        'lora_request: None, prompt: "it\'s 20 characters."'
    )
    trace = read(lines(tmp_path / "log", older, newer))
    assert [(request.prompt_tokens, request.output_tokens) for request in trace.requests] == [(3, 5), (5, 6)]
    # Requests of one second are spread over it.
    assert [request.time_s for request in trace.requests] == [0.0, 0.5]


def test_colours_streams_and_a_new_year_are_read(tmp_path: Path) -> None:
    def received(day: str, name: str) -> str:
        return (
            f"\x1b[36m(APIServer pid=7)\x1b[0m \x1b[32mINFO\x1b[0m \x1b[90m{day}\x1b[0m \x1b[90m[logger.py:41]\x1b[0m "
            f"Received request {name}: prompt: 'a', {PARAMS}, prompt_token_ids: [1]."
        )

    delta = (
        "INFO 12-31 23:59:59 [logger.py:85] Generated response a (streaming delta): output: 'x', output_token_ids: [4]"
    )
    trace = read(lines(tmp_path / "log", received("12-31 23:59:58", "a"), delta, received("01-01 00:00:08", "b")))
    assert [request.output_tokens for request in trace.requests] == [16, 16]
    # 2000 has 366 days, and a year here has 365: a replay does not need the day, but would need the order.
    assert trace.requests[1].time_s > 0


def test_a_log_without_prompts_says_how_to_get_them(tmp_path: Path) -> None:
    path = lines(tmp_path / "log", START, TWO_LINES[2])
    with pytest.raises(TraceError, match="VLLM_LOGGING_LEVEL=DEBUG"):
        read(path)
    mixed = lines(tmp_path / "log", *TWO_LINES, TWO_LINES[2].replace("cmpl-1", "cmpl-9"))
    assert any("1 requests without a prompt" in note for note in read(mixed).notes)


def test_an_invalid_time_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="line 1: '13-45 10:00:00' is no time"):
        read(lines(tmp_path / "log", TWO_LINES[2].replace("11-24", "13-45")))


def test_a_models_own_tokenizer_reads_chats_by_their_template(tmp_path: Path) -> None:
    from kvrouter.replay.traces.local_tokens import tokenizer_of
    from tests.support.tiny_tokenizer import write_tokenizer

    tokenize = tokenizer_of(write_tokenizer(tmp_path / "model"))
    first = [{"role": "user", "content": "How are you today? " * 20}]
    turns = [*first, {"role": "assistant", "content": "Well."}, {"role": "user", "content": "Good."}]
    path = lines(tmp_path / "t", *({"time": n, "messages": m, "max_tokens": 1} for n, m in enumerate((first, turns))))
    trace = read(path, tokenize=tokenize)
    a, b = trace.requests
    assert a.prompt_tokens == len(tokenize("chat", {"messages": first}))
    assert a.pieces[0] == b.pieces[0] and a.prompt_tokens < b.prompt_tokens
    assert not any("estimated" in note for note in trace.notes)
    with pytest.raises(ValueError):
        tokenize("chat", {"messages": []})
