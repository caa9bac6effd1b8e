# SPDX-License-Identifier: Apache-2.0
"""`kvrouter shadow` beside a round-robin client of simulated engines: its sums match the engines and the index."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from urllib.request import urlopen

import pytest

from tests.support.exchange import post, run_cli
from tests.support.fleet import until, wait_live
from tests.support.replica_process import MODEL, replicas, worker_flags
from tests.support.router_process import RouterProcess
from tests.support.shadow_process import ShadowProcess

TURNS, CHATS = 4, 3
COMPLETIONS = "/v1/completions"
# A request of the log that is older than this is too late; it is far longer than a test takes.
RECENT_S = 600.0

pytestmark = pytest.mark.smoke


class Site(NamedTuple):
    """A router without traffic, and the engines beside it."""

    router: RouterProcess
    urls: list[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.router.port}"

    def held(self, prompt: list[int]) -> list[int]:
        """Return the tokens of the prompt that each engine would reuse now, by the index."""
        instances = self.router.request("POST", "/query", {"model": MODEL, "token_ids": prompt})["instances"]
        return [instances[f"w{number}"]["disk"] for number in range(len(self.urls))]

    def prompt_tokens(self) -> list[str]:
        """Return the lines in which the engines count all prompt tokens that they were sent."""
        pages = [urlopen(f"{url}/metrics").read().decode() for url in self.urls]
        return [line for page in pages for line in page.splitlines() if line.startswith("vllm:prompt_tokens_total")]

    def send(self, number: int, prompt: list[int]) -> dict[str, Any]:
        """Send a prompt to an engine, and return its usage once the index shows the prompt's blocks there."""
        usage: dict[str, Any] = post(self.urls[number], COMPLETIONS, body_of(prompt))["usage"]
        # Wait for the whole prompt, up to the last block that it shares with a longer one.
        until(lambda: self.held([*prompt, 1])[number] >= len(prompt) - 16, "the index has the prompt")
        return usage


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with (
        replicas(2, "--shape", "gemma3", "--blocks", "3000") as endpoints,
        RouterProcess(tmp_path_factory.mktemp("router"), worker_flags(endpoints)) as router,
    ):
        started = Site(router, [endpoint["url"] for endpoint in endpoints])
        until(lambda: all(row["seq"] is None for row in router.request("GET", "/workers")["workers"]), "connected")
        # An engine without blocks has published nothing yet, so send each one a prompt.
        for number in range(2):
            post(started.urls[number], COMPLETIONS, body_of([number + 1] * 100))
        wait_live(router)
        yield started


def body_of(prompt: list[int]) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 1}


def turns(seed: int) -> Iterator[tuple[int, list[int]]]:
    """Yield the turns of growing chats, each with the number of its engine, round robin over two engines.

    A turn often misses the engine of the chat's turn before.
    """
    rng = Random(seed)
    chats: list[list[int]] = [[] for _ in range(CHATS)]
    at = 0
    for _ in range(TURNS):
        for chat in chats:
            chat += [rng.randrange(1, 30_000) for _ in range(rng.randrange(150, 400))]
            yield at % 2, list(chat)
            at += 1


class Sums:
    """The sums of what the engines reported and of what the index held."""

    def __init__(self) -> None:
        self.requests = self.prompts = self.reused = self.there = 0
        self.lost_by = [0, 0]

    def add(self, number: int, prompt: list[int], held: list[int], usage: dict[str, Any]) -> None:
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert held[number] == cached, "the index is right"
        self.requests += 1
        self.prompts += len(prompt)
        self.reused += cached
        self.there += max(held)
        self.lost_by[number] += max(held) - cached

    def check(self, report: dict[str, Any]) -> None:
        placed = report["placed"]
        assert placed["requests"] == self.requests and placed["prompt_tokens"] == self.prompts
        assert (placed["reused_tokens"], placed["there_tokens"]) == (self.reused, self.there)
        rows = {row["worker"]: row for row in report["workers"]}
        assert [rows[f"w{number}"]["lost_tokens"] for number in range(2)] == self.lost_by
        assert [rows[f"w{number}"]["unused_tokens"] for number in range(2)] == self.lost_by[::-1]
        assert 0 < self.reused < self.there, "round robin loses something here"
        assert f"reused {self.reused:,} of {self.there:,} tokens that were there" in report["sentence"]


