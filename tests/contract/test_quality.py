# SPDX-License-Identifier: Apache-2.0
"""Predicted and delivered reuse, and the times of an answer, as the proxy counts them from the traffic.

The sockets are real.
"""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
from typing import Any

import pytest

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.observe.quality.prediction_judge import ALONE_MIN, COUNTED_MIN, SILENT_MIN
from kvrouter.router.route.load.traffic_sums import NO_MODEL
from tests.contract.proxy_support import CHAT, COMPLETIONS, ProxyServer, fleet, until
from tests.contract.served_app import request as raw_request
from tests.support.scripted_engine import STREAM_HEAD, Asked, Script, Wire, chunk, plain, reset, stream

# `FirstFit` predicts that 96 of the 99 tokens are reused.
TOKENS = {"model": "m", "prompt": list(range(1, 100)), "max_tokens": 4}
PREDICTED = 96
TEXT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


def usage(cached: int | None, prompt: int = 99, completion: int = 4) -> dict[str, Any]:
    """Return usage as vLLM reports it, with --enable-prompt-tokens-details unless `cached` is None."""
    details = None if cached is None else {"cached_tokens": cached}
    return {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}


def answer(cached: int | None, **counts: int) -> Script:
    return plain(json.dumps({"id": "x", "choices": [], "usage": usage(cached, **counts)}).encode())


def events(*usages: dict[str, Any] | None) -> list[bytes]:
    """Return the events of a stream, one for each usage, and its end marker."""
    parts = [{"choices": [{"text": "a"}]} | ({} if usage_ is None else {"usage": usage_}) for usage_ in usages]
    return [b"data: " + json.dumps(part).encode() + b"\n\n" for part in parts] + [b"data: [DONE]\n\n"]


def counted(router: ProxyServer, worker: str = "w0") -> dict[str, float]:
    """Return the number of predictions of a worker by outcome, without zeros."""
    predictions = {
        o: router.sample("predictions_total", worker=worker, outcome=o) for o in ("exact", "less", "more", "untold")
    }
    return {outcome: count for outcome, count in predictions.items() if count}


def untold(router: ProxyServer, reason: str) -> float:
    former = router.sample("predictions_untold_total", reason=reason)
    assert router.sample("predictions_unjudged_total", reason=reason) == former
    return former


@pytest.mark.parametrize(("cached", "outcome"), [(PREDICTED, "exact"), (0, "less"), (98, "more")])
def test_delivered_reuse_is_compared_with_the_prediction(cached: int, outcome: str) -> None:
    with fleet(answer(cached)) as (router, _):
        router.post(COMPLETIONS, TOKENS)
        until(lambda: counted(router) == {outcome: 1}, "it is counted")
        assert router.sample("predicted_cached_tokens_total", worker="w0") == PREDICTED
        assert router.sample("delivered_cached_tokens_total", worker="w0") == cached
        assert router.sample("over_credit_tokens_total", worker="w0") == max(0, PREDICTED - cached)
        assert router.sample("under_credit_tokens_total", worker="w0") == max(0, cached - PREDICTED)
        assert router.sample("prediction_error_tokens_bucket", model="m", le="-1.0") == (outcome == "less")
        assert router.sample("prediction_error_tokens_bucket", model="m", le="0.0") == (outcome != "more")
        # One token more was expected than predicted, and the placement learns how many were delivered.
        assert router.sample("expected_cached_tokens_total", worker="w0") == PREDICTED + 1
        assert router.sample("expectation_error_tokens_bucket", model="m", le="-1.0") == (cached <= PREDICTED)
        assert router.sample("expectation_error_tokens_bucket", model="m", le="16.0") == 1
        assert router.sample("completion_tokens_total", worker="w0") == 4
        assert router.sample("token_count_mismatches_total", worker="w0") == 0
        assert router.sample("e2e_seconds_count", worker="w0") == 1
        (row,) = router.get("/workers/w0")["workers"]
        assert row["reuse"] == {
            "predicted_tokens": PREDICTED,
            "delivered_tokens": cached,
            "answers": 1,
            "prompt_tokens": 99,
        }
        # An answer that comes as a whole has no first token.
        assert router.sample("ttft_seconds_count", worker="w0") == 0
        (placed,) = router.placer.placed
        assert (placed.told, placed.output_tokens, placed.reused_tokens) == (["done"], 4, cached)


