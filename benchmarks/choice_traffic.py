# SPDX-License-Identifier: Apache-2.0
"""Chats that clients send over OpenAI's HTTP API, with the reuse, the worker and the times of each answer."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any, NamedTuple

import aiohttp

from benchmarks.choice_fleet import MODEL

# Present in every vocabulary that is used here, and none of them special.
FIRST_TOKEN, LAST_TOKEN = 10, 1_000
# The longest line of a stream repeats the prompt's token ids.
READ_BUFFER_BYTES = 2**20
WORKER_HEADER = "x-kvrouter-worker"


def random_tokens(rng: Random, count: int) -> list[int]:
    """Return the token ids of a text that nobody has sent before."""
    return [rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(count)]


class Answer(NamedTuple):
    """A complete answer, and how its request went."""

    session: str
    # 1 for the first prompt of a session.
    turn: int
    worker: str
    prompt_tokens: int
    # The tokens of the prompt that the engine did not compute, by its own report.
    cached_tokens: int
    # The time at which the request was sent, by time.monotonic.
    begun_s: float
    # The time from the sending to the first token.
    first_token_s: float
    tokens: list[int]


def reuse(answers: Iterable[Answer]) -> float:
    """Return the share of the prompts' tokens that engines reused."""
    prompts = cached = 0
    for answer in answers:
        prompts += answer.prompt_tokens
        cached += answer.cached_tokens
    return cached / prompts if prompts else 0.0


def by_worker(answers: Iterable[Answer], workers: int) -> list[int]:
    """Return how many of the answers each worker gave."""
    counts = Counter(answer.worker for answer in answers)
    return [counts[f"w{number}"] for number in range(workers)]


class Client:
    """A sender of prompts to a router or, without a router, to the engine that the hash of the session picks."""

    def __init__(self, http: aiohttp.ClientSession, router_url: str | None, engine_urls: Sequence[str]) -> None:
        """Create the client.

        Args:
            http: The session that requests are sent with.
            router_url: The router's URL; None to send straight to the engines.
            engine_urls: The engines' URLs, in the order of the workers' numbers.
        """
        self.http = http
        self._router_url, self._engine_urls = router_url, engine_urls
        self.answers: list[Answer] = []
        # Counts of requests without a complete answer, by the kind of failure.
        self.failures: Counter[str] = Counter()
        self.last_error = ""

    async def complete(self, session: str, turn: int, prompt: list[int], answer_tokens: int) -> Answer | None:
        """Send a prompt, and keep and return its answer; return None if the request failed."""
        begun_s = time.monotonic()
        for worker, url in self._targets(session):
            try:
                answer = await self._stream(url, worker, session, turn, prompt, answer_tokens, begun_s)
            except aiohttp.ClientConnectorError:
                # Nothing listens there; a client with a list of engines then takes the next one.
                continue
            except (aiohttp.ClientError, OSError, KeyError, ValueError) as error:
                # Count by the error's class alone, as messages differ from request to request.
                self.failures[type(error).__name__] += 1
                self.last_error = str(error)[:300]
                return None
            self.answers.append(answer)
            return answer
        self.failures["no engine listens"] += 1
        return None

    def _targets(self, session: str) -> list[tuple[str, str]]:
        """Return worker and URL of every possible target of a session, the preferred one first (rendezvous hashing)."""
        if self._router_url is not None:
            return [("", self._router_url)]
        workers = [(f"w{number}", url) for number, url in enumerate(self._engine_urls)]
        return sorted(workers, key=lambda worker: hashlib.sha256(f"{session}/{worker[0]}".encode()).digest())

    async def _stream(
        self, url: str, worker: str, session: str, turn: int, prompt: list[int], answer_tokens: int, begun_s: float
    ) -> Answer:
        """Return the answer of a complete stream; raise ValueError if the stream ended early."""
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        tokens: list[int] = []
        usage: dict[str, Any] = {}
        first_token_s = 0.0
        async with self.http.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise ValueError(f"status {response.status}: {(await response.text())[:120]}")
            worker = worker or response.headers[WORKER_HEADER]
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                for choice in chunk.get("choices", ()):
                    tokens += choice.get("token_ids") or ()
                first_token_s = first_token_s or (time.monotonic() - begun_s if tokens else 0.0)
                usage = chunk.get("usage") or usage
        if len(tokens) != answer_tokens or not usage:
            raise ValueError(f"the stream ended after {len(tokens)} of {answer_tokens} tokens")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Answer(session, turn, worker, usage["prompt_tokens"], cached, begun_s, first_token_s, tokens)


class Chat:
    """A conversation: each prompt is the previous prompt, its answer, and new text."""

    def __init__(self, name: str, prompt: list[int], new_tokens: int, rng: Random) -> None:
        self._name, self._prompt, self._new_tokens, self._rng = name, prompt, new_tokens, rng
        self._turn = 0

    async def next_turn(self, client: Client, answer_tokens: int) -> bool:
        """Send the next prompt; return whether it was answered."""
        self._turn += 1
        answer = await client.complete(self._name, self._turn, self._prompt, answer_tokens)
        if answer is None:
            return False
        self._prompt = [*self._prompt, *answer.tokens, *random_tokens(self._rng, self._new_tokens)]
        return True
