# SPDX-License-Identifier: Apache-2.0
"""The credit of a worker while its stream, or its engine, is in doubt, and its way back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from tests.support.cut_engine import CutEngine
from tests.support.engine_http import EngineHttp
from tests.support.fake_engine import FakeEngine, prompt, stored
from tests.support.router_process import RouterError, RouterProcess

MODEL = "m"
TOKENS, OTHER = prompt(1), prompt(2)
SUSPECT_CREDIT_S = 1.0
HEALTH_INTERVAL_S = 0.1
SLOW_ANSWER_S = 1.2

Check = Callable[[dict[str, Any]], bool]


ROUTER_FLAGS = ["--suspect-credit-s", str(SUSPECT_CREDIT_S), "--health-interval-s", str(HEALTH_INTERVAL_S)]


@pytest.fixture
def worker(
    router: RouterProcess, context: zmq.Context[zmq.Socket[bytes]], engines: list[FakeEngine]
) -> Iterator[Callable[..., CutEngine]]:
    """Return a function that registers a worker w0 and fills it with 12 blocks of TOKENS."""

    def make(replay: bool, url: str | None = None) -> CutEngine:
        engine = CutEngine(context, replay=replay)
        engines.append(engine)
        router.request("POST", "/register", engine.registration("w0", MODEL, **({} if url is None else {"url": url})))
        # The pause of `wait_connected` lets the engine's HTTP name its process before the first batch, as nothing shows
        # when it has.
        router.wait_connected("w0")
        router.wait_seen("w0", engine.publish(stored(TOKENS, 0, 12)))
        assert hit(router) == 192
        return engine

    yield make
    router.unregister("w0")


def hit(router: RouterProcess, tokens: list[int] = TOKENS) -> int:
    answer = router.request("POST", "/query", {"model": MODEL, "token_ids": tokens})
    return int(answer["instances"]["w0"]["longest_matched"])


def has(**wanted: Any) -> Check:
    return lambda row: all(row[name] == value for name, value in wanted.items())


@pytest.mark.parametrize("replay", [True, False])
def test_doubt_is_credited_for_a_while_then_not_and_again_when_it_is_over(
    replay: bool, router: RouterProcess, worker: Callable[..., CutEngine]
) -> None:
    engine = worker(replay)
    engine.cut()
    row = router.wait_row("w0", has(state="suspect"))
    assert row["credited"] and hit(router) == 192
    row = router.wait_row("w0", has(credited=False))
    assert row["state"] == "suspect" and row["state_age_s"] >= SUSPECT_CREDIT_S
    assert "no credit after" in row["reason"] and hit(router) == 0
    engine.mend()
    if not replay:
        router.wait_row("w0", lambda row: "waiting for proof" in row["reason"])
        engine.wait_subscribed()
        engine.publish(stored(OTHER, 0, 2))
    router.wait_row("w0", has(state="live", credited=True))
    # Without a replay endpoint and a URL, nothing proves that the engine's life is the same.
    assert hit(router) == (192 if replay else 0)


def test_an_engine_that_nobody_answers_for_is_down_at_once_and_void(
    router: RouterProcess, worker: Callable[..., CutEngine], http: EngineHttp
) -> None:
    engine = worker(True, http.url)
    router.wait_row("w0", lambda row: "/metrics" in http.asked)
    http.stop()
    row = router.wait_row("w0", has(state="down"))
    assert "the engine is gone" in row["reason"] and not sum(row["residency"].values())
    assert hit(router) == 0
    with pytest.raises(RouterError, match="no_worker"):
        router.request("POST", "/select", {"model": MODEL, "token_ids": TOKENS})
    # Only the engine's HTTP was gone, so the batches that its stream remembers come back.
    http.start()
    router.wait_row("w0", has(state="live", seq=0))
    assert hit(router) == 192
    assert engine.publisher.next_seq == 1


def test_slow_answers_are_no_end(router: RouterProcess, worker: Callable[..., CutEngine], http: EngineHttp) -> None:
    worker(True, http.url)
    router.wait_row("w0", lambda row: len(http.asked) > 2)
    http.status = 503
    count = len(http.asked)
    router.wait_row("w0", lambda row: len(http.asked) > count)
    http.status = 200
    assert router.worker("w0")["state"] == "live" and hit(router) == 192


def test_an_url_where_nobody_ever_answered_says_nothing(
    router: RouterProcess, worker: Callable[..., CutEngine], http: EngineHttp
) -> None:
    http.stop()
    worker(True, http.url)
    time.sleep(5 * HEALTH_INTERVAL_S)
    assert router.worker("w0")["state"] == "live" and hit(router) == 192


@pytest.mark.parametrize("replay", [True, False])
def test_a_restart_that_nothing_else_shows_is_recognised_by_the_start_time(
    replay: bool, router: RouterProcess, worker: Callable[..., CutEngine], http: EngineHttp
) -> None:
    """Restart the process without losing a connection, so that the stream looks the same."""
    worker(replay, http.url)
    router.wait_row("w0", lambda row: http.asked.count("/metrics") > 1)
    before = router.worker("w0")["epoch"]
    http.start_s = 2_000.5
    # With a replay endpoint, everything that the publisher remembers of its life is read again.
    seq = 0 if replay else None
    router.wait_row("w0", lambda row: row["epoch"] != before and row["state"] == "live" and row["seq"] == seq)
    assert hit(router) == (192 if replay else 0)


def test_a_new_life_that_continues_where_the_old_one_was_is_not_believed(
    router: RouterProcess, worker: Callable[..., CutEngine], http: EngineHttp
) -> None:
    """Begin a new life at the seq that the router waits for, without a replay endpoint.

    Only the start time shows the new life.
    """
    engine = worker(False, http.url)
    router.wait_row("w0", lambda row: http.asked.count("/metrics") > 1)
    engine.cut()
    router.wait_row("w0", has(state="suspect"))
    engine.begin_anew(engine.publisher.next_seq)
    http.start_s = 2_000.5
    # The delay is longer than the batch takes, and shorter than what counts as no answer.
    http.delay_s = SLOW_ANSWER_S
    engine.mend()
    router.wait_row("w0", lambda row: "waiting for proof" in row["reason"])
    engine.wait_subscribed()
    engine.publish(stored(OTHER, 0, 2))
    row = router.wait_row("w0", has(seq=1))
    assert row["state"] == "suspect" and "its process is the same" in row["reason"]
    router.wait_row("w0", has(state="live"))
    assert hit(router) == 0


def test_the_same_life_that_continues_is_believed_when_it_says_so(
    router: RouterProcess, worker: Callable[..., CutEngine], http: EngineHttp
) -> None:
    engine = worker(False, http.url)
    router.wait_row("w0", lambda row: http.asked.count("/metrics") > 1)
    engine.cut()
    router.wait_row("w0", has(state="suspect"))
    engine.mend()
    router.wait_row("w0", lambda row: "waiting for proof" in row["reason"])
    engine.wait_subscribed()
    # No answer says yet whether the process is the same, so a batch that follows is no proof.
    http.delay_s = SLOW_ANSWER_S
    engine.publish(stored(OTHER, 0, 2))
    router.wait_row("w0", has(state="live", seq=1))
    assert hit(router) == 192 and hit(router, OTHER) == 32


def test_a_worker_without_events_is_credited_with_what_was_sent_there_and_says_so(
    router: RouterProcess, http: EngineHttp
) -> None:
    router.request("POST", "/register", {"worker_id": "w0", "model": MODEL, "url": http.url})
    try:
        body = {"model": MODEL, "token_ids": TOKENS}
        assert router.request("POST", "/query", body)["instances"]["w0"]["longest_matched"] == 0
        assert router.request("POST", "/select", body)["overlap"]["longest_matched"] == 0
        row = router.request("POST", "/query", body)["instances"]["w0"]
        # The credit is for whole pieces of 64 tokens.
        assert row["longest_matched"] == 192 and row["approximate"] is True and "approximate" in row["reason"]
        chosen = router.request("POST", "/select", body | {"explain": True})
        assert "approximate" in chosen["reason"] and chosen["candidates"][0]["approximate"] is True
        row = router.worker("w0")
        assert row["approximate"] and not row["credited"] and "without an event endpoint" in row["reason"]
        assert router.metric("kvrouter_approximate_workers") == 1
        # The credit is in the engine's own blocks, once the engine says how large they are.
        http.metrics = b'vllm:cache_config_info{block_size="128",enable_prefix_caching="True",engine="0"} 1.0\n'
        router.wait_row("w0", lambda row: row["engine_cache"]["block_size"] == 128)
        router.request("POST", "/select", body)
        assert router.request("POST", "/query", body)["instances"]["w0"]["longest_matched"] == 128
        # Another process holds nothing of the prompt. Wait until the start of the present one is known.
        router.wait_row("w0", lambda row: http.asked.count("/metrics") > 1)
        http.start_s = 2_000.5
        router.wait_row(
            "w0", lambda row: not router.request("POST", "/query", body)["instances"]["w0"]["longest_matched"]
        )
        # An engine that reuses nothing is credited with nothing that is sent there.
        http.metrics = http.metrics.replace(b"True", b"False")
        router.wait_row("w0", lambda row: not row["approximate"])
        router.request("POST", "/select", body)
        assert router.request("POST", "/query", body)["instances"]["w0"]["longest_matched"] == 0
        assert "prefix caching is off" in router.worker("w0")["reason"]
    finally:
        router.unregister("w0")