def test_a_stream_reports_usage_at_its_end_and_its_times_are_kept() -> None:
    with fleet(stream(events(None, None, None, None, usage(64)))) as (router, _):
        _, _, body = router.post(COMPLETIONS, TOKENS | {"stream": True})
        assert body == b"".join(events(None, None, None, None, usage(64)))
        until(lambda: counted(router) == {"less": 1}, "it is counted")
        for name in ("ttft", "itl", "itl_max", "e2e"):
            assert router.sample(f"{name}_seconds_count", worker="w0") == 1
        assert 0 < router.sample("ttft_seconds_sum", worker="w0") <= router.sample("e2e_seconds_sum", worker="w0")
        assert router.placer.placed[0].output_tokens == 4


def test_the_last_of_continuous_usages_counts() -> None:
    with fleet(stream(events(*(usage(PREDICTED, completion=n) for n in (1, 2, 3))))) as (router, _):
        router.post(COMPLETIONS, TOKENS | {"stream": True})
        until(lambda: counted(router) == {"exact": 1}, "it is counted")
        assert router.placer.placed[0].output_tokens == 3


ZEROS = usage(0, prompt=0, completion=0)
# A stream of one event with a usage, and of what engines and gateways write around it.
AROUND_USAGE = [
    b': {"usage": {}}\n\n' + b"".join(events(usage(PREDICTED))[:1]) + b': {"usage": {}}\n\n',
    b"".join(events(None, usage(PREDICTED), ZEROS)),
    b"".join(events(usage(1), usage(2), usage(PREDICTED))).replace(b"\n", b"\r\n"),
    b"".join([*events(None, usage(PREDICTED))[:2], b'data: {"choices": [], "usage": null}\n\n']),
    b"".join(events(ZEROS, usage(PREDICTED))[:2]),
]


@pytest.mark.parametrize("raw", AROUND_USAGE, ids=["comments", "zeros", "lines-crlf", "null", "without-done"])
@pytest.mark.parametrize("piece_bytes", [1, 7, 100_000])
def test_a_prediction_is_verified_once_whatever_a_stream_has_around_its_usage(raw: bytes, piece_bytes: int) -> None:
    pieces = [raw[at : at + piece_bytes] for at in range(0, len(raw), piece_bytes)]
    with fleet(stream(pieces)) as (router, _):
        assert router.post(COMPLETIONS, TOKENS | {"stream": True})[2] == raw
        until(lambda: counted(router) == {"exact": 1}, "it is counted")
        assert router.sample("delivered_cached_tokens_total", worker="w0") == PREDICTED
        assert router.placer.placed[0].output_tokens == 4


def test_the_responses_api_has_names_of_its_own() -> None:
    usage_ = {"input_tokens": 99, "output_tokens": 7, "input_tokens_details": {"cached_tokens": PREDICTED}}
    with fleet(plain(json.dumps({"object": "response", "usage": usage_, "user": None}).encode())) as (router, _):
        router.post("/v1/responses", TOKENS)
        until(lambda: counted(router) == {"exact": 1}, "it is counted")
        assert router.placer.placed[0].output_tokens == 7


async def cut(asked: Asked, wire: Wire) -> None:
    await wire.send(STREAM_HEAD, *map(chunk, events(None, usage(PREDICTED))[:2]))
    wire.close()


@pytest.mark.parametrize(
    ("script", "body", "reason"),
    [
        (answer(PREDICTED), TEXT, "unpredicted"),
        (plain(b"{}"), TOKENS, "no_usage"),
        (stream(events(None, None)), TOKENS, "no_usage"),
        (answer(None), TOKENS, "no_cached_tokens"),
        (
            plain(gzip.compress(json.dumps({"usage": usage(1)}).encode()), headers=["content-encoding: gzip"]),
            TOKENS,
            "encoded",
        ),
    ],
)
def test_unknown_outcomes_are_counted_by_reason(script: Script, body: dict[str, Any], reason: str) -> None:
    with fleet(script) as (router, _):
        router.post(CHAT if body is TEXT else COMPLETIONS, body)
        until(lambda: counted(router) == {"untold": 1}, "it is counted")
        assert untold(router, reason) == 1
        assert router.sample("predicted_cached_tokens_total", worker="w0") == 0


