# SPDX-License-Identifier: Apache-2.0
"""Wiring: from settings to a serving process, and back down in order. The only place that names clocks and chance."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import random
import resource
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import uvicorn
import zmq
from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector

from kvrouter.router.api.http.asgi import Outer, build_api
from kvrouter.router.api.http.hot_protocol import hot_protocol
from kvrouter.router.api.http.limited_protocol import HttpLimits
from kvrouter.router.api.ports import CorePort, TokensPort
from kvrouter.router.common.errors import SettingError, StartError
from kvrouter.router.common.jit import progress
from kvrouter.router.common.shutdown import Shutdown, take_waiting
from kvrouter.router.common.task_supervisor import TaskSupervisor
from kvrouter.router.common.version import VERSION
from kvrouter.router.config.cautions import open_to_all
from kvrouter.router.config.settings import Config, Origin, without_password
from kvrouter.router.discovery.discovery import Discovery
from kvrouter.router.discovery.sources import sources_of
from kvrouter.router.index.store import IndexStore, StoreError
from kvrouter.router.placement.placer import Placer
from kvrouter.router.proxy.admission import Admission
from kvrouter.router.proxy.proxy import Proxy
from kvrouter.router.proxy.upstream.pool import KEEP_IDLE_S, Pool
from kvrouter.router.quality.quality_metrics import QualityMetrics
from kvrouter.router.quality.request_watch import Quality
from kvrouter.router.redis_client.connection import StoreUnavailable, parse_url
from kvrouter.router.redis_client.embedded_valkey import EmbeddedStore, EmbeddedStoreError
from kvrouter.router.server.sibling_metrics import SiblingMetrics
from kvrouter.router.server.warm_up import warm
from kvrouter.router.streams.router_core import Core
from kvrouter.router.telemetry.log_format import set_up_logs
from kvrouter.router.telemetry.metrics import Metrics
from kvrouter.router.tokens.engine.client import Engine
from kvrouter.router.tokens.engine.verification import LocalMaker
from kvrouter.router.tokens.tokenizer import TextTokenizer
from kvrouter.router.workers.allow_list import AllowList
from kvrouter.router.workers.model_names import parse_tokenizers

if TYPE_CHECKING:
    from kvrouter.router.quality.tracing import Tracing

log = logging.getLogger(__name__)

# Longer than the usual keep-alive of clients and load balancers (60 s), so that they close first and no request meets
# a closed connection.
KEEP_ALIVE_S = 75
# As many open files again as clients have, for Redis, engines (six a worker) and the libraries' own.
FILES_PER_CONNECTION = 2
# A worker with the patch has two connections, a snapshot under way, a look for another life, and a monitor's pair for each. ZMQ's
# own limit of 1,023 would refuse some of a hundred workers.
SOCKETS_PER_WORKER = 10
SPARE_SOCKETS = 64
# Compiling takes half a minute on a slow machine: somebody who waits reads a line as often as this.
WARM_LOOK_S = 2.0
# A private server that died is noticed by this; questions are answered from memory meanwhile.
STORE_CHECK_S = 1.0
# Tells a part that the supervisor had a second signal. Not SIGTERM, which a service manager may send to all processes at once.
HURRY = signal.SIGINT
# The data directory's lock admits one router, so its leases need no name of their own, and a restart takes over at once.
PRIVATE_TOKEN = "private"


def build_app(
    core: CorePort, placing: Placer, config: Config, metrics: Metrics, tokens: TokensPort | None = None
) -> Outer:
    """The HTTP API on any object with the core's interface; nothing is proxied."""
    return build_api(core, placing, config, metrics, time.perf_counter, tokens)


def new_selection_id() -> str:
    """Nobody can guess it, so nobody can end another's reservation."""
    return secrets.token_hex(16)


