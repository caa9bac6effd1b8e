# SPDX-License-Identifier: Apache-2.0
"""`kvrouter serve` as a process, in front of engines that fail.

OpenAI's own client and many clients at once send requests.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.exchange import exchange, listens
from tests.support.fleet import until
from tests.support.router_process import RouterProcess
from tests.support.scripted_engine import STREAM_HEAD, Asked, ScriptedEngine, Wire, chunk, hang, plain

pytestmark = pytest.mark.smoke

WAIT_S = 60.0
CHAT = "/v1/chat/completions"
CLIENTS = 8
REQUESTS = 60

ANSWER = {
    "id": "c-1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hello"}}],
    "usage": {
        "prompt_tokens": 3,
        "completion_tokens": 1,
        "total_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 2},
    },
}


def event(text: str) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    part = {"id": "c-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return b"data: " + json.dumps(part).encode() + b"\n\n"


async def openai_like(asked: Asked, wire: Wire) -> None:
    """Answer a chat as an engine does, streamed or not.

    The router also requests tokens, which this engine does not know.
    """
    if asked.target != CHAT:
        await plain(b"{}", "404 Not Found")(asked, wire)
        return
    body = json.loads(asked.body)
    if not body.get("stream"):
        await plain(json.dumps(ANSWER).encode())(asked, wire)
        return
    await wire.send(STREAM_HEAD)
    for word in ("one ", "two ", "three"):
        await asyncio.sleep(0.01)
        await wire.send(chunk(event(word)))
    await wire.send(chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n")


@contextmanager
def served(folder: Path, engines: int, *arguments: str) -> Iterator[tuple[RouterProcess, list[ScriptedEngine]]]:
    with ExitStack() as stack:
        scripted_engines = [stack.enter_context(ScriptedEngine(openai_like)) for _ in range(engines)]
        workers = [
            part for n, engine in enumerate(scripted_engines) for part in ("--worker", f"w{n}={engine.url},model=m")
        ]
        flags = ["--health-interval-s", "0.1", "--drain-s", "10", *arguments, *workers]
        yield stack.enter_context(RouterProcess(folder, flags)), scripted_engines


def client_of(router: RouterProcess, **options: Any) -> openai.OpenAI:
    # The client's own retries would hide those of the router.
    return openai.OpenAI(
        base_url=f"http://127.0.0.1:{router.port}/v1", api_key="x", max_retries=0, timeout=WAIT_S, **options
    )


def test_openais_client_finds_an_openai_server(tmp_path: Path) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    with served(tmp_path, 2, "--api-key", "key", "--worker-api-key", "theirs") as (router, engines):
        with pytest.raises(openai.AuthenticationError):
            client_of(router).models.list()
        with client_of(router, default_headers={"authorization": "Bearer key"}) as client:
            assert [model.id for model in client.models.list()] == ["m"]
            assert client.models.retrieve("m").id == "m"
            with pytest.raises(openai.NotFoundError):
                client.models.retrieve("nope")
            answer = client.chat.completions.create(model="m", messages=messages)
            assert answer.choices[0].message.content == "hello"
            stream = client.chat.completions.create(model="m", messages=messages, stream=True)
            assert "".join(part.choices[0].delta.content or "" for part in stream) == "one two three"
            with pytest.raises(openai.NotFoundError, match="no worker is registered for model 'nope'"):
                client.chat.completions.create(model="nope", messages=messages)
            with pytest.raises(openai.BadRequestError):
                client.post("/chat/completions", body=[], cast_to=object)
        chat_requests = [request for engine in engines for request in chats(engine)]
        assert len(chat_requests) == 2
        # The key also goes with the requests that the router sends on its own account.
        requests = [request for engine in engines for request in engine.asked]
        assert {key for request in requests for key in request.all("authorization") or ["none"]} == {"Bearer theirs"}


def chats(engine: ScriptedEngine) -> list[Asked]:
    """Return the requests of clients, without those by which the router gets the tokens of some chats."""
    return [asked for asked in engine.asked if asked.target == CHAT and b"return_token_ids" not in asked.body]


class Load:
    """Clients in threads, each sending one request after another.

    The outcomes are counted over all clients.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self.outcomes: Counter[str] = Counter()
        self.retried: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        for n in range(REQUESTS):
            outcome, retried = self._one(n % 2 == 0)
            with self._lock:
                self.outcomes[outcome] += 1
                if retried:
                    self.retried[retried.rpartition(" ")[2]] += 1

    def _one(self, streamed: bool) -> tuple[str, str | None]:
        try:
            answer = exchange(self._port, "POST", CHAT, {"model": "m", "messages": [], "stream": streamed})
        except http.client.IncompleteRead:
            return "cut", None
        good = answer.content.endswith(b"data: [DONE]\n\n") if streamed else answer.json() == ANSWER
        is_ok = answer.status == 200 and good
        return "ok" if is_ok else f"{answer.status}", answer.headers.get("x-kvrouter-retried")

    @property
    def done(self) -> int:
        return sum(self.outcomes.values())

    def join(self) -> None:
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()


