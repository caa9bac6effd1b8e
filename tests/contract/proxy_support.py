# SPDX-License-Identifier: Apache-2.0
"""The router's HTTP and its proxy in a thread, on a core that takes the first possible worker.

So tests know which engine is called.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import uvicorn
import uvloop

from kvrouter.contract.tiers import all_on_gpu
from kvrouter.router.app.server.checks import tracing_of
from kvrouter.router.app.server.router_metrics import RouterMetrics
from kvrouter.router.base.common.errors import BadQuestion, NoWorker, UnknownModel, UnknownWorker
from kvrouter.router.base.common.ids import WorkerKey, route_name
from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.index.matching.question import Hit
from kvrouter.router.model.config.live_settings import LiveSettings
from kvrouter.router.model.config.settings import Config
from kvrouter.router.model.upstream.pool import Pool
from kvrouter.router.model.workers.allow_list import AllowList
from kvrouter.router.model.workers.engine_key import EngineKey
from kvrouter.router.model.workers.model_names import ServedModel
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.observe.quality.request_watch import Quality
from kvrouter.router.route.load.prefix_tree import PromptPrefixes
from kvrouter.router.route.owners.response_owners import EngineSign, ResponseOwners
from kvrouter.router.route.placement.candidates import Pin
from kvrouter.router.route.placement.placement_request import PlacementRequest
from kvrouter.router.route.placement.placer import Placer
from kvrouter.router.route.placement.planned_pull import PlannedPull
from kvrouter.router.route.tokens.client_body import ClientBody
from kvrouter.router.route.tokens.prompt_tokens import Prompt
from kvrouter.router.serve.access.access import Access
from kvrouter.router.serve.api.http.deadlines import HttpLimits
from kvrouter.router.serve.api.http.fastapi_app import build_api
from kvrouter.router.serve.api.http.http_connection import connection_factory
from kvrouter.router.serve.proxy.admission import Admission
from kvrouter.router.serve.proxy.proxy import Proxy
from tests.contract.api_support import TinyCore
from tests.contract.served_app import connect
from tests.support.certificates import OverTls
from tests.support.scripted_engine import Script, ScriptedEngine, plain

WAIT_S = 30.0
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
RAW = json.dumps(BODY).encode()
OK = plain(b"ok")


class InOrder(TinyCore):
    """A core with the given registrations, in their order."""

    def __init__(self, registrations: Sequence[Registration]) -> None:
        super().__init__()
        self.registered = {registration.worker: registration for registration in registrations}
        self.draining: set[WorkerKey] = set()

    def models(self) -> list[str]:
        return sorted({worker.model for worker in self.registered})

    def resolve(self, name: str) -> ServedModel:
        model = {"other name": "m"}.get(name, name)
        if model not in self.models():
            raise UnknownModel(f"no worker serves {name!r}")
        return ServedModel(model)

    def drains(self, worker: WorkerKey) -> bool:
        return worker in self.draining


class Placed:
    """A request's placement at a worker, and the calls that the proxy made on it."""

    def __init__(self, hit: Hit, url: str | None, num_tokens: int) -> None:
        self.selection_id = f"{random.getrandbits(128):032x}"
        self.worker = hit.worker
        self.url = url
        self.choice = SimpleNamespace(
            hit=hit,
            best_hit_tokens=hit.tokens,
            prefill_tokens=num_tokens - hit.tokens,
            reason="first fit",
            lost="",
            comparison=None,
            pull=None,
        )
        self.num_tokens = num_tokens
        self.sequences = 1
        self.prefixes = PromptPrefixes([[]])
        self.is_watched = False
        self.placed_s = time.monotonic()
        self.queued_s = 0.0
        self.prefill = None
        self.prefilled_at = None
        self.predicted_tokens = hit.tokens
        # One token more than the hit, as if the worker were computing a block.
        self.expected_tokens = hit.tokens + 1
        self.reused_tokens: int | None = None
        # The calls in order: "first token", "done".
        self.told: list[str] = []
        # How often its record was called.
        self.recorded = 0
        self.output_tokens: int | None = None

    @property
    def pull(self) -> PlannedPull | None:
        return self.choice.pull

    def record(self) -> None:
        self.recorded += 1

    def first_token(self) -> None:
        self.told.append("first token")

    def reused(self, tokens: int) -> None:
        self.reused_tokens = tokens

    def done(self, output_tokens: int | None = None) -> None:
        self.told.append("done")
        self.output_tokens = output_tokens