def build_router(
    core: Core,
    placing: Placer,
    admission: Admission,
    tokens: TextTokenizer,
    discovery: Discovery,
    config: Config,
    metrics: Metrics,
    quality: Quality,
    shutdown: Shutdown,
) -> Outer:
    """The HTTP API and the proxy, on the running loop. `close` its proxy at the end."""
    proxy = Proxy(
        placing=placing,
        tokens=tokens,
        resolve=core.resolve,
        registrations=core.registrations,
        admission=admission,
        pool=Pool(asyncio.get_running_loop()),
        metrics=metrics,
        quality=quality,
        allowed=AllowList(config.allow_hosts),
        silence_s=config.answer_timeout_s,
        worker_key=config.worker_api_key,
        has_own_key=config.api_key is not None,
    )
    return build_api(
        core, placing, config, metrics, time.perf_counter, tokens, proxy, quality.tracing, discovery, shutdown
    )


class ProcessPart(msgspec.Struct, frozen=True):
    """Which of several processes behind one port this one is. listener: the descriptor of the listening socket; token: names
    the process in leases; folder: where the processes' own sockets are."""

    number: int
    listener: int
    token: str | None
    folder: str


async def serve(config: Config, origin: Origin, part: ProcessPart | None = None) -> None:
    """Runs a router until SIGTERM or SIGINT; one that is a part also until its supervisor is gone. origin: where config came from.
    Raises SettingError and StartError before it serves."""
    set_up_logs(config.log_level, config.log_format, sys.stderr)
    allow_descriptors()
    with _stopping_on_signals(config.shutdown_delay_s, part is not None) as stopping:
        if part is not None:
            asyncio.get_running_loop().add_reader(sys.stdin.fileno(), stopping.on_supervisor_gone)
        async with AsyncExitStack() as stack:
            # First, as it is what fails most often, and fails fast.
            opened = bound_socket(config.host, config.port) if part is None else socket.socket(fileno=part.listener)
            listener = stack.enter_context(contextlib.closing(opened))
            server = await stopping.unless_stopped(_start(config, origin, part, listener, stopping.shutdown, stack))
            if server is not None:
                stopping.server = server
                try:
                    await server.serve(sockets=[listener])
                except OSError as error:
                    # Two starting routers can both bind the port; the second to listen finds out here.
                    raise _port_taken(config.host, config.port, error) from None
    log.info("stopped")