def replay(site: Site, seed: int, before: Callable[..., None], after: Callable[..., None]) -> Sums:
    """Send all turns, and return their sums.

    Args:
        site: The router and its engines.
        seed: The seed of the turns.
        before: Called before each request with the place in line, the engine's number, and the prompt.
        after: Called after each request with the same, and with the usage.
    """
    sums = Sums()
    for place, (number, prompt) in enumerate(turns(seed)):
        held = site.held(prompt)
        before(place, number, prompt)
        usage = site.send(number, prompt)
        after(place, number, prompt, usage)
        sums.add(number, prompt, held, usage)
    return sums


def test_a_log_written_when_requests_come_is_judged_by_the_index(site: Site, tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    log.write_text(json.dumps({"body": body_of([1] * 50), "worker": "w0"}) + "\n")
    with ShadowProcess(site.url, ["--log", str(log), "--follow"]) as shadow, log.open("a") as file:

        def before(place: int, number: int, prompt: list[int]) -> None:
            line = {"time": time.time(), "worker": site.urls[number], "body": body_of(prompt)}
            file.write(json.dumps(line) + "\n")
            file.flush()
            shadow.wait_seen(place + 1)

        sums = replay(site, 1, before, lambda *_: None)
        report = shadow.finish()
    # The line that was in the log at the start is not counted.
    sums.check(report)
    assert report["placed"]["reported_requests"] == 0 and report["skipped"] == []
    # Nothing else is under way, so this router gives up hits only for blocks that a prompt would push out.
    assert report["ours"]["requests"] == sums.requests
    assert report["ours"]["there_tokens"] == sums.there
    assert sums.reused < report["ours"]["ours_tokens"] > 0.9 * sums.there
    assert report["ours"]["reused_tokens"] == sums.reused
    assert report["type"] == "report" and report["waiting_requests"] == 0


def test_a_log_with_cached_tokens_is_judged_after_the_requests(site: Site) -> None:
    with ShadowProcess(site.url, ["--log", "-"]) as shadow:

        def after(place: int, number: int, prompt: list[int], usage: dict[str, Any]) -> None:
            address = site.urls[number].removeprefix("http://")
            shadow.write(json.dumps({**body_of(prompt), "upstream": address, "response": {"usage": usage}}))
            shadow.wait_seen(place + 1)

        sums = replay(site, 2, lambda *_: None, after)
        report = shadow.finish(None)
    sums.check(report)
    assert report["placed"]["reported_requests"] == sums.requests
    # By then the index has the requests themselves, so it cannot say where it would have placed them.
    assert report["ours"]["requests"] == 0 and report["check"]["requests"] == 0


def test_mirrored_requests_and_the_log_are_joined(site: Site, tmp_path: Path) -> None:
    log = tmp_path / "access.jsonl"
    log.write_text("")
    with ShadowProcess(site.url, ["--listen", "0", "--log", str(log), "--follow"]) as shadow, log.open("a") as file:
        mirror = f"http://127.0.0.1:{shadow.mirror_port}"

        def before(place: int, number: int, prompt: list[int]) -> None:
            post(mirror, COMPLETIONS, body_of(prompt), {"x-request-id": f"r{place}"})
            shadow.wait_seen(place, waiting=1)

        def after(place: int, number: int, prompt: list[int], usage: dict[str, Any]) -> None:
            line = {"request_id": f"r{place}", "upstream_addr": site.urls[number].removeprefix("http://")}
            # Every other line has the usage that the engine reported.
            file.write(json.dumps(line | ({"usage": usage} if place % 2 else {})) + "\n")
            file.flush()
            shadow.wait_seen(place + 1)

        sums = replay(site, 3, before, after)
        # Send a request that the log never names, and one to a path that is not judged.
        post(mirror, COMPLETIONS, body_of([5] * 100), {"x-request-id": "lost"})
        shadow.wait_seen(sums.requests, waiting=1)
        post(mirror, "/v1/embeddings", {"model": MODEL, "input": "x"})
        shadow.wait_seen(sums.requests + 1, waiting=1)
        report = shadow.finish()
    assert report["unplaced"] == {"requests": 1, "prompt_tokens": 100, "there_tokens": max(site.held([5] * 100))}
    assert [(row["reason"], row["requests"]) for row in report["skipped"]] == [("no_prompt", 1)]
    sums.check(report)
    half = sums.requests // 2
    assert report["placed"]["reported_requests"] == half
    check = report["check"]
    assert check["requests"] == check["equal_requests"] == half
    assert check["predicted_tokens"] == check["reported_tokens"] > 0


def test_a_mirror_may_name_the_worker_and_texts_are_tokenized(site: Site) -> None:
    message = {"role": "user", "content": "a story of a fox " * 60}
    chat = {"model": MODEL, "messages": [message], "max_tokens": 1}
    usage = post(site.urls[0], "/v1/chat/completions", chat)["usage"]
    chat["messages"] = [message, {"role": "assistant", "content": "x"}, {"role": "user", "content": "go on " * 30}]
    selected = {"model": MODEL, "messages": chat["messages"], "workers": ["w0"], "dry_run": True}
    until(
        lambda: site.router.request("POST", "/select", selected)["overlap"]["disk"] >= usage["prompt_tokens"] - 64,
        "the index has the chat",
    )
    with ShadowProcess(site.url, ["--listen", "127.0.0.1:0", "--worker-header", "x-upstream"]) as shadow:
        mirror = f"http://127.0.0.1:{shadow.mirror_port}"
        post(mirror, "/prefix/v1/chat/completions", chat, {"x-upstream": "w1"})
        shadow.wait_seen(1)
        post(mirror, "/v1/chat/completions", chat, {"x-upstream": "10.9.9.9:8000"})
        shadow.wait_seen(2)
        report = shadow.finish()
    answered = post(site.urls[0], "/v1/chat/completions", chat)["usage"]
    placed = report["placed"]
    assert placed["requests"] == 1 and placed["prompt_tokens"] == answered["prompt_tokens"]
    assert placed["there_tokens"] == answered["prompt_tokens_details"]["cached_tokens"] > 0
    assert placed["reused_tokens"] == 0
    (skipped,) = report["skipped"]
    assert (skipped["reason"], skipped["detail"]) == ("unknown_worker", "10.9.9.9:8000")


def test_old_and_broken_lines_are_counted_and_nothing_reaches_the_engines(site: Site, tmp_path: Path) -> None:
    log = tmp_path / "old.jsonl"
    lines = [
        json.dumps({"time": time.time() - 2 * RECENT_S, "worker": "w0", **body_of([1] * 50)}),
        json.dumps({"worker": "w0", **body_of([1] * 50)}),
        "no JSON",
        json.dumps({"time": time.time(), "worker": "w0", **(body_of([1] * 50) | {"model": "theirs"})}),
        json.dumps({"time": time.time(), "note": "up"}),
    ]
    log.write_text("\n".join(lines))
    before = site.prompt_tokens()
    with ShadowProcess(site.url, ["--log", "-"]) as shadow:
        report = shadow.finish(None)
        assert report["sentence"] == "No request was judged."
    with ShadowProcess(site.url, ["--listen", "0"]) as shadow:
        assert shadow.finish()["judged_requests"] == 0
    assert run_over(site, log) == {"too_late": 1, "no_time": 1, "broken": 1, "unknown_model": 1, "no_prompt": 1}
    assert site.prompt_tokens() == before
    assert site.router.metric("kvrouter_proxy_requests_total") == 0


def run_over(site: Site, log: Path) -> dict[str, int]:
    """Run over the log to its end, and return the number of skipped requests by reason."""
    flags = ("--json", "--max-age", str(RECENT_S), "--log", str(log))
    done = run_cli("shadow", "--url", site.url, *flags, check=True)
    report = json.loads(done.stdout.splitlines()[-1])
    return {row["reason"]: row["requests"] for row in report["skipped"]}
