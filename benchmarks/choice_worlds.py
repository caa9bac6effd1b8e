# SPDX-License-Identifier: Apache-2.0
"""Three kinds of traffic on which a choice by hits alone loses.

They are cold chats with a common beginning one after another, a popular system prompt under load, and an engine that is
killed and started again. Each world has one size for `kvrouter sim` and a smaller one for vLLM's CPU build, which
computes on a few cores for all engines together.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, NamedTuple

import aiohttp

from benchmarks.choice_fleet import LiveFleet
from benchmarks.choice_traffic import (
    READ_BUFFER_BYTES,
    Answer,
    Chat,
    Client,
    by_worker,
    random_tokens,
    reuse,
)
from benchmarks.report import percentile

Result = dict[str, Any]
# Must exceed the longest queue here, which a policy builds that sends all prompts to one engine.
ANSWER_TIMEOUT_S = 600.0


def engine_flags(blocks: int, rate: float, vllm: bool) -> list[str]:
    """Return the flags of an engine with a pool of 16-token blocks.

    Args:
        blocks: The size of the pool.
        rate: Prefill tokens/s of a simulated engine.
        vllm: Whether the engine is a vLLM.
    """
    if vllm:
        return ["--block-size", "16", "--num-gpu-blocks-override", str(blocks)]
    return ["--blocks", str(blocks), "--prefill-rate", str(rate)]


class Finding(NamedTuple):
    """Chats that share a short beginning, one request at a time.

    One pool holds about half of the histories, all pools together hold all of them.
    """

    replicas: int = 3
    blocks: int = 4_096
    prefill_rate: float = 10_000.0
    chats: int = 18
    shared_tokens: int = 128
    private_tokens: int = 2_000
    answer_tokens: int = 16
    new_tokens: int = 48
    turns: int = 4
    # Before this turn the engine with the most requests is killed and started again; None to kill none.
    restart_before: int | None = None

    async def run(self, fleet: LiveFleet, client: Client, rng: Random) -> Result:
        """Run all turns of all chats in rotation."""
        shared = random_tokens(rng, self.shared_tokens)
        chats = [
            Chat(f"chat-{number}", shared + random_tokens(rng, self.private_tokens), self.new_tokens, rng)
            for number in range(self.chats)
        ]
        for turn in range(1, self.turns + 1):
            if turn == self.restart_before:
                counts = by_worker(client.answers, self.replicas)
                await asyncio.to_thread(restart, fleet, counts.index(max(counts)))
            for chat in chats:
                await chat.next_turn(client, self.answer_tokens)
            progress(f"turn {turn}: reuse {reuse(a for a in client.answers if a.turn == turn):.3f}")
        return self.result(client.answers)

    def result(self, answers: list[Answer]) -> Result:
        """Return the reuse by turn, and the number of requests by worker."""
        turns = [[answer for answer in answers if answer.turn == turn] for turn in range(1, self.turns + 1)]
        return {
            "reuse by turn": [round(reuse(turn), 3) for turn in turns],
            "reuse after turn 1": round(reuse(answer for answer in answers if answer.turn > 1), 3),
            "requests of turns 1 and 2 by worker": by_worker(turns[0] + turns[1], self.replicas),
            "requests by worker": by_worker(answers, self.replicas),
            "mean first token s": round(statistics.fmean(answer.first_token_s for answer in answers), 3),
        }


def restart(fleet: LiveFleet, number: int) -> None:
    """Kill an engine, start it again and wait until its events are followed again."""
    progress(f"w{number} is killed and starts again")
    fleet.kill(number)
    fleet.start(number)
    fleet.wait_connected()


class Hot(NamedTuple):
    """A long system prompt that all prompts begin with and short private tails, in a Poisson stream.

    One engine has computed the system prompt before the stream begins.
    """

    replicas: int = 4
    blocks: int = 16_384
    # A tenth of the rate that the replay assumes, so all times are ten times as long: 62 requests/s of 8,704 tokens
    # would measure the machine and not the choice.
    prefill_rate: float = 1_000.0
    system_tokens: int = 8_192
    # The mean length of tails, which have from half to one and a half times this many tokens.
    tail_tokens: int = 512
    answer_tokens: int = 16
    # The share of the capacity of all engines together that the tails take. Steps, copies of the system prompt and a
    # machine that is not quiet take up to a third more.
    load: float = 0.6
    warm_up_s: float = 30.0
    seconds: float = 60.0
    # None if the capacity follows from the prefill rate; else the capacity is measured with this many tails for each
    # engine.
    calibration_requests: int | None = None

    async def run(self, fleet: LiveFleet, client: Client, rng: Random) -> Result:
        """Send prompts for the given time and judge those after the warm-up."""
        capacity = self.replicas * self.prefill_rate / self.tail_tokens
        if self.calibration_requests is not None:
            capacity = await self._measured_capacity(fleet, client, rng, self.calibration_requests)
        rate = self.load * capacity
        progress(f"{rate:.2f} requests/s for {self.warm_up_s + self.seconds:.0f} s")
        system = random_tokens(rng, self.system_tokens)
        # The second prompt makes an engine keep its state at the point where the two prompts diverge.
        for _ in range(2):
            await client.complete("first user", 1, system + self._tail(rng), self.answer_tokens)
        judged_s = time.monotonic() + self.warm_up_s

        async def send(number: int) -> None:
            await client.complete(f"user-{number}", 1, system + self._tail(rng), self.answer_tokens)

        await arrivals(rng, rate, lambda: time.monotonic() < judged_s + self.seconds, send)
        judged = [answer for answer in client.answers if answer.begun_s >= judged_s]
        counts = by_worker(judged, self.replicas)
        times_s = [answer.first_token_s for answer in judged]
        return {
            "requests": len(judged),
            "requests/s offered": round(rate, 2),
            "mean first token s": round(statistics.fmean(times_s), 3),
            "p50 first token s": round(percentile(times_s, 0.5), 3),
            "p99 first token s": round(percentile(times_s, 0.99), 3),
            "reuse": round(reuse(judged), 3),
            "requests by worker": counts,
            "busiest by mean": round(max(counts) / statistics.fmean(counts), 2),
        }

    def _tail(self, rng: Random) -> list[int]:
        return random_tokens(rng, rng.randint(self.tail_tokens // 2, self.tail_tokens * 3 // 2))

    async def _measured_capacity(self, fleet: LiveFleet, client: Client, rng: Random, requests: int) -> float:
        """Return the requests/s that all engines complete together when each computes one tail at a time."""

        async def one_after_another(url: str) -> None:
            engine_client = Client(client.http, None, [url])
            for _ in range(requests):
                await engine_client.complete("calibration", 1, self._tail(rng), self.answer_tokens)

        began_s = time.monotonic()
        await asyncio.gather(*map(one_after_another, fleet.engine_urls))
        return requests * self.replicas / (time.monotonic() - began_s)


class BusyRestart(NamedTuple):
    """Chats that begin in a Poisson stream while an engine is killed and started again."""

    replicas: int = 3
    blocks: int = 16_384
    prefill_rate: float = 5_000.0
    shared_tokens: int = 128
    private_tokens: int = 2_000
    answer_tokens: int = 16
    new_tokens: int = 240
    turns: int = 4
    # The mean time from an answer to the next prompt of its chat.
    think_s: float = 4.0
    # New chats per second.
    chat_rate: float = 2.0
    warm_up_s: float = 15.0
    away_s: float = 10.0
    # The time judged before the kill and after the return.
    window_s: float = 30.0

    async def run(self, fleet: LiveFleet, client: Client, rng: Random) -> Result:
        """Run the stream; kill the first engine after the first window, start it again after `away_s`."""
        shared = random_tokens(rng, self.shared_tokens)
        # One generator for each chat, as a chat must not depend on the order in which other chats are answered.
        seed = rng.getrandbits(64)
        began_s = time.monotonic()
        killed_s = began_s + self.warm_up_s + self.window_s
        moments: dict[str, float] = {}

        async def converse(number: int) -> None:
            chat_rng = Random(seed + number)
            chat = Chat(
                f"chat-{number}", shared + random_tokens(chat_rng, self.private_tokens), self.new_tokens, chat_rng
            )
            for turn in range(self.turns):
                if turn:
                    await asyncio.sleep(chat_rng.expovariate(1 / self.think_s))
                # After a failure the chat ends, as its client has no answer to continue from.
                if not await chat.next_turn(client, self.answer_tokens):
                    return

        async def break_down() -> None:
            await asyncio.sleep(killed_s - time.monotonic())
            moments["killed"] = time.monotonic()
            await asyncio.to_thread(fleet.kill, 0)
            progress("w0 killed")
            await asyncio.sleep(self.away_s)
            await asyncio.to_thread(fleet.start, 0)
            moments["returned"] = time.monotonic()
            progress("w0 serves again")

        async with asyncio.TaskGroup() as group:
            group.create_task(break_down())
            group.create_task(arrivals(rng, self.chat_rate, lambda: not self._is_over(moments), converse))
        return self.result(client.answers, moments)

    def _is_over(self, moments: dict[str, float]) -> bool:
        return "returned" in moments and time.monotonic() > moments["returned"] + self.window_s

    def result(self, answers: list[Answer], moments: dict[str, float]) -> Result:
        """Return the figures of the windows before the kill and after the return, and w0's share of the new chats."""
        killed_s, returned_s = moments["killed"], moments["returned"]
        before = [answer for answer in answers if killed_s - self.window_s <= answer.begun_s < killed_s]
        after = [answer for answer in answers if returned_s <= answer.begun_s < returned_s + self.window_s]
        new = by_worker((answer for answer in after if answer.turn == 1), self.replicas)
        p99_before, p99_after = (percentile([a.first_token_s for a in part], 0.99) for part in (before, after))
        return {
            "requests before, after": [len(before), len(after)],
            "mean first token s before, after": [
                round(statistics.fmean(answer.first_token_s for answer in part), 3) for part in (before, after)
            ],
            "p99 first token s before, after": [round(p99_before, 3), round(p99_after, 3)],
            "p99 after by before": round(p99_after / p99_before, 2),
            "reuse before, after": [round(reuse(before), 3), round(reuse(after), 3)],
            "new chats by worker after": new,
            # 1 if w0 got as many as each of its peers would get in an even split.
            "new chats of w0 by its fair share": round(new[0] * self.replicas / sum(new), 2),
        }