def allow_descriptors() -> None:
    """As many open files as the system grants: each worker takes some ten, and the usual soft limit is 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _start(
    config: Config,
    origin: Origin,
    part: ProcessPart | None,
    listener: socket.socket,
    shutdown: Shutdown,
    stack: AsyncExitStack,
) -> _Server:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    metrics = Metrics(registry)
    count_callbacks(metrics)
    supervisor = TaskSupervisor(clock=time.monotonic, rng=random.Random(), failures=metrics.task_failures)
    # Settings first: a wrong one ends the start before anything is compiled or started.
    measures = QualityMetrics(metrics)
    tracing = tracing_of(config, measures)
    if tracing is not None:
        stack.push_async_callback(tracing.close)
    local = await checked_settings(config)
    if part is None:
        log_cautions(config)
    token = PRIVATE_TOKEN if config.redis is None else None
    if part is not None:
        token = part.token
    sources = sources_of(
        config,
        origin,
        os.environ,
        alone=token is not None and (part is None or part.number == 0),
        session=await stack.enter_async_context(aiohttp.ClientSession()),
        rng=random.Random(),
    )
    if part is not None:
        siblings = SiblingMetrics(Path(part.folder), part.number, config.processes, metrics.own_page)
        stack.push_async_callback(siblings.close)
        await siblings.start()
        metrics.page = siblings.page
    try:
        url = config.redis
        if url is None:
            url = await stack.enter_async_context(private_store(Path(config.data_dir), supervisor))
        store = await IndexStore.open(url)
        stack.push_async_callback(store.close)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        context.set(zmq.MAX_SOCKETS, SOCKETS_PER_WORKER * config.max_workers + SPARE_SOCKETS)
        stack.callback(context.destroy, linger=0)
        engine_headers = {} if config.worker_api_key is None else {"authorization": f"Bearer {config.worker_api_key}"}
        http = await stack.enter_async_context(aiohttp.ClientSession(headers=engine_headers))
        core = Core(
            store=store,
            config=config,
            metrics=metrics,
            zmq_context=context,
            clock=time.monotonic,
            rng=random.Random(),
            http=http,
            token=token,
            supervisor=supervisor,
        )
        stack.push_async_callback(core.stop)
        admission = Admission(core.drains, time.monotonic, metrics)
        core.listen(admission.on_view)
        placing = Placer(
            core,
            config=config,
            metrics=metrics,
            clock=time.monotonic,
            rng=random.Random(),
            new_id=new_selection_id,
            unavailable=admission.problem,
            prefillers=core.prefill_workers,
            servers=store.servers,
            process=core.token,
            supervisor=supervisor,
        )
        core.on_engine_load = placing.engine_said
        await warm_up()
        await core.start()
        stack.push_async_callback(placing.stop)
        placing.start()
        discovery = Discovery(
            core.fleet,
            core.registrations,
            sources,
            session=http,
            allowed=AllowList(config.allow_hosts),
            metrics=metrics,
            clock=time.monotonic,
            rng=random.Random(),
            supervisor=supervisor,
        )
        stack.push_async_callback(discovery.stop)
        await discovery.start()
    except EmbeddedStoreError as error:
        raise StartError(str(error)) from None
    except StoreError as error:
        raise StartError(_redis_problem(config, error)) from None
    tokens = TextTokenizer(
        models=core.models,
        engines=lambda model: [Engine(*known) for known in core.engine_urls(model).items()],
        session=await stack.enter_async_context(
            # An engine that closes what is idle must not look like one that died of a prompt.
            aiohttp.ClientSession(headers=engine_headers, connector=aiohttp.TCPConnector(keepalive_timeout=KEEP_IDLE_S))
        ),
        local=local,
        timeout_s=config.tokenize_timeout_s,
        metrics=metrics,
        clock=time.monotonic,
        rng=random.Random(),
        supervisor=supervisor,
    )
    stack.push_async_callback(tokens.stop)
    tokens.start()
    quality = Quality(metrics, measures, time.monotonic, tracing)
    core.listen(quality.on_view)
    outer = build_router(core, placing, admission, tokens, discovery, config, metrics, quality, shutdown)
    assert outer.proxy is not None
    stack.callback(outer.proxy.close)
    settings = uvicorn.Config(
        outer,
        loop="none",
        http=hot_protocol(outer, HttpLimits(max_connections=_connections_possible(HttpLimits().max_connections))),
        proxy_headers=False,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=config.drain_s,
    )
    # What lives now lives for long: the collector need not walk it again and again between requests.
    gc.collect()
    gc.freeze()

    def started() -> None:
        workers = len(core.registrations())
        # A supervisor reads the number, and prints the line itself when all its processes serve.
        print(start_line(config, listener, workers) if part is None else workers, flush=True)

    return _Server(settings, started)


def count_callbacks(metrics: Metrics) -> None:
    """Have errors counted that nobody awaits, of timers and of transports; the loop logs them."""

    def count(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # A connection that broke is nobody's bug.
        if not isinstance(context.get("exception"), OSError):
            metrics.internal_errors.labels("callback").inc()
        loop.default_exception_handler(context)

    asyncio.get_running_loop().set_exception_handler(count)


async def checked_settings(config: Config) -> dict[str, LocalMaker]:
    """The tokenizers of the settings, whatever else can be checked without a connection being right. Raises SettingError."""
    if config.redis is not None:
        try:
            parse_url(config.redis)
        except StoreError as error:
            raise SettingError(f"redis is {without_password(config.redis)!r}: {error}") from None
    # In a thread, as a large vocabulary takes a second to load.
    return await asyncio.to_thread(local_tokenizers, config) if config.tokenizers else {}


def log_cautions(config: Config) -> None:
    """Once for all processes of this router."""
    if (caution := open_to_all(config)) is not None:
        log.warning(caution)


def _redis_problem(config: Config, error: StoreError) -> str:
    if config.redis is None:
        return f"the private store: {error}"
    fix = "start it, or correct the URL (--redis); without one, a private server is started"
    return f"Redis at {without_password(config.redis)}: {error}" + (
        f"; {fix}" if isinstance(error, StoreUnavailable) else ""
    )


async def warm_up() -> None:
    """Have all kernels compiled or loaded, and say how far it is where it takes its time."""
    begun = time.monotonic()
    # In a thread, as it takes seconds on the first start of all and a signal must not wait for it.
    working = asyncio.get_running_loop().run_in_executor(None, warm)
    compiled = False
    while not (await asyncio.wait({working}, timeout=WARM_LOOK_S))[0]:
        found = progress()
        if found.missed:
            compiled = True
            log.info("compiling kernels, once", extra={"ready": f"{found.ready} of {found.total}"})
    working.result()
    if compiled:
        log.info("kernels compiled", extra={"seconds": round(time.monotonic() - begun, 1)})


def tracing_of(config: Config, measures: QualityMetrics) -> Tracing | None:
    """Where traces go, None where none are wanted. Raises SettingError."""
    if config.otlp_endpoint is None:
        return None
    try:
        # An extra, and a thread and some megabytes that most routers have no need of.
        from kvrouter.router.quality.tracing import Tracing
    except ImportError as error:
        raise SettingError(
            f"otlp_endpoint needs a package that is not installed ({error.name}): pip install 'hybrid-kv-router[otel]'"
        ) from None
    return Tracing(config.otlp_endpoint, measures.spans)


def local_tokenizers(config: Config) -> dict[str, LocalMaker]:
    """Those of the settings, by model. Raises SettingError."""
    try:
        # An extra, of which most routers have no need.
        from kvrouter.router.tokens.local.local_tokenizer import LocalTokenizer
    except ImportError as error:
        raise SettingError(
            f"tokenizers need a package that is not installed ({error.name}): pip install 'hybrid-kv-router[tokenizer]'"
        ) from None
    found: dict[str, LocalMaker] = {}
    for model, folder in parse_tokenizers(config.tokenizers).items():
        try:
            found[model] = LocalTokenizer(Path(folder), datetime.now)
        except SettingError as error:
            raise SettingError(f"--tokenizer {model}: {error.message}") from None
    return found


def _connections_possible(wanted: int) -> int:
    """`wanted`, or what the limit on open files leaves: without files, nothing is accepted and nothing is connected to."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < wanted * FILES_PER_CONNECTION and (most == resource.RLIM_INFINITY or most > files):
        target = wanted * FILES_PER_CONNECTION
        files = target if most == resource.RLIM_INFINITY else min(target, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
    possible = min(wanted, files // FILES_PER_CONNECTION)
    if possible < wanted:
        log.warning(
            "fewer connections than usual: the limit on open files is low; raise it (ulimit -n)",
            extra={"connections": possible, "open_files": files},
        )
    return possible


def start_line(config: Config, listener: socket.socket, workers: int) -> str:
    """What a user reads when the router is up: where it listens, where its data is, and what to do next."""
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    if config.redis is None:
        data = f"its index is in {Path(config.data_dir).resolve()}"
    else:
        data = f"its index is in {without_password(config.redis)}"
    at = "" if (host, port) == ("127.0.0.1", Config().port) else f" --url http://{shown}:{port}"
    if workers or config.workers or config.workers_file or config.kubernetes_selector:
        following = f"`kvrouter workers{at}` shows the workers"
    else:
        following = f"no worker yet: POST /register, or start with --worker, --workers-file or --kubernetes-selector; API: http://{shown}:{port}/docs"
    return f"kvrouter {VERSION} listens on http://{shown}:{port}; {data}; {following}"


def bound_socket(host: str, port: int) -> socket.socket:
    """A TCP socket bound to host and port, not listening yet. Raises SettingError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise SettingError(f"host {host!r} is no address of this machine ({error.strerror}); write one") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _port_taken(host, port, error) from None
    return listener


def _port_taken(host: str, port: int, error: OSError) -> SettingError:
    why = error.strerror or error
    return SettingError(
        f"cannot listen on {host} port {port} ({why}); stop what listens there, or pass another --host or --port"
    )


@asynccontextmanager
async def private_store(data_dir: Path, supervisor: TaskSupervisor) -> AsyncIterator[str]:
    """The private Valkey server of `data_dir`, kept running; yields its URL."""
    store = await EmbeddedStore.start(data_dir)
    keeper = supervisor.start("private_store", partial(_keep_running, store))
    try:
        yield store.url
    finally:
        keeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeper
        await store.stop()


async def _keep_running(store: EmbeddedStore) -> None:
    told = ""
    while True:
        await asyncio.sleep(STORE_CHECK_S)
        try:
            if await store.ensure_running():
                log.warning("private store was gone and was started again", extra={"data_dir": store.data_dir})
            told = ""
        except (EmbeddedStoreError, StoreError, OSError) as error:
            if str(error) != told:
                told = str(error)
                log.error("private store cannot be started", extra={"error": told})


class _Server(uvicorn.Server):
    """uvicorn that tells when it serves and leaves the signals to us: it would take them over and raise them once more
    when HTTP is down, in the middle of our own way down."""

    def __init__(self, config: uvicorn.Config, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._tell = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._tell()

    def end(self) -> None:
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await take_waiting(sockets or [], lambda: self.force_exit)
        await super().shutdown(sockets=sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Stopping:
    """What a signal does: before the server serves it cancels the start, after that it ends the server; the second one at once.

    delay_s: for so long it goes on taking connections, of those who do not know yet. part: whether a supervisor sends them."""

    def __init__(self, delay_s: float, *, part: bool) -> None:
        self.shutdown = Shutdown()
        self._delay_s = delay_s
        self._part = part
        self.server: _Server | None = None
        self._starting: asyncio.Task[_Server] | None = None

    def on_signal(self, number: int) -> None:
        server = self.server
        if self.shutdown.begun:
            if server is not None and (number == HURRY or not self._part):
                # Without waiting for open connections.
                server.should_exit = server.force_exit = True
            return
        self.shutdown.begun = True
        if server is not None:
            log.info("stopping", extra={"delay_s": self._delay_s, "drain_s": server.config.timeout_graceful_shutdown})
            asyncio.get_running_loop().call_later(self._delay_s, server.end)
        elif self._starting is not None:
            self._starting.cancel()

    def on_supervisor_gone(self) -> None:
        """Nothing more comes on stdin, so it was closed."""
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        log.warning("the supervisor is gone")
        self.on_signal(signal.SIGTERM)

    async def unless_stopped(self, start: Coroutine[Any, Any, _Server]) -> _Server | None:
        """The started server, or None when a signal came first."""
        self._starting = asyncio.get_running_loop().create_task(start)
        try:
            server = await self._starting
            return None if self.shutdown.begun else server
        except asyncio.CancelledError:
            if self.shutdown.begun:
                return None
            raise


@contextmanager
def _stopping_on_signals(delay_s: float, part: bool) -> Iterator[_Stopping]:
    loop = asyncio.get_running_loop()
    stopping = _Stopping(delay_s, part=part)
    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, stopping.on_signal, number)
    try:
        yield stopping
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
