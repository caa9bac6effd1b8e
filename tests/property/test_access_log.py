# SPDX-License-Identifier: Apache-2.0
"""`kvrouter replay` reads from the access log when requests came, their lengths, and the parts their prompts share."""

from __future__ import annotations

import io
import logging
import random
import re
from pathlib import Path

import numpy as np
import pytest

from kvrouter.replay.traces.formats import read_trace, recognised
from kvrouter.replay.traces.pieces import pieces_of_tokens
from kvrouter.replay.traces.request import TraceError
from kvrouter.router.base.telemetry.log_format import Formatter
from kvrouter.router.index.matching.question import Question
from kvrouter.router.observe.quality.access_log import (
    LOGGER,
    PIECE_TOKENS,
    list_fields,
    pieces_of,
    set_up_access_log,
    write_line,
)
from kvrouter.router.observe.quality.reuse_report import ReuseReport
from kvrouter.router.observe.quality.usage_reader import Usage

pytestmark = pytest.mark.property


def logged(prompts: list[np.ndarray], folder: Path, *, known: bool = True, others: int | None = None) -> Path:
    """Write the log of a router that got these prompts, with other lines between, and return its path.

    If `others` is given, the prompts came as one list, and that is the number of its prompts that were not looked up.
    """
    stream, logger = io.StringIO(), logging.getLogger(LOGGER)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(Formatter(as_json=True))
    before = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [handler], False
    set_up_access_log(wanted=True)
    try:
        if others is not None:
            parts = tuple(Question("m", len(tokens), token_ids=tokens) for tokens in prompts)
            num_tokens = sum(map(len, prompts)) + others
            question = Question("m", num_tokens, num_prompts=len(prompts) + others, parts=parts)
            report = ReuseReport(16, 16, Usage(num_tokens, 100, 16), None, 0.5)
            write_line({"num_tokens": num_tokens} | list_fields(question), pieces_of(question), report, 0.5)
        for number, tokens in enumerate([] if others is not None else prompts):
            question = Question("m", len(tokens), token_ids=tokens if known else None)
            report = ReuseReport(16, 16, Usage(len(tokens), number, 16), 0.25, 0.5)
            fields = {"request_id": f"r{number}\n", "path": "/v1/completions", "num_tokens": len(tokens)}
            write_line(fields, pieces_of(question), report, 0.5)
    finally:
        set_up_access_log(wanted=False)
        logger.handlers, logger.propagate = before
    path = folder / "router.log"
    lines = stream.getvalue().splitlines()
    path.write_text("\n".join(["text before", '{"logger": "kvrouter.stream", "message": "x"}', *lines, ""]))
    return path


@pytest.mark.parametrize("seed", range(10))
def test_replay_reads_what_was_logged(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    roots = [np.array([rng.randrange(50_000) for _ in range(2_000)]) for _ in range(3)]
    prompts = []
    for _ in range(20):
        shared = rng.choice(roots)[: rng.choice([0, 1, PIECE_TOKENS, rng.randrange(2_000)])]
        prompts.append(np.concatenate([shared, [rng.randrange(50_000) for _ in range(rng.randint(1, 900))]]))
    path = logged(prompts, tmp_path)
    assert recognised(path) == "access"
    trace = read_trace(path, "auto")
    # Match requests to prompts by the output length, which is the prompt's index here: lines of one millisecond have no
    # order.
    requests = {request.output_tokens: request for request in trace.requests}
    assert len(requests) == len(prompts) and trace.piece_tokens == PIECE_TOKENS and not trace.notes
    exact = [pieces_of_tokens(tokens, PIECE_TOKENS) for tokens in prompts]
    for number, tokens in enumerate(prompts):
        assert requests[number].prompt_tokens == len(tokens)
        for earlier in range(number):
            shares = min(len(exact[number]), len(exact[earlier]))
            same = requests[number].pieces[:shares] == requests[earlier].pieces[:shares]
            assert same.tolist() == (exact[number][:shares] == exact[earlier][:shares]).tolist()


@pytest.mark.parametrize("others", [0, 15])
def test_a_list_of_prompts_is_read_as_a_request_for_each(tmp_path: Path, others: int) -> None:
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 50_000, length) for length in (10, 512, 513, 2_000, 7)]
    trace = read_trace(logged(prompts, tmp_path, others=others), "auto")
    assert [request.prompt_tokens for request in trace.requests] == list(map(len, prompts))
    assert [len(request.pieces) for request in trace.requests] == [1, 1, 2, 4, 1]
    assert {request.output_tokens for request in trace.requests} == {100 // (5 + others)}
    assert {request.time_s for request in trace.requests} == {0.0}
    assert ["did not look up" in note for note in trace.notes] == [True] * bool(others)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('"prompts":[[', '"prompts":[[1,', "not a list of lengths and pieces"),
        ('"prompts":[[10,', '"prompts":[[0,', "num_tokens is 0"),
        ('"num_prompts":5', '"num_prompts":"5"', "num_prompts is '5'"),
        ('"prompts":[[10,[', '"prompts":[[10,[1,', "10 tokens have 1 pieces, not 2"),
    ],
)
def test_a_wrong_list_is_an_error_with_its_line(tmp_path: Path, old: str, new: str, problem: str) -> None:
    prompts = [np.arange(length) for length in (10, 20, 30, 40, 50)]
    path = logged(prompts, tmp_path, others=0)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(TraceError, match=re.escape(problem)):
        read_trace(path, "access")


def test_what_is_not_known_is_left_out_and_named(tmp_path: Path) -> None:
    path = logged([np.arange(10)], tmp_path, known=False)
    with pytest.raises(TraceError, match="no requests"):
        read_trace(path, "access")


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('"pieces":[', '"pieces":[-1,', "pieces is"),
        ('"pieces":[', '"pieces":[1,', "has 1 pieces, not 2|have 1 pieces, not 2"),
        ('"e2e_s":0.5', '"e2e_s":"x"', "e2e_s"),
        ('"num_tokens":10', '"num_tokens":true', "num_tokens"),
    ],
)
def test_a_line_that_nobody_wrote_is_refused_by_its_number(tmp_path: Path, old: str, new: str, problem: str) -> None:
    path = logged([np.arange(10)], tmp_path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(TraceError, match=f"line 3: .*({problem})"):
        read_trace(path, "access")
