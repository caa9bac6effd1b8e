# SPDX-License-Identifier: Apache-2.0
"""One of four real engines hands its cache over: what it knew is reused elsewhere, and its death harms nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("nixl_cu12")

from kvrouter.router.app.cli.commands import run
from tests.engine.hand_over_fleet import HandOverFleet
from tests.support.router_process import RouterProcess

pytestmark = pytest.mark.engine

# The part of the former reuse that must be left after one of four engines has handed its cache over.
LEAST_REUSE = 0.9
HEADINGS = ("hand-over by", "chunks handed over", "reuse before", "reuse after")
MINUTE_S = 60.0


@pytest.fixture(autouse=True)
def transports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have UCX use TCP, as between two machines."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize(
    ("way", "seconds"),
    [
        ("drain --hand-over", 0.0),
        *(
            pytest.param(way, seconds, marks=pytest.mark.slow)
            for way, seconds in (("drain --hand-over", MINUTE_S), ("the wire", 0.0), ("none", 0.0))
        ),
    ],
)
def test_three_engines_reuse_what_the_fourth_handed_over(
    way: str,
    seconds: float,
    stack: ExitStack,
    router: RouterProcess,
    models: Callable[[str], Path],
    tmp_path: Path,
    seed: int,
    table: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The first turns after the end need what the fourth engine knew; later ones, in the next `seconds`, less and less.

    Without the hand-over, the same fleet loses it, so the test would notice.
    """
    fleet = HandOverFleet(stack, router, tmp_path, models("gemma3"), 4, seed)
    fleet.fill()
    before = fleet.turn(range(4))
    others = [1, 2, 3]
    chunks = 0
    if way == "the wire":
        fleet.begin(0, others)
        results = fleet.finish(others)
        assert {result.end for result in results} <= {"complete", "room"}, results
        chunks = sum(result.fetched for result in results)
    elif way != "none":
        assert run(["drain", "w0", "--hand-over", "--json", "--url", f"http://127.0.0.1:{router.port}"]) == 0
        parts = json.loads(capsys.readouterr().out)["hand_over"]["parts"]
        assert {part["end"] for part in parts} <= {"complete", "room"} and len(parts) == 3, parts
        chunks = sum(part["fetched"] for part in parts)
        for number in others:
            fleet.engines[number].do("rest")
    fleet.engines[0].kill()
    after = fleet.turns(others, seconds)
    table(
        "Reuse after one engine ended",
        HEADINGS,
        (
            f"{way}, {seconds:.0f} s" if seconds else way,
            str(chunks),
            f"{before.share:.3f}",
            f"{after.share:.3f}",
        ),
    )
    assert not before.wrong and not after.wrong, (before.wrong, after.wrong)
    kept = after.share / before.share
    assert (kept >= LEAST_REUSE) is (way != "none"), f"{before} {after} {kept:.3f}"
    for number in others:
        engine = fleet.engines[number]
        assert engine.do("ledger") == engine.do("resident")
        same = engine.do("same_bytes")
        assert same["compared"] > 5 and same["different"] == 0


def test_the_death_of_the_source_during_a_hand_over_harms_nothing(
    stack: ExitStack, router: RouterProcess, models: Callable[[str], Path], tmp_path: Path, seed: int
) -> None:
    fleet = HandOverFleet(stack, router, tmp_path, models("gemma3"), 3, seed)
    fleet.fill()
    fleet.begin(0, [1, 2])
    fleet.engines[0].kill()
    fleet.finish([1, 2])
    after = fleet.turn([1, 2])
    assert not after.wrong, after.wrong
    for number in (1, 2):
        engine = fleet.engines[number]
        assert engine.do("ledger") == engine.do("resident")
        same = engine.do("same_bytes")
        assert same["compared"] > 5 and same["different"] == 0
