# SPDX-License-Identifier: Apache-2.0
"""Parts of the demo."""

from __future__ import annotations

import io
import random
from dataclasses import replace

import pytest
from rich.console import Console

from kvrouter.simulator.demo.demo import DemoOptions, run_demo
from kvrouter.simulator.demo.summary import Row, Summary
from kvrouter.simulator.demo.trace import (
    SCENES,
    Rivals,
    full_attention_choice,
    full_attention_hit,
    make_prompts,
    working_set_blocks,
)
from kvrouter.simulator.demo.view import View

ROW = Row(
    number=1,
    conversation=0,
    turn=1,
    prompt_tokens=500,
    predicted=[0, 320],
    real=[0, 320],
    limited_by=["g0 sliding_window", None],
    full_attention=[480, 320],
    chosen=1,
    by="kvrouter",
    reason="reuses 320",
    promised=320,
    reused=320,
    full_attention_choice=0,
)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SCENES)
def test_prompts_fit_fill_far_more_than_a_pool_and_repeat(shape: str) -> None:
    scene = SCENES[shape]
    prompts = make_prompts(random.Random(7), 48)
    assert prompts == make_prompts(random.Random(7), 48)
    assert prompts != make_prompts(random.Random(8), 48)
    assert working_set_blocks(scene, prompts) > 2 * scene.num_blocks
    sim = scene.replica()
    texts: dict[int, tuple[int, ...]] = {}
    for prompt in prompts:
        earlier = texts.get(prompt.conversation, ())
        assert prompt.tokens[: len(earlier)] == earlier
        finished = sim.run(prompt.tokens, max_tokens=prompt.max_tokens)
        texts[prompt.conversation] = prompt.tokens + finished.output


@pytest.mark.parametrize("shape", SCENES)
def test_full_attention_alone_never_sees_less_than_the_hit(shape: str) -> None:
    sim = SCENES[shape].replica()
    overestimates = 0
    for prompt in make_prompts(random.Random(1), 30):
        full_attention, real = full_attention_hit(sim, prompt.tokens), sim.find(prompt.tokens).tokens
        assert full_attention >= real
        overestimates += full_attention > real
        sim.run(prompt.tokens, max_tokens=prompt.max_tokens)
    assert (overestimates > 0) == (shape != "llama")


def test_among_equal_hits_the_least_used_replica_is_taken() -> None:
    assert full_attention_choice([5, 7, 7], [0, 3, 2]) == 2
    assert full_attention_choice([0, 0, 0], [1, 1, 1]) == 0


def test_both_rivals_start_with_equal_caches() -> None:
    rivals = Rivals(SCENES["gemma3"], 3, warmup=100)
    for prompt in make_prompts(random.Random(3), 20):
        rivals.serve(prompt)
    assert rivals.round_robin_reused == rivals.full_attention_reused > 0


def test_a_row_is_exact_only_if_every_figure_is() -> None:
    assert ROW.exact
    assert not replace(ROW, predicted=[16, 320]).exact
    assert not replace(ROW, reused=304).exact
    assert not replace(ROW, promised=304).exact


def test_a_row_shows_where_full_attention_errs() -> None:
    assert ROW.full_attention_wrong and ROW.full_attention_overpromised
    right = replace(ROW, full_attention_choice=1)
    assert not right.full_attention_wrong and not right.full_attention_overpromised
    same = replace(ROW, real=[320, 320])
    assert not same.full_attention_wrong and same.full_attention_overpromised


def test_the_summary_adds_up_the_rows() -> None:
    summary = Summary()
    summary.add(ROW)
    summary.add(replace(ROW, number=2, predicted=[16, 320]))
    assert (summary.prompts, summary.exact_prompts, summary.wrong_numbers) == (2, 1, [2])
    assert (summary.checked, summary.exact_checked, summary.nonzero_checked) == (4, 3, 2)
    assert (summary.prompt_tokens, summary.reused_tokens) == (1000, 640)
    assert (summary.full_attention_overpromised, summary.full_attention_wrong) == (2, 2)


def test_the_view_is_plain_off_a_terminal() -> None:
    out = io.StringIO()
    shown(View(2, 600, quiet=False, console=Console(file=out, highlight=False, soft_wrap=True)), ROW)
    text = out.getvalue()
    assert "\x1b" not in text
    assert "w0 480!" in text
    assert text.count("✓") == text.count("✗") == 1
    flat = " ".join(text.split())
    assert (
        flat.index("3 of 4 predictions were exact: 2 prompts")
        < flat.index("reused 640 (64%) of 1000")
        < flat.index("Row 1:")
    )
    assert "Wrong: prompts 2;" in flat
    assert (
        "Row 1: `320` below w1: kvrouter predicts that w1 reuses 320 of 500 tokens. The prompt goes there, and 320"
        in flat
    )
    assert "FA `w0 480`: full attention alone expects 480 at w0" in flat
    assert "http://127.0.0.1:1234/" in text and "7 more requests" in text


def shown(view: View, row: Row) -> None:
    """Call everything that a view may show."""
    replicas = len(row.predicted)
    view.opening("gemma3", replicas, 500, "a_trace_of_some_length.jsonl")
    view.started(1.0, 12, "least_load")
    rows = [row, replace(row, number=2, predicted=[16, *row.predicted[1:]])]
    summary = Summary()
    for judged in rows:
        summary.add(judged)
    view.verdict(summary)
    view.table(SCENES["gemma3"], 1200, rows, summary)
    view.next_steps("gemma3", verbose=False)
    view.staying("http://127.0.0.1:1234")
    view.still(123_456, 12_345_678, 123_456_789)
    view.stayed(7)


@pytest.mark.parametrize("replicas", [2, 4, 8])
@pytest.mark.parametrize("longest", [999, 9_999, 99_999])
def test_the_view_fits_80_columns(replicas: int, longest: int) -> None:
    out = io.StringIO()
    hits = [longest - 16] * replicas
    row = replace(
        ROW,
        number=500,
        conversation=999,
        prompt_tokens=longest,
        predicted=hits,
        real=[0] * (replicas - 1) + [longest - 16],
        limited_by=["g10 sliding_window"] * replicas,
        full_attention=hits,
        chosen=replicas - 1,
        by="round robin",
        promised=longest - 16,
        reused=longest - 16,
    )
    shown(View(replicas, longest, quiet=False, console=Console(file=out, highlight=False, soft_wrap=True)), row)
    assert max(map(len, out.getvalue().splitlines())) <= 80


def test_the_view_can_do_without_utf8() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    View(2, 600, quiet=False, console=Console(file=out, highlight=False, soft_wrap=True)).row(ROW)
    out.flush()
    assert b" y  " in raw.getvalue()


def test_senseless_settings_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo(DemoOptions(shape="bert")) == 2
    assert run_demo(DemoOptions(replicas=0)) == 2
    assert "gemma3" in capsys.readouterr().err
    assert run_demo(DemoOptions(stays=True, json_output=True)) == 2
    assert "--stay" in capsys.readouterr().err
