# SPDX-License-Identifier: Apache-2.0
"""A core that has only the API's Protocol, and a client on a socket pair, for tests of HTTP shapes.

Other tests prove the numbers, with the real core.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import socket
from collections.abc import Callable, Collection, Sequence
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np
from uvicorn.server import ServerState

from kvrouter.contract.hand_overs import HandOverPart
from kvrouter.contract.hits import GroupCover
from kvrouter.contract.worker_status import Recovery, TokensStatus, WorkerStatus
from kvrouter.events.patch.messages import PeerAddress
from kvrouter.router.base.common.errors import UnknownModel
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.follow.feed.watch_metrics import WatchMetrics
from kvrouter.router.index.matching.cache_writes import CacheWrites, ModelWrites
from kvrouter.router.index.matching.question import Hit, Limiter, Question
from kvrouter.router.model.config.settings import Config
from kvrouter.router.model.kvcache.catalog import GroupRule
from kvrouter.router.model.kvcache.resume_rule import ResumeRule
from kvrouter.router.model.workers.model_names import ServedModel
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.request_rank import request_ranks
from kvrouter.router.model.workers.role import HandoverWay, Role
from kvrouter.router.observe.decisions.decision_log import DecisionLog
from kvrouter.router.observe.decisions.watch import Watch
from kvrouter.router.observe.history.history_keeper import HistoryKeeper
from kvrouter.router.route.placement.placement_metrics import PlacementMetrics
from kvrouter.router.route.placement.placer import Placer
from kvrouter.router.route.tokens.client_body import ClientBody
from kvrouter.router.route.tokens.prompt_tokens import Prompt
from kvrouter.router.serve.api.http.fastapi_app import build_api
from kvrouter.router.serve.api.http.http_api import HttpApi
from kvrouter.router.serve.api.http.http_connection import connection_factory
from kvrouter.router.serve.api.http_metrics import HttpMetrics
from tests.support.bare_services import bare_feed

HASH_BLOCK_SIZE = 16


def status(worker: WorkerKey, url: str | None) -> WorkerStatus:
    return WorkerStatus(
        worker_id=worker.worker_id,
        dp_rank=worker.dp_rank,
        model=worker.model,
        url=url,
        state="live",
        state_age_s=3.5,
        credited=True,
        approximate=False,
        reason="",
        epoch="e1",
        seq=7,
        catalog=None,
        catalog_source="learned",
        hash_scheme="sha256 (verified)",
        residency={"g0:GPU": 3},
        lag_ms=0.5,
        gaps=0,
        recovery=Recovery(missed_batches=2),
        last_event_age_s=1.5,
    )


class TinyCore:
    """A core that satisfies CorePort with fixed answers."""

    def __init__(self, hits: Sequence[Hit] = ()) -> None:
        # The hits of every answer.
        self.hits_known = list(hits)
        self.caches = CacheWrites()
        # The questions and registrations that came in.
        self.asked: list[Question] = []
        self.registered: dict[WorkerKey, Registration] = {}
        # Raised by most calls if set.
        self.fail: Exception | None = None
        self.degraded: list[str] = []
        self.warned: list[str] = []
        self.unready: str | None = None
        # Where engines lend blocks.
        self.peers: dict[WorkerKey, PeerAddress] = {}

    def _maybe_fail(self) -> None:
        if self.fail is not None:
            raise self.fail

    async def change(
        self, worker: WorkerKey, change: Callable[[Registration | None], Registration | None]
    ) -> Registration | None:
        self._maybe_fail()
        registration = change(self.registered.get(worker))
        if registration is not None:
            self.registered[worker] = registration
        return registration

    async def unregister(self, worker_id: str, dp_rank: int | None = None, model: str | None = None) -> int:
        self._maybe_fail()
        gone = [
            worker
            for worker in self.registered
            if worker.worker_id == worker_id and dp_rank in (None, worker.dp_rank) and model in (None, worker.model)
        ]
        for worker in gone:
            del self.registered[worker]
        return len(gone)

    def registrations(self) -> list[Registration]:
        return list(self.registered.values())

    def statuses(self, worker_id: str | None = None) -> list[WorkerStatus]:
        self._maybe_fail()
        shown = {worker: r for worker, r in self.registered.items() if worker_id in (None, worker.worker_id)}
        return [status(worker, r.url) for worker, r in shown.items()]

    def hit_table(self, question: Question) -> None:
        return None

    def ask(self, question: Question) -> list[Hit]:
        self._maybe_fail()
        if question.model not in self.models():
            raise UnknownModel(f"no worker serves {question.model!r}")
        self.asked.append(question)
        return self.hits_known

    async def hash_ahead(self, question: Question) -> None:
        pass

    def hits(self, question: Question) -> list[Hit]:
        return self.ask(question)

    def url(self, worker: WorkerKey) -> str | None:
        return "http://w:8000"

    def is_draining(self, worker: WorkerKey) -> bool:
        registration = self.registered.get(worker)
        return registration is not None and registration.draining

    def given_id(self, worker: WorkerKey) -> str | int:
        registration = self.registered.get(worker)
        return worker.worker_id if registration is None else registration.given_id

    def sent(self, question: Question, worker: WorkerKey) -> None:
        pass

    def prefill_workers(self, model: str) -> frozenset[WorkerKey]:
        return frozenset(worker for worker, r in self.registered.items() if r.role is Role.PREFILL)

    def request_ranks(self) -> dict[WorkerKey, int]:
        return request_ranks(self.registered.values(), {})

    def handover(self, worker: WorkerKey) -> HandoverWay:
        registration = self.registered.get(worker)
        return HandoverWay.KV_TRANSFER_PARAMS if registration is None else registration.handover

    def workers(self) -> list[WorkerKey]:
        return [hit.worker for hit in self.hits_known]

    def models(self) -> list[str]:
        return ["m"]

    def resolve(self, name: str) -> ServedModel:
        return ServedModel("m", "style", frozenset({"w0"})) if name == "adapter" else ServedModel(name)

    def names(self) -> list[str]:
        return self.models()

    def writes(self, model: str) -> ModelWrites:
        return self.caches.of(model)

    def take_pool_sizes(self) -> None:
        pass

    def hash_block_size(self, model: str) -> int:
        if model not in self.models():
            raise UnknownModel(f"no worker serves {model!r}")
        return HASH_BLOCK_SIZE

    def peer(self, worker: WorkerKey) -> PeerAddress | None:
        return self.peers.get(worker)

    def resume_rule(self, worker: WorkerKey) -> ResumeRule | None:
        return ResumeRule(HASH_BLOCK_SIZE, None)

    def readiness(self) -> str | None:
        return self.unready

    def health(self) -> list[str]:
        return self.degraded

    def cautions(self) -> list[str]:
        return self.warned


class TinyTokens:
    """Tokens that satisfy TokensPort: one for each byte of the prompt, after a moment; some prompts fail."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, Any]] = []

    async def prompt(
        self,
        path: str,
        model: str,
        body: ClientBody,
        *,
        authorization: str | None = None,
        counts: bool = True,
        space: str = "",
    ) -> Prompt:
        sent = json.loads(body.raw)
        self.asked.append((path, model, sent))
        await asyncio.sleep(0.02)
        text = sent.get("prompt") or "chat"
        if text == "refused":
            return Prompt(1, None, "none", "the template says no", reason="refused", refused=True)
        if text == "unknown":
            return Prompt(1000, None, "none", "no engine to ask", reason="no_engine")
        if text == "bug":
            raise RuntimeError("a bug")
        return Prompt(len(text), np.frombuffer(text.encode(), np.uint8).astype(np.int64), "render")

    def status(self, model: str, url: str | None) -> TokensStatus:
        return TokensStatus("render" if url else "none", "" if url else "it has no url")

    def health(self) -> list[str]:
        return ["tokens differ"]


