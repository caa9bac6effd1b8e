# SPDX-License-Identifier: Apache-2.0
"""Judgements of an engine end with its process, at every router.

The router that follows the worker sees the restart itself. Another one on the same store learns of it from the state
that the first one writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvrouter.router.app.diagnosis.event_checks import UNHEARD_PROMPTS
from tests.support.clinic import Clinic
from tests.support.fake_engine import BLOCK, FakeEngine, NewEngine, prompt, stored
from tests.support.fleet import held, rows, until
from tests.support.router_process import RouterProcess
from tests.support.scripted_engine import Asked, ScriptedEngine, Wire, plain
from tests.support.store_server import StoreServer

MODEL = "m"
CACHED = prompt(1)
# Longer than any block of an engine that does not say how large its blocks are.
LONG_BLOCKS = 2_100 // BLOCK


async def tell_nothing(asked: Asked, wire: Wire) -> None:
    """Answer like an engine that does not report the tokens it reused."""
    tokens = len(json.loads(asked.body)["prompt"])
    usage = {"prompt_tokens": tokens, "completion_tokens": 1, "total_tokens": tokens + 1}
    body = {"id": "c", "object": "text_completion", "choices": [{"index": 0, "text": "a"}], "usage": usage}
    await plain(json.dumps(body).encode())(asked, wire)


class Engine:
    """Events and HTTP of an engine whose process can be replaced by another."""

    def __init__(self, http: ScriptedEngine, events: FakeEngine) -> None:
        self.http = http
        self.events = events
        self.start(1_000.5)

    def start(self, start_s: float, page: str = "") -> None:
        """Let another process answer from now on.

        Args:
            start_s: The start time of the process.
            page: Further lines of its metrics page.
        """
        self.http.pages["/metrics"] = plain(f"process_start_time_seconds {start_s}\n{page}".encode())


def is_shared(one: RouterProcess, two: RouterProcess) -> bool:
    """Return whether one of the two routers follows the worker and both credit it."""
    shown = [router.worker("w") for router in (one, two)]
    return sorted((held(one), held(two))) == [0, 1] and all(row["state"] == "live" and row["credited"] for row in shown)


def has_described_cache(row: dict[str, Any]) -> bool:
    """Return whether the row has the cache that the engine's metrics page describes.

    The page describes an engine that reuses nothing.
    """
    return bool(row["engine_cache"] == {"prefix_caching": False, "block_size": 32, "blocks": 9, "tokens": None})


def is_judged_silent(clinic: Clinic) -> bool:
    """Send one more prompt, and return whether the doctor now finds that the engine reports no cached tokens."""
    clinic.complete(MODEL, CACHED)
    return "KV401" in clinic.codes()


@pytest.fixture
def engine(new_engine: NewEngine) -> Iterator[Engine]:
    events = new_engine()
    with ScriptedEngine(tell_nothing) as http:
        yield Engine(http, events)


@pytest.fixture
def clinics(tmp_path: Path, server: StoreServer, engine: Engine) -> Iterator[list[Clinic]]:
    """Start a router that follows the worker, and one that does not.

    Both have seen that the engine holds CACHED.
    """
    flags = ["--redis", server.url, "--health-interval-s", "0.1", "--lease-ttl-s", "2"]
    with RouterProcess(tmp_path / "a", flags) as one:
        one.request("POST", "/register", engine.events.registration("w", MODEL, url=engine.http.url))
        one.wait_connected("w", engine.events.wait_subscribed)
        with RouterProcess(tmp_path / "b", flags) as two:
            seq = engine.events.publish(stored(CACHED, 0, 12))
            for router in (one, two):
                router.wait_seen("w", seq)
            # The second router may be given the worker, and the first one then proves it again from the second's answers.
            until(lambda: is_shared(one, two), "not one of them follows the worker while both credit it")
            yield [Clinic(router) for router in sorted((one, two), key=held, reverse=True)]


def test_what_was_judged_ends_with_the_engines_process_at_every_router(engine: Engine, clinics: list[Clinic]) -> None:
    for clinic in clinics:
        # A prompt that comes while the worker is being handed over is not predicted to hit, so send prompts until
        # enough are judged.
        until(partial(is_judged_silent, clinic), "an engine that names no cached tokens is not found")
        clinic.find("KV401", "worker w")
        assert "cached_tokens" in str(clinic.router.request("GET", "/health"))
    engine.start(2_000.5)
    for clinic in clinics:
        # No answer of the new process has come yet.
        clinic.wait_gone("KV401")
        assert "cached_tokens" not in str(clinic.router.request("GET", "/health"))


def test_what_was_sent_to_a_silent_engine_ends_with_its_process_at_every_router(
    engine: Engine, clinics: list[Clinic]
) -> None:
    block_line = 'vllm:cache_config_info{block_size="32",enable_prefix_caching="True",engine="0"} 1.0\n'
    engine.start(1_000.5, block_line)
    prompt_of = {"model": "silent", "token_ids": CACHED}

    def hit(clinic: Clinic) -> int:
        return int(clinic.router.request("POST", "/query", prompt_of)["instances"]["s"]["longest_matched"])

    def knows(clinic: Clinic) -> bool:
        return "s" in rows(clinic.router)

    def is_forgotten(clinic: Clinic) -> bool:
        return hit(clinic) == 0

    with clinics[0].worker("s", "silent", url=engine.http.url):
        for clinic in clinics:
            until(partial(knows, clinic), "the other router does not know the worker")
            clinic.router.wait_row("s", lambda row: row["engine_cache"]["block_size"] == 32, "its cache is known")
            clinic.router.request("POST", "/select", prompt_of)
            assert hit(clinic) == len(CACHED) // 64 * 64
        engine.start(2_000.5, block_line)
        for clinic in clinics:
            until(partial(is_forgotten, clinic), "what the old process was sent still counts")


def test_a_restarted_engine_that_publishes_nothing_is_found_by_its_prompts(
    engine: Engine, clinics: list[Clinic]
) -> None:
    follower = clinics[0]
    engine.events.restart()
    engine.start(2_000.5)
    until(lambda: follower.router.worker("w")["last_event_age_s"] is None, "events of the old process still count")
    follower.router.wait_row("w", lambda row: row["state"] == "live", "live")
    for seed in range(UNHEARD_PROMPTS):
        assert "KV202" not in follower.codes()
        follower.complete(MODEL, prompt(seed, LONG_BLOCKS))
    assert f"it computed {UNHEARD_PROMPTS} prompts" in follower.find("KV202", "worker w").evidence


def test_an_engine_without_prefix_caching_says_so_at_once_at_every_router(
    engine: Engine, clinics: list[Clinic]
) -> None:
    line = 'vllm:cache_config_info{{block_size="32",enable_prefix_caching="{}",engine="0",num_gpu_blocks="9"}} 1.0\n'
    engine.start(2_000.5, line.format(False))
    for clinic in clinics:
        finding = clinic.find("KV202", "worker w")
        assert "prefix caching is off" in finding.evidence and "--enable-prefix-caching" in finding.fix
        # The other router shows the worker's state in Redis, which begins again with the engine's process.
        clinic.router.wait_row("w", has_described_cache, "its cache is known")
    engine.start(3_000.5, line.format(True))
    for clinic in clinics:
        clinic.wait_gone("KV202")
