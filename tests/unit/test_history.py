# SPDX-License-Identifier: Apache-2.0
"""The sums of traffic in steps: counted, taken, kept, packed, and shown."""

from __future__ import annotations

import msgspec
import pytest

from kvrouter.contract.history import HistoryReply
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.observe.history.history import FINE_STEP_S, MINUTE_S, RANGE_S, SETTLE_S, SLOTS, History
from kvrouter.router.observe.history.history_entry import (
    MAX_COUNT,
    MAX_MODELS,
    OTHER,
    SUM_NAMES,
    HistoryEntry,
    ModelStep,
    decode,
    encode,
)
from kvrouter.router.observe.history.saved_days import columns_of
from kvrouter.router.observe.history.unwritten import STEPS_PER_BATCH, Unwritten
from kvrouter.router.route.load.traffic_sums import MAX_PROMPTS, TTFT_BOUNDS_S, TTFT_CLASSES, ModelSums, TrafficSums

WORKER = WorkerKey("m", "w0", 0)
# A whole minute, and the second half of a range's first step.
BEGAN_S = 1_800_000_000
HOUR_S, QUARTER_S, DAY_S = 3_600, 900, 86_400
MEMORY_MAX_BYTES = 512_000


def step(model: str = "m", **sums: int) -> ModelStep:
    return ModelStep(model, **dict.fromkeys(SUM_NAMES, 0) | sums, ttft=[])


def shown(history: History, range_s: int = HOUR_S, model: str | None = None, now_s: float = BEGAN_S) -> HistoryReply:
    return history.reply(range_s, model, now_s)


def test_a_model_takes_at_most_512_kilobytes() -> None:
    history = History()
    for number in range(MAX_MODELS + 5):
        history.add(FINE_STEP_S, BEGAN_S, step(f"m{number}", requests=1), BEGAN_S)
    assert history.bytes <= MEMORY_MAX_BYTES * (MAX_MODELS + 1)
    assert shown(history, now_s=BEGAN_S + 10).models == [*sorted(f"m{n}" for n in range(MAX_MODELS)), OTHER]
    assert shown(history, model=OTHER, now_s=BEGAN_S + 10).totals.requests == 5