def test_killed_hung_and_slow_engines_lose_no_request_that_can_be_sent_again(tmp_path: Path) -> None:
    async def slow(asked: Asked, wire: Wire) -> None:
        await asyncio.sleep(0.05)
        await openai_like(asked, wire)

    with served(tmp_path, 4) as (router, (killed, hung, slowed, sound)):
        load = Load(router.port)
        until(lambda: load.done > 40, "the load runs")
        slowed.script = slow
        killed.kill()
        until(lambda: load.done > 160, "the load goes on")
        hung.script, hung.healthy = hang, False
        load.join()
        # An answer that had begun at the killed engine cannot be taken back: it breaks off, and all others are whole.
        assert set(load.outcomes) <= {"ok", "cut"}, load.outcomes
        assert load.outcomes["cut"] <= CLIENTS
        assert load.outcomes["ok"] >= CLIENTS * REQUESTS - CLIENTS
        assert load.done == CLIENTS * REQUESTS
        assert chats(hung) and chats(slowed) and chats(sound)
        rows = {row["worker_id"]: row for row in router.request("GET", "/workers")["workers"]}
        assert rows["w0"]["closed"] and rows["w1"]["closed"]
        assert not rows["w2"]["closed"] and not rows["w3"]["closed"]
        print(f"outcomes {dict(load.outcomes)}, retried {dict(load.retried)}")
        # The hung engine comes back by its health check and one request.
        hung.script, hung.healthy = openai_like, True
        until(lambda: not router.worker("w1")["closed"], "its health is seen")


def test_a_drained_worker_stays_drained_over_a_restart_of_the_router(tmp_path: Path) -> None:
    with served(tmp_path, 2) as (router, (drained, other)):
        router.request("PATCH", "/workers/w0", {"state": "draining"})
        assert router.worker("w0")["draining"] and "draining" in router.worker("w0")["closed"]
        body = {"model": "m", "messages": []}
        for _ in range(10):
            assert router.request("POST", CHAT, body) == ANSWER
        assert not chats(drained) and len(chats(other)) == 10
        # Start another router on the same data, with the same workers.
        router.__exit__()
        workers = [
            part for n, engine in enumerate((drained, other)) for part in ("--worker", f"w{n}={engine.url},model=m")
        ]
        with RouterProcess(tmp_path, ["--data-dir", str(tmp_path / "data"), *workers]) as again:
            assert again.worker("w0")["draining"]
            again.request("PATCH", "/workers/w0", {"state": "active"})
            assert not again.worker("w0")["draining"]


def test_a_router_that_is_stopped_lets_running_requests_finish(tmp_path: Path) -> None:
    going_on = threading.Event()

    async def held(asked: Asked, wire: Wire) -> None:
        if asked.target != CHAT:
            await openai_like(asked, wire)
            return
        await wire.send(STREAM_HEAD, chunk(event("one")))
        while not going_on.is_set() and not wire.gone.is_set():
            await asyncio.sleep(0.01)
        await wire.send(chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n")

    with served(tmp_path, 1) as (router, (engine,)):
        engine.script = held
        connection = http.client.HTTPConnection("127.0.0.1", router.port, timeout=WAIT_S)
        connection.request("POST", CHAT, json.dumps({"model": "m", "stream": True}))
        answer = connection.getresponse()
        begun = answer.read(20)
        router.signal(signal.SIGTERM)
        until(lambda: not listens(router.port), "nothing new is taken")
        going_on.set()
        assert (begun + answer.read()).endswith(b"data: [DONE]\n\n")
        assert router.wait() == 0
        connection.close()