class FirstFit:
    """A replacement of `Placer` that takes the first registered worker that the question allows.

    The worker reuses all whole blocks of 16 tokens.
    """

    def __init__(self, core: InOrder, unavailable: Callable[[WorkerKey], str | None]) -> None:
        self._core = core
        self._unavailable = unavailable
        self.requests: list[PlacementRequest] = []
        # The pull of each worker's choices, by its id, where the request may name a source.
        self.pulls: dict[str, PlannedPull] = {}
        self.placed: list[Placed] = []

    async def place(self, request: PlacementRequest) -> Placed:
        self.requests.append(request)
        question, why = request.question, ""
        candidates = [r for r in self._core.registrations() if r.worker.model == question.model]
        pinned = request.pinned
        if pinned is not None:
            name = route_name(pinned.worker_id, pinned.dp_rank or 0) if isinstance(pinned, Pin) else pinned
            candidates = [r for r in candidates if r.worker.route_name == name]
            if not candidates:
                raise UnknownWorker("no such worker")
        for registration in candidates:
            worker = registration.worker
            if worker in question.exclude_workers:
                continue
            why = "" if request.is_owned else self._unavailable(worker) or ""
            if not why:
                reused = (question.num_tokens - 1) // 16 * 16
                hit = Hit(worker, all_on_gpu(reused), "live")
                self.placed.append(Placed(hit, registration.url, question.num_tokens))
                pull = self.pulls.get(worker.worker_id)
                if pull is not None and request.may_pull and pull.source not in question.exclude_workers:
                    self.placed[-1].choice.pull = pull
                return self.placed[-1]
        raise NoWorker(f"no worker can take it: {why}")

    def takers(self, models: Sequence[str]) -> list[WorkerKey]:
        registrations = self._core.registrations()
        return [r.worker for r in registrations if r.worker.model in models and not self._unavailable(r.worker)]