@pytest.mark.parametrize("script", [plain(b'{"error": {}}', "400 Bad Request"), plain(b"{}", "500 Oh"), cut])
def test_an_error_and_a_cut_answer_say_nothing_of_predictions(script: Script) -> None:
    with fleet(script) as (router, _):
        try:
            router.post(COMPLETIONS, TOKENS)
        except http.client.IncompleteRead:
            assert script is cut
        until(lambda: router.sample("proxy_open_requests") == 0, "it is over")
        assert counted(router) == {}
        assert router.sample("e2e_seconds_count", worker="w0") == 0


def test_a_client_that_hangs_up_after_the_last_event_has_a_whole_answer() -> None:
    """Hang up after [DONE], as OpenAI's client does, although the end of the body may not have come yet."""

    async def never_ends(asked: Asked, wire: Wire) -> None:
        await wire.send(STREAM_HEAD, *map(chunk, events(None, usage(PREDICTED))))
        await wire.gone.wait()

    with fleet(never_ends) as (router, _):
        with router.connect() as client:
            client.sendall(raw_request(COMPLETIONS, json.dumps(TOKENS).encode()))
            got = b""
            while b"[DONE]" not in got:
                got += client.recv(65_536)
        until(lambda: counted(router) == {"exact": 1}, "it is counted")
        assert router.sample("proxy_requests_total", path=COMPLETIONS, outcome="client_gone") == 1
        assert router.sample("e2e_seconds_count", worker="w0") == 1
        assert router.placer.placed[0].output_tokens == 4


def test_a_client_that_hangs_up_early_yields_no_outcome() -> None:
    async def stops(asked: Asked, wire: Wire) -> None:
        await wire.send(STREAM_HEAD, *map(chunk, events(None, usage(PREDICTED))[:2]))
        await wire.gone.wait()

    with fleet(stops) as (router, _):
        with router.connect() as client:
            client.sendall(raw_request(COMPLETIONS, json.dumps(TOKENS).encode()))
            got = b""
            while b"cached_tokens" not in got:
                got += client.recv(65_536)
        until(lambda: router.sample("proxy_requests_total", path=COMPLETIONS, outcome="client_gone") == 1, "it is gone")
        assert counted(router) == {}


def test_only_the_worker_that_answers_is_judged() -> None:
    with fleet(reset, answer(PREDICTED)) as (router, *_):
        router.post(COMPLETIONS, TOKENS)
        until(lambda: counted(router, "w1") == {"exact": 1}, "it is counted")
        assert counted(router, "w0") == {}


def test_tokenizing_is_no_inference() -> None:
    with fleet(answer(5)) as (router, _):
        router.post("/tokenize", TOKENS)
        until(lambda: router.sample("proxy_open_requests") == 0, "it is over")
        assert counted(router) == {} and router.sample("e2e_seconds_count", worker="w0") == 0


@pytest.mark.parametrize(
    ("script", "count", "sentence"),
    [
        (answer(PREDICTED - 16), ALONE_MIN, "predictions do not come true"),
        (answer(None), SILENT_MIN, "start the engine with --enable-prompt-tokens-details"),
        (answer(PREDICTED, prompt=100), COUNTED_MIN, "counts other tokens than the router"),
    ],
)
def test_wrong_predictions_of_a_worker_are_named(script: Script, count: int, sentence: str) -> None:
    with fleet(script) as (router, _):
        for _ in range(count):
            assert router.get("/health")["status"] == "ok"
            router.post(COMPLETIONS, TOKENS)
        until(lambda: router.get("/health")["status"] == "degraded", "it is named")
        (reason,) = router.get("/health")["reasons"]
        assert reason.startswith("worker w0: ") and sentence in reason
        (worker,) = router.core.registered
        assert reason == f"worker w0: {router.quality.problem(worker)}"
        router.on_loop(lambda: router.quality.on_view(worker, None))
        assert router.get("/health")["status"] == "ok"