def hit(worker_id: str, gpu: int, cpu: int, disk: int, rank: int = 0, reason: str = "") -> Hit:
    """Return a hit with a group and a limit, as `explain` shows them."""
    return Hit(
        WorkerKey("m", worker_id, rank),
        (gpu, cpu, disk),
        "live",
        reason,
        Limiter(1, "sliding_window", GroupRule.SLIDING_WINDOW, 64, ""),
        groups=(GroupCover(0, "full_attention", disk),),
    )


class Answer(msgspec.Struct):
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, str]:
        """The error of the body, whose shape is checked: exactly OpenAI's three fields, no internals."""
        body = msgspec.msgpack.decode(self.body) if "msgpack" in self.headers["content-type"] else self.json()
        assert set(body) == {"error"}
        error: dict[str, str] = body["error"]
        assert set(error) == {"message", "type", "code"}
        assert all(isinstance(value, str) and value for value in error.values())
        assert "Traceback" not in error["message"] and "\n" not in error["message"]
        return error


class TinyHandOvers:
    """Hand-overs that satisfy HandOverPort: one worker takes over, and every number but 0 is known."""

    def __init__(self) -> None:
        self.begun: list[tuple[Any, ...]] = []

    async def begin(
        self,
        worker_id: str,
        dp_rank: int | None,
        model: str | None,
        to: Collection[str] | None,
        max_bytes: int,
        within_s: float,
    ) -> tuple[int, list[HandOverPart]]:
        self.begun.append((worker_id, dp_rank, model, to, max_bytes, within_s))
        return 7, await self.progress(7)

    async def progress(self, number: int) -> list[HandOverPart]:
        return [HandOverPart(worker_id="w1", dp_rank=0, model="m")] if number else []

    async def stop(self, number: int) -> list[HandOverPart]:
        return await self.progress(number)