class GivenTokens:
    """Tokens for bodies whose `prompt` is a list of ids; the tokens of other bodies are not known."""

    async def prompt(
        self, path: str, model: str, body: ClientBody, *, authorization: str | None = None, space: str = ""
    ) -> Prompt:
        prompt_given = json.loads(body.raw).get("prompt")
        if isinstance(prompt_given, int):
            raise BadQuestion("a prompt is text or ids")
        if not isinstance(prompt_given, list):
            return Prompt(max(1, len(body.raw) // 4), None, "none", reason="no_engine")
        return Prompt(len(prompt_given), np.array(prompt_given, np.int64), "given")


class ProxyServer:
    """A proxy that serves until `close`, over TLS where `OverTls` says so.

    `core` may be changed meanwhile.
    """

    def __init__(
        self, registrations: Sequence[Registration], limits: HttpLimits | None = None, **settings: Any
    ) -> None:
        self.core = InOrder(registrations)
        self.registry = MetricRegistry()
        self.metrics = RouterMetrics(self.registry)
        self._tls = OverTls.now
        if self._tls is not None:
            certificate, key = map(str, self._tls.server)
            settings = {"tls_certificate": certificate, "tls_key": key} | settings
        self._config = Config(**settings)
        self._limits = limits
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port = self._socket.getsockname()[1]
        self.admission = Admission(self.core.drains, time.monotonic, self.metrics.proxy)
        self.placer = FirstFit(self.core, self.admission.problem)
        self.quality = Quality(self.metrics.quality, time.monotonic, tracing_of(self._config, self.metrics.quality))
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._started.wait(WAIT_S)

    @property
    def url(self) -> str:
        return f"http{'' if self._tls is None else 's'}://127.0.0.1:{self.port}"

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        config = self._config
        self.engine_key = EngineKey(config.worker_api_key, AllowList(config.allow_hosts), self.core.registrations)
        self.pool = Pool(self.loop, AllowList(config.allow_hosts))
        # The rest of the API uses a real placer.
        placer = Placer(
            self.core,
            config=config,
            metrics=self.metrics.placement,
            clock=time.monotonic,
            rng=random.Random(0),
            new_id=lambda: "x",
        )
        proxy = self.proxy = Proxy(
            placer=self.placer,  # type: ignore[arg-type]
            tokens=GivenTokens(),
            resolve=self.core.resolve,
            registrations=self.core.registrations,
            ranks=self.core.request_ranks,
            admission=self.admission,
            pool=self.pool,
            metrics=self.metrics.proxy,
            quality=self.quality,
            owners=ResponseOwners(self.metrics.owners, time.monotonic, engine=lambda worker: EngineSign(False, None)),
            allowed=AllowList(config.allow_hosts),
            silence_s=config.answer_timeout_s,
            engine_key=self.engine_key,
            has_own_key=config.api_key is not None,
            shows_hits=config.predicted_hit_header == "on",
            trusts_sources=config.trust_client_kv_sources == "on",
        )
        access = Access(LiveSettings(config), self.metrics.http.access, clock=time.monotonic, wall_clock=time.time)
        app = build_api(
            self.core,
            placer,
            config,
            self.metrics.http,
            time.perf_counter,
            None,
            proxy,
            self.quality.tracing,
            access=access,
        )
        self.server = uvicorn.Server(
            uvicorn.Config(
                app.cold,
                http=connection_factory(app, self._limits, lambda: access.context),  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                log_config=None,
                server_header=False,
                timeout_graceful_shutdown=5,
            )
        )
        self.loop.call_later(0.05, self._started.set)
        await self.server.serve(sockets=[self._socket])
        proxy.close()
        if self.quality.tracing is not None:
            await self.quality.tracing.close()

    def close(self) -> None:
        self.server.should_exit = True
        self._thread.join(WAIT_S)
        self._socket.close()

    def on_loop(self, work: Callable[[], None]) -> None:
        """Run the work on the server's event loop, and wait until it is done."""
        done = threading.Event()

        def run() -> None:
            work()
            done.set()

        self.loop.call_soon_threadsafe(run)
        assert done.wait(WAIT_S)

    def sample(self, name: str, **labels: str) -> float:
        if "worker" in labels:
            labels = {"model": "m", **labels}
        return self.registry.get_sample_value(f"kvrouter_{name}", labels) or 0.0

    def post(
        self, path: str, body: dict[str, Any] | bytes, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Post a body over a new connection; return the status, headers and body of the answer."""
        connection = self.http_client()
        try:
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request("POST", path, raw, {"content-type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def failure(self, *request: Any) -> tuple[int, str, str]:
        """Post as `post` does; return the status of the error, its code, and which workers failed before."""
        status, headers, raw = self.post(*request)
        return status, code(raw), headers.get("x-kvrouter-retried", "")

    def get(self, path: str) -> Any:
        """Return the decoded JSON of the answer."""
        connection = self.http_client()
        try:
            connection.request("GET", path)
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()

    def exchange(self, sent: bytes) -> bytes:
        """Send the bytes, and return everything until the router closes the connection."""
        with self.connect() as client:
            client.sendall(sent)
            return received(client)

    def connect(self) -> socket.socket:
        return connect(self.port, self._tls, WAIT_S)

    def http_client(self) -> http.client.HTTPConnection:
        if self._tls is None:
            return http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        context = self._tls.authority.client()
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=WAIT_S, context=context)


def worker(name: str, url: str | None, model: str = "m", rank: int = 0) -> Registration:
    return Registration(WorkerKey(model, name, rank), url=url)


@contextmanager
def proxying(*registrations: Registration, limits: HttpLimits | None = None, **settings: Any) -> Iterator[ProxyServer]:
    """Run a proxy for these workers, and check at the end that every placement was released."""
    server = ProxyServer(registrations, limits, **settings)
    try:
        yield server
    finally:
        server.close()
    assert all("done" in placed.told for placed in server.placer.placed), "load that nobody releases"


@contextmanager
def fleet(*scripts: Script, limits: HttpLimits | None = None, **settings: Any) -> Iterator[tuple[Any, ...]]:
    """Run a router and one engine for each script, as workers w0, w1 and so on; yield (router, engine, ...)."""
    with ExitStack() as stack:
        engines = [stack.enter_context(ScriptedEngine(script)) for script in scripts]
        workers = [worker(f"w{n}", engine.url) for n, engine in enumerate(engines)]
        yield (stack.enter_context(proxying(*workers, limits=limits, **settings)), *engines)


def received(client: socket.socket) -> bytes:
    """Return everything until the end of the connection."""
    # A bytearray, because bytes would be copied for each piece, and over TLS the pieces are small.
    whole = bytearray()
    while piece := client.recv(1024**2):
        whole += piece
    return bytes(whole)


def code(answer: bytes) -> str:
    return str(json.loads(answer)["error"]["code"])


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait up to 30 s for the condition."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not in {WAIT_S:g} s: {what}"
        time.sleep(0.005)