@pytest.mark.parametrize(("range_s", "step_s"), [(QUARTER_S, 5), (HOUR_S, 5), (DAY_S, 60)])
def test_a_range_has_all_of_its_steps_up_to_the_last_that_has_settled(range_s: int, step_s: int) -> None:
    history = History()
    for number in range(range_s // step_s + 2):
        start_s = BEGAN_S - number * step_s
        assert history.add(step_s, start_s, step(requests=number), BEGAN_S + 1)
    reply = shown(history, range_s, now_s=BEGAN_S + step_s + SETTLE_S)
    assert reply.time_s == list(range(BEGAN_S + step_s - range_s, BEGAN_S + step_s, step_s))
    assert reply.series.requests == list(range(range_s // step_s))[::-1]
    assert (reply.range_s, reply.step_s) == (range_s, step_s)
    assert reply.totals.requests == sum(reply.series.requests)
    # The step that has just ended does not show yet.
    assert shown(history, range_s, now_s=BEGAN_S + step_s + SETTLE_S - 1).time_s[-1] == BEGAN_S - step_s


def test_an_answer_with_all_steps_and_models_is_whole() -> None:
    history = History()
    sums = {name: index + 1 for index, name in enumerate(SUM_NAMES)}
    for model in ("a", "b"):
        history.add(FINE_STEP_S, BEGAN_S, step(model, **sums), BEGAN_S)
    reply = msgspec.json.decode(msgspec.json.encode(shown(history, now_s=BEGAN_S + 10)), type=HistoryReply)
    assert reply.totals == msgspec.convert(
        {name: 2 * count for name, count in sums.items() if name != "saved_us"}
        | {"saved_s": 2 * sums["saved_us"] / 1e6, "ttft_p50_s": None, "ttft_p95_s": None},
        type=type(reply.totals),
    )
    assert shown(history, model="a", now_s=BEGAN_S + 10).totals.requests == 1
    assert shown(history, model="unknown", now_s=BEGAN_S + 10).totals.requests == 0


def test_a_step_of_another_time_changes_no_other_step() -> None:
    history = History()
    history.add(FINE_STEP_S, BEGAN_S, step(requests=1), BEGAN_S)
    before = shown(history, now_s=BEGAN_S + 10)
    for start_s in (BEGAN_S - HOUR_S - 60, BEGAN_S - HOUR_S - 15, BEGAN_S + 3_600, BEGAN_S + 65, BEGAN_S + 1, 0):
        assert not history.add(FINE_STEP_S, start_s, step(requests=100), BEGAN_S), start_s
    assert shown(history, now_s=BEGAN_S + 10) == before
    # Within the tolerance, a step that is ahead shows when its time comes, and drops none that is in range.
    assert history.add(FINE_STEP_S, BEGAN_S + 60, step(requests=7), BEGAN_S)
    assert shown(history, now_s=BEGAN_S + 10) == before
    assert shown(history, now_s=BEGAN_S + 68).totals.requests == 8


def test_traffic_that_is_out_of_range_does_not_come_back() -> None:
    history = History()
    for step_s in (FINE_STEP_S, MINUTE_S):
        history.add(step_s, BEGAN_S, step(requests=1), BEGAN_S)
    for range_s, step_s in ((HOUR_S, FINE_STEP_S), (DAY_S, MINUTE_S)):
        later_s = BEGAN_S + SLOTS[step_s] * step_s
        assert shown(history, range_s, now_s=later_s + step_s + SETTLE_S).totals.requests == 0
        # Beside traffic of the range, too.
        history.add(step_s, later_s - step_s, step(requests=5), later_s)
        assert shown(history, range_s, now_s=later_s + step_s + SETTLE_S).totals.requests == 5


def test_a_clock_that_goes_back_adds_to_earlier_steps() -> None:
    history = History()
    for now_s in (BEGAN_S, BEGAN_S + 40, BEGAN_S - 40, BEGAN_S):
        history.add(FINE_STEP_S, now_s, step(requests=1), now_s)
    assert shown(history, now_s=BEGAN_S + 50).totals.requests == 4


def test_a_model_without_traffic_for_a_day_makes_room() -> None:
    history = History()
    for number in range(MAX_MODELS):
        history.add(MINUTE_S, BEGAN_S, step(f"m{number}", requests=1), BEGAN_S)
    assert history.name("new", BEGAN_S) == OTHER
    assert history.name("new", BEGAN_S + DAY_S + MINUTE_S) == "new"


@pytest.mark.parametrize("name", ["x" * 300, "\ud800"])
def test_a_name_that_no_entry_can_have_counts_as_other(name: str) -> None:
    assert History().name(name, BEGAN_S) == OTHER


@pytest.mark.parametrize("seconds", [0.001, 0.02, 0.3, 1.0, 7.0, 100.0])
def test_percentiles_are_off_by_less_than_their_class(seconds: float) -> None:
    sums = ModelSums()
    for _ in range(100):
        sums.first_token(seconds)
    history = History()
    history.add(FINE_STEP_S, BEGAN_S, ModelStep.of("m", sums), BEGAN_S)
    totals = shown(history, now_s=BEGAN_S + 10).totals
    assert totals.ttft_p50_s is not None and totals.ttft_p95_s is not None
    above = next(bound for bound in TTFT_BOUNDS_S if bound >= seconds)
    below = max([0.0, *(bound for bound in TTFT_BOUNDS_S if bound < seconds)])
    assert below <= totals.ttft_p50_s <= totals.ttft_p95_s <= above


def test_the_share_of_fast_answers_decides_the_percentile() -> None:
    sums = ModelSums()
    for seconds in [0.01] * 94 + [50.0] * 6:
        sums.first_token(seconds)
    history = History()
    history.add(FINE_STEP_S, BEGAN_S, ModelStep.of("m", sums), BEGAN_S)
    totals = shown(history, now_s=BEGAN_S + 10).totals
    assert totals.ttft_p50_s is not None and totals.ttft_p50_s < 0.02
    assert totals.ttft_p95_s is not None and totals.ttft_p95_s > 30


@pytest.mark.parametrize("range_s", [HOUR_S, DAY_S])
def test_the_last_minute_has_the_percentiles_of_all_its_answers(range_s: int) -> None:
    """They are neither those of its last step nor those of the range."""
    history, now_s = History(), BEGAN_S + 2 * MINUTE_S + SETTLE_S
    for began_s, seconds, answers in ((BEGAN_S, 50.0, 90), (BEGAN_S + MINUTE_S, 1.0, 90), (BEGAN_S + 115, 0.01, 10)):
        sums = ModelSums()
        sums.requests = answers
        for _ in range(answers):
            sums.first_token(seconds)
        for step_s in (FINE_STEP_S, MINUTE_S):
            history.add(step_s, began_s // step_s * step_s, ModelStep.of("m", sums), BEGAN_S + 115)
    minute = shown(history, range_s, now_s=now_s).last_minute
    assert minute.requests == 100
    assert minute.ttft_p50_s is not None and 0.5 < minute.ttft_p50_s < 2
    assert minute.ttft_p95_s is not None and 0.5 < minute.ttft_p95_s < 2


def test_an_entry_is_read_as_it_was_written_and_in_no_other_form() -> None:
    sums = ModelSums()
    sums.requests, sums.saved_s = 3, 1.5
    sums.first_token(0.5)
    entry = HistoryEntry("w", 1, BEGAN_S, [ModelStep.of("m", sums)])
    data = encode(entry)
    assert decode(data) == entry
    for place in range(len(data)):
        assert decode(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]) is None
    bad = [
        HistoryEntry("w", 1, BEGAN_S, [step(requests=-1)]),
        HistoryEntry("w", 1, BEGAN_S, [msgspec.structs.replace(step(), ttft=[99, 1])]),
        HistoryEntry("w", 1, BEGAN_S, [msgspec.structs.replace(step(), ttft=[1])]),
        HistoryEntry("w", 1, BEGAN_S, [msgspec.structs.replace(step(), ttft=[3, 1] * (TTFT_CLASSES + 1))]),
        HistoryEntry("w", 1, BEGAN_S, [step()] * (MAX_MODELS + 2)),
    ]
    assert [decode(encode(entry)) for entry in bad] == [None] * len(bad)
    assert decode(b"") is None and decode(b"foreign") is None


def test_a_sum_beyond_what_an_entry_can_have_counts_as_the_most() -> None:
    sums = ModelSums()
    sums.prompt_tokens, sums.reused_tokens, sums.saved_s = 2**60, 2**60, 1e300
    wrong = ModelStep.of("m", sums)
    assert (wrong.prompt_tokens, wrong.saved_us) == (MAX_COUNT, MAX_COUNT)
    entry = HistoryEntry("w", 1, BEGAN_S, [wrong.plus(wrong), step("n", requests=5)])
    assert decode(encode(entry)) == entry
    assert columns_of(sums) == (0, MAX_COUNT, MAX_COUNT, 0, MAX_COUNT)


def test_no_more_tokens_count_as_reused_than_a_prompt_has() -> None:
    traffic = TrafficSums(lambda worker: 10.0)
    traffic.answered(WORKER, [], 100, 500)
    (prompt,) = traffic.take_prompts()
    sums = traffic.take()["m"]
    assert (sums.reused_tokens, sums.saved_s, prompt.reused_tokens) == (100, 10.0, 100)


def test_tokens_wait_for_a_speed_and_count_once() -> None:
    rates: list[float] = []
    traffic = TrafficSums(lambda worker: rates[-1] if rates else None, lambda: rates[-1] if rates else None)
    traffic.answered(WORKER, [], 2_000, 1_000)
    assert traffic.take()["m"].saved_s == 0
    assert traffic.take()["m"].saved_s == 0
    rates.append(500.0)
    traffic.answered(WORKER, [], 2_000, 500)
    sums = traffic.take()["m"]
    assert (sums.saved_s, sums.reused_tokens, sums.prompt_tokens) == (3.0, 500, 2_000)
    assert traffic.take() == {}


def test_prompts_beyond_the_bound_claim_nothing() -> None:
    traffic = TrafficSums()
    for _ in range(MAX_PROMPTS + 2):
        traffic.answered(WORKER, [1], 100, 64)
    assert len(traffic.take_prompts()) == MAX_PROMPTS
    assert traffic.take()["m"].round_robin_tokens == 2 * 64


def test_what_waits_for_redis_is_bounded_and_written_in_batches() -> None:
    unwritten = Unwritten("w")
    fine = RANGE_S[FINE_STEP_S] // FINE_STEP_S
    for number in range(fine + 10):
        unwritten.add(FINE_STEP_S, BEGAN_S + number * FINE_STEP_S, step(requests=1))
    assert unwritten.dropped == 10
    batches = []
    while (batch := unwritten.seal()) is not None:
        batches.append(batch)
    assert [batch.number for batch in batches] == list(range(1, len(batches) + 1))
    entries = [order for batch in batches for order in batch.orders if b"XADD" in order]
    assert len(entries) == fine and len(batches) == -(-fine // STEPS_PER_BATCH)


def test_a_step_that_is_counted_twice_is_written_as_one_sum() -> None:
    unwritten = Unwritten("w")
    sums = ModelSums()
    sums.first_token(0.3)
    sums.requests = 2
    for _ in range(2):
        unwritten.add(FINE_STEP_S, BEGAN_S, ModelStep.of("m", sums))
    assert unwritten.seal(BEGAN_S) is None, "the step has not ended"
    batch = unwritten.seal(BEGAN_S + FINE_STEP_S)
    assert batch is not None
    (entry,) = [order for order in batch.orders if b"XADD" in order]
    data = entry.rsplit(b"\r\n", 2)[-2]
    read = decode(data)
    assert read is not None and read.models[0].requests == 4 and read.models[0].ttft[1] == 2