async def arrivals(
    rng: Random, rate: float, goes_on: Callable[[], bool], serve: Callable[[int], Coroutine[Any, Any, None]]
) -> None:
    """Call `serve` with 0, 1, 2 ... at the moments of a Poisson process while `goes_on`, and wait for all calls."""
    due_s, number = time.monotonic(), 0
    async with asyncio.TaskGroup() as group:
        while True:
            due_s += rng.expovariate(rate)
            await asyncio.sleep(due_s - time.monotonic())
            if not goes_on():
                return
            group.create_task(serve(number))
            number += 1


# The scenarios of each world, by name, in the order in which they run; smaller ones for vLLM.
Scenario = Finding | Hot | BusyRestart
SIMULATED: dict[str, dict[str, Scenario]] = {
    "finding": {"finding": Finding()},
    "hot": {"hot": Hot()},
    "restart": {"restart, idle": Finding(turns=5, restart_before=3), "restart, busy": BusyRestart()},
}
_SMALL = {"blocks": 420, "chats": 12, "shared_tokens": 64, "private_tokens": 448, "answer_tokens": 8, "new_tokens": 24}
REAL: dict[str, dict[str, Scenario]] = {
    "finding": {"finding": Finding(**_SMALL)},
    "hot": {
        "hot": Hot(
            replicas=3,
            blocks=2_000,
            system_tokens=1_024,
            tail_tokens=64,
            answer_tokens=4,
            calibration_requests=20,
        )
    },
    # There is no busy scenario: a starting vLLM takes the cores from engines that compute, so times would only show
    # that.
    "restart": {"restart, idle": Finding(**_SMALL, turns=5, restart_before=3)},
}


async def run(scenario: Scenario, fleet: LiveFleet, seed: int) -> Result:
    """Run one scenario against a fleet and return its result, with a count of the requests that failed."""
    timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=READ_BUFFER_BYTES) as http:
        client = Client(http, fleet.router_url, fleet.engine_urls)
        result = await scenario.run(fleet, client, Random(seed))
        if client.last_error:
            progress(f"the last error of {client.failures.total()}: {client.last_error}")
        return result | {"failed": dict(client.failures)}


def progress(text: str) -> None:
    """Print the state of a run to stderr."""
    print(f"  {text}", file=sys.stderr, flush=True)