def build(
    core: TinyCore, clock: Callable[[], float] = lambda: 0.0, tokens: TinyTokens | None = None, **settings: Any
) -> tuple[HttpApi, MetricRegistry]:
    registry, config = MetricRegistry(), Config(**settings)
    ids = (f"s{number}" for number in itertools.count())
    # The feed does not use the test's clock, because some tests count how often that is read.
    feed = bare_feed(lambda: 0.0)
    decisions = DecisionLog(config.decisions_kept, feed, lambda: 0.0, WatchMetrics(MetricRegistry()))
    placer = Placer(
        core,
        record=decisions.record,
        config=config,
        metrics=PlacementMetrics(registry),
        clock=clock,
        rng=random.Random(1),
        new_id=lambda: next(ids),
        prefillers=core.prefill_workers,
    )
    history = HistoryKeeper(placer.traffic, writer="test", clock=lambda: 0.0, wall_clock=lambda: 0.0)
    metrics, watch = HttpMetrics(registry), Watch(feed, decisions)
    api = build_api(
        core, placer, config, metrics, clock, tokens, watch=watch, history=history, hand_overs=TinyHandOvers()
    )
    return api, registry


async def exchange(app: HttpApi, sent: bytes, *, hang_up: bool = False) -> bytes:
    """Send these bytes to a new connection of `app`, and return what it sends until it closes."""
    ours, theirs = socket.socketpair()
    state = ServerState()
    factory = connection_factory(app)
    await asyncio.get_running_loop().connect_accepted_socket(lambda: factory(server_state=state), ours)
    reader, writer = await asyncio.open_connection(sock=theirs)
    writer.write(sent)
    if hang_up:
        writer.write_eof()
    received = await reader.read()
    writer.close()
    return received


async def ask_app(
    app: HttpApi,
    method: str,
    path: str,
    body: bytes | list[bytes] = b"",
    headers: dict[str, str] | None = None,
    query: str = "",
    with_length: bool = True,
    host: str = "localhost",
) -> Answer:
    """Send one request on a new connection.

    A list of bytes is sent as a chunked body, which has no content-length.
    """
    target = quote(path) + (f"?{query}" if query else "")
    lines = [f"{method} {target} HTTP/1.1".encode(), f"host: {host}".encode(), b"connection: close"]
    lines += [f"{name}: {value}".encode("latin-1") for name, value in (headers or {}).items()]
    if isinstance(body, list):
        lines.append(b"transfer-encoding: chunked")
        content = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in body if chunk) + b"0\r\n\r\n"
    else:
        content = body
        if with_length:
            lines.append(b"content-length: %d" % len(body))
    received = await exchange(app, b"\r\n".join([*lines, b"", content]))
    head, _, answered = received.partition(b"\r\n\r\n")
    status, *fields = head.split(b"\r\n")
    fields_sent = (field.decode("latin-1").partition(": ") for field in fields)
    answer = Answer(int(status.split()[1]), {name.lower(): value for name, _, value in fields_sent}, answered)
    # Answers to HEAD, and answers with status 304, have no body.
    assert method == "HEAD" or answer.status == 304 or int(answer.headers["content-length"]) == len(answered)
    return answer


def call(app: HttpApi, method: str, path: str, body: Any = None, **more: Any) -> Answer:
    """Call `ask_app` in a new event loop.

    Bytes and a tuple of bytes (chunks) are sent unchanged, None is no body, and everything else is sent as JSON.
    """
    if body is None:
        raw: bytes | list[bytes] = b""
    elif isinstance(body, bytes):
        raw = body
    elif isinstance(body, tuple):
        raw = list(body)
    else:
        raw = json.dumps(body).encode()
    return asyncio.run(ask_app(app, method, path, raw, **more))