def test_overlapping_requests_prove_nothing() -> None:
    """Send more than enough requests that reuse less than predicted, but none of them alone."""
    with fleet(answer(PREDICTED - 16)) as (router, engine), router.connect() as client:
        # One request never ends; the engine answers each request on a separate connection.
        hanging: list[Wire] = []

        async def first_hangs(asked: Asked, wire: Wire) -> None:
            if not hanging:
                hanging.append(wire)
                await wire.gone.wait()
            await answer(PREDICTED - 16)(asked, wire)

        engine.script = first_hangs
        client.sendall(raw_request(COMPLETIONS, json.dumps(TOKENS).encode()))
        until(lambda: bool(hanging), "one is under way")
        for _ in range(2 * ALONE_MIN):
            router.post(COMPLETIONS, TOKENS)
        until(lambda: counted(router) == {"less": 2 * ALONE_MIN}, "they are counted")
        assert router.get("/health")["status"] == "ok"


def test_a_workers_series_end_with_it() -> None:
    with fleet(stream(events(None, usage(PREDICTED)))) as (router, _):
        router.post(COMPLETIONS, TOKENS)
        until(lambda: counted(router) == {"exact": 1}, "it is counted")
        (worker,) = router.core.registered

        def drop() -> None:
            router.quality.on_view(worker, None)
            router.registry.forget_worker(worker)

        router.on_loop(drop)
        page = asyncio.run(router.registry.own_page()).decode()
        assert not [line for line in page.splitlines() if 'worker="w0"' in line]
        router.post(COMPLETIONS, TOKENS)
        until(lambda: counted(router) == {"exact": 1}, "it is counted again")


@pytest.mark.parametrize(
    ("script", "sums"),
    [
        (answer(64), {"prompt_tokens": 99, "predicted_tokens": PREDICTED, "delivered_tokens": 64, "reused_tokens": 64}),
        # Where the engine reports nothing, the prediction stands for the reuse.
        (answer(None), {"prompt_tokens": 99, "reused_tokens": PREDICTED}),
        (plain(b"{}"), {"prompt_tokens": 99, "reused_tokens": PREDICTED}),
        (plain(b'{"error": {}}', "400 Bad Request"), {}),
        (plain(b"{}", "500 Oh"), {"failed": 1}),
        (cut, {"failed": 1}),
    ],
)
def test_the_history_has_the_sums_of_what_is_counted(script: Script, sums: dict[str, int]) -> None:
    with fleet(script) as (router, _):
        try:
            router.post(COMPLETIONS, TOKENS)
        except http.client.IncompleteRead:
            assert script is cut
        until(lambda: router.sample("proxy_open_requests") == 0, "it is over")
        taken = router.quality.traffic.take()["m"]
        names = ("failed", "prompt_tokens", "predicted_tokens", "delivered_tokens", "reused_tokens", "saved_s")
        assert {name: value for name in names if (value := getattr(taken, name))} == sums
        assert taken.requests == 1 and sum(taken.ttft) == router.sample("ttft_seconds_count", worker="w0")
        assert taken.unpriced_tokens == sums.get("reused_tokens", 0)


def test_the_history_has_first_tokens_of_streams_and_requests_that_were_refused() -> None:
    with fleet(stream(events(None, usage(PREDICTED)))) as (router, _):
        router.post(COMPLETIONS, TOKENS | {"stream": True})
        router.post(COMPLETIONS, TOKENS | {"model": "unknown"})
        until(
            lambda: (
                sum(router.sample("proxy_requests_total", path=COMPLETIONS, outcome=o) for o in ("ok", "refused")) == 2
            ),
            "both",
        )
        taken = router.quality.traffic.take()
        assert sum(taken["m"].ttft) == taken["m"].requests == 1
        # A model that nobody serves is a client's fault.
        assert (taken[NO_MODEL].requests, taken[NO_MODEL].failed) == (1, 0)


def test_a_request_that_is_refused_for_want_of_a_worker_has_failed() -> None:
    with fleet(answer(0)) as (router, _):
        router.core.draining = {WorkerKey("m", "w0")}
        router.post(COMPLETIONS, TOKENS)
        until(lambda: router.sample("proxy_requests_total", path=COMPLETIONS, outcome="refused") == 1, "it is refused")
        assert router.quality.traffic.take()["m"].failed == 1
