# SPDX-License-Identifier: Apache-2.0
"""Wiring: from settings to a serving process, and back down in order. Only this module names clocks and randomness."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import random
import resource
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import uvicorn
import zmq
from prometheus_client import PlatformCollector, ProcessCollector

from kvrouter.router.access.access import Access
from kvrouter.router.api.decision_reply import find_decision
from kvrouter.router.api.http.deadlines import HttpLimits
from kvrouter.router.api.http.fastapi_app import build_api
from kvrouter.router.api.http.http_api import HttpApi
from kvrouter.router.api.http.http_connection import connection_factory
from kvrouter.router.common.errors import StartError
from kvrouter.router.common.random_ids import RandomIds
from kvrouter.router.common.shutdown import Shutdown
from kvrouter.router.common.task_supervisor import TaskSupervisor
from kvrouter.router.config.loading import Origin
from kvrouter.router.config.settings import Config, without_password
from kvrouter.router.core.router_core import Core
from kvrouter.router.diagnosis.diagnosis import Diagnosis
from kvrouter.router.discovery.discovery import Discovery
from kvrouter.router.discovery.sources import sources_of
from kvrouter.router.index.store import IndexStore
from kvrouter.router.placement.placer import Placer
from kvrouter.router.proxy.admission import Admission
from kvrouter.router.proxy.proxy import Proxy
from kvrouter.router.quality.access_log import set_up_access_log
from kvrouter.router.quality.request_watch import Quality
from kvrouter.router.redis_client.embedded_valkey import EmbeddedStoreError
from kvrouter.router.redis_client.errors import StoreError, StoreUnavailable
from kvrouter.router.server.checks import log_cautions, patch_client_secret, tracing_of
from kvrouter.router.server.listener import bound_socket, port_taken, start_line
from kvrouter.router.server.memory_release import release_memory, trim_function
from kvrouter.router.server.private_store import private_store
from kvrouter.router.server.router_metrics import RouterMetrics
from kvrouter.router.server.service_manager import announce
from kvrouter.router.server.siblings import Siblings
from kvrouter.router.server.stopping import Beside, Server, stopping_on_signals
from kvrouter.router.telemetry.log_format import set_up_logs
from kvrouter.router.telemetry.metric_registry import MetricRegistry
from kvrouter.router.tokens.engine.client import Engine
from kvrouter.router.tokens.engine.verification import LocalMaker
from kvrouter.router.tokens.tokenizer import TextTokenizer
from kvrouter.router.upstream.engine_client import EngineClient
from kvrouter.router.upstream.pool import KEEP_IDLE_S, Pool
from kvrouter.router.watch.decision_log import DecisionLog
from kvrouter.router.watch.event_feed import EventFeed
from kvrouter.router.watch.watch import Watch
from kvrouter.router.workers.allow_list import AllowList

log = logging.getLogger(__name__)

# Open files are split in halves: one for clients, one for Redis, engines (six a worker) and libraries.
FILES_PER_CONNECTION = 2
# A worker with the patch has two connections, a snapshot under way, a look for another life, and a monitor's pair for
# each. ZMQ's own limit of 1,023 would refuse some of a hundred workers.
SOCKETS_PER_WORKER = 10
SPARE_SOCKETS = 64
# The data directory's lock admits one router, so its leases need no name of their own, and a restart takes over at
# once.
PRIVATE_TOKEN = "private"


def build_router(
    core: Core,
    placing: Placer,
    admission: Admission,
    tokens: TextTokenizer,
    discovery: Discovery,
    config: Config,
    metrics: RouterMetrics,
    quality: Quality,
    shutdown: Shutdown,
    watch: Watch,
    diagnosis: Diagnosis,
    access: Access,
) -> HttpApi:
    """The HTTP API and the proxy, on the running loop. `close` its proxy at the end."""
    proxy = Proxy(
        placing=placing,
        tokens=tokens,
        resolve=core.resolve,
        registrations=core.registry.registrations,
        admission=admission,
        pool=Pool(asyncio.get_running_loop()),
        metrics=metrics.proxy,
        quality=quality,
        allowed=AllowList(config.allow_hosts),
        silence_s=config.answer_timeout_s,
        worker_key=config.worker_api_key,
        has_own_key=access.keys is not None,
    )
    return build_api(
        core,
        placing,
        config,
        metrics.http,
        time.perf_counter,
        tokens,
        proxy,
        quality.tracing,
        discovery,
        shutdown,
        watch,
        diagnosis,
        access,
    )


class ProcessPart(msgspec.Struct, frozen=True):
    """Which of several processes behind one port this one is. listener: the descriptor of the listening socket; token:
    names the process in leases; folder: where the processes' own sockets are."""

    number: int
    listener: int
    token: str | None
    folder: str


async def serve(
    config: Config, origin: Origin, local: Mapping[str, LocalMaker], part: ProcessPart | None = None
) -> None:
    """Runs a router until SIGTERM or SIGINT; one that is a part also until its supervisor is gone. origin: where config
    came from; local: the settings' tokenizers, by model. Raises SettingError and StartError before it serves."""
    set_up_logs(config.log_level, config.log_format, sys.stderr)
    set_up_access_log(wanted=config.access_log == "on")
    allow_descriptors()
    with stopping_on_signals(config.shutdown_delay_s, part is not None) as stopping:
        if part is not None:
            asyncio.get_running_loop().add_reader(sys.stdin.fileno(), stopping.on_supervisor_gone)
        async with AsyncExitStack() as stack:
            # First, because it fails most often, and fails fast.
            opened = bound_socket(config.host, config.port) if part is None else socket.socket(fileno=part.listener)
            listener = stack.enter_context(contextlib.closing(opened))
            server = await stopping.unless_stopped(
                _start(config, origin, local, part, listener, stopping.shutdown, stack)
            )
            if server is not None:
                stopping.server = server
                try:
                    await server.serve(sockets=[listener])
                except OSError as error:
                    # Two starting routers can both bind the port; the second to listen finds out here.
                    raise port_taken(config.host, config.port, error) from None
    log.info("stopped")


def allow_descriptors() -> None:
    """As many open files as the system grants: each worker takes some ten, and the usual soft limit is 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _start(
    config: Config,
    origin: Origin,
    local: Mapping[str, LocalMaker],
    part: ProcessPart | None,
    listener: socket.socket,
    shutdown: Shutdown,
    stack: AsyncExitStack,
) -> Server:
    registry = MetricRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    metrics = RouterMetrics(registry)
    count_callbacks(registry)
    supervisor = TaskSupervisor(clock=time.monotonic, rng=random.Random(), failures=registry.task_failures)
    # Settings first: a wrong one ends the start before anything is started.
    access = Access(config, metrics.http.access, clock=time.monotonic, wall_clock=time.time)
    tracing = tracing_of(config, metrics.quality)
    if tracing is not None:
        stack.push_async_callback(tracing.close)
    stack.callback(supervisor.start("access", access.watch).cancel)
    if (trim := trim_function()) is not None:
        stack.callback(supervisor.start("memory_release", partial(release_memory, trim)).cancel)
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
    siblings: Siblings | None = None
    if part is not None:
        siblings = Siblings(Path(part.folder), part.number, config.processes, registry.own_page)
        stack.push_async_callback(siblings.close)
        await siblings.start()
        metrics.http.page = siblings.page
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
        engine_client = EngineClient(asyncio.get_running_loop(), engine_headers)
        stack.callback(engine_client.close)
        token = token or secrets.token_hex(8)
        # Each start numbers its events from one.
        feed = EventFeed(life=secrets.token_hex(4), wall_clock=time.time, metrics=metrics.core.watch)
        shutdown.on_begin(feed.close)
        decisions = DecisionLog(config.decisions_kept, feed, time.monotonic, metrics.core.watch)
        core = Core(
            store=store,
            config=config,
            metrics=metrics.core,
            zmq_context=context,
            clock=time.monotonic,
            rng=random.Random(),
            http=http,
            engine_client=engine_client,
            token=token,
            supervisor=supervisor,
            feed=feed,
            patch_secret=patch_client_secret(config),
        )
        stack.push_async_callback(core.stop)
        admission = Admission(core.registry.drains, time.monotonic, metrics.proxy)
        placing = Placer(
            core.finder,
            config=config,
            metrics=metrics.placement,
            clock=time.monotonic,
            rng=random.Random(),
            # Nobody can guess one, so nobody can end another's reservation.
            new_id=RandomIds(),
            unavailable=admission.problem,
            prefillers=core.registry.prefill_workers,
            record=decisions.record,
            noticed=decisions.take_notice,
            servers=store.servers,
            process=core.peers.token,
            supervisor=supervisor,
        )
        decisions.send_notice = placing.send_notice
        core.registry.subscribe(view=admission.on_view, load=placing.engine_said)
        await core.start()
        stack.push_async_callback(placing.stop)
        placing.start()
        discovery = Discovery(
            core.fleet,
            core.registrations,
            sources,
            session=http,
            allowed=AllowList(config.allow_hosts),
            metrics=metrics.discovery,
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
        engines=lambda model: [
            Engine(url, f"{kind.name} {epoch}", kind.tokens) for url, (epoch, kind) in core.engine_urls(model).items()
        ],
        session=await stack.enter_async_context(
            # An engine that closes what is idle must not look like one that died of a prompt.
            aiohttp.ClientSession(headers=engine_headers, connector=aiohttp.TCPConnector(keepalive_timeout=KEEP_IDLE_S))
        ),
        local=local,
        timeout_s=config.tokenize_timeout_s,
        metrics=metrics.tokens,
        clock=time.monotonic,
        rng=random.Random(),
        supervisor=supervisor,
    )
    stack.push_async_callback(tokens.stop)
    tokens.start()
    quality = Quality(metrics.quality, time.monotonic, tracing, decisions, logs_access=config.access_log == "on")
    core.registry.subscribe(view=quality.on_view)
    watch = Watch(feed, decisions)
    if siblings is not None:
        siblings.own_decision = partial(find_decision, decisions)
        watch = Watch(feed, decisions, siblings.decision)
    diagnosis = Diagnosis(
        core=core,
        placing=placing,
        admission=admission,
        quality=quality,
        tokens=tokens,
        sources=discovery,
        servers=store.servers,
        config=config,
        http=http,
        wall_clock=time.time,
        access=access,
    )
    api = build_router(
        core, placing, admission, tokens, discovery, config, metrics, quality, shutdown, watch, diagnosis, access
    )
    assert api.proxy is not None
    stack.callback(api.proxy.close)
    beside: Beside | None = None
    gateway_port: int | None = None
    if config.gateway_port is not None:
        from kvrouter.router.server.gateway_start import start_gateway

        beside, gateway_port = await start_gateway(
            config, core, placing, api.proxy, admission, quality, metrics, shutdown, time.monotonic
        )
        stack.push_async_callback(beside.stop, 0)
    limits = HttpLimits(max_connections=_connections_possible(HttpLimits().max_connections))
    settings = uvicorn.Config(
        api.cold,
        loop="none",
        # Any callable that returns a protocol does.
        http=connection_factory(api, limits, lambda: access.context),  # type: ignore[arg-type]
        proxy_headers=False,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=config.drain_s,
    )
    # Objects alive now live long: the garbage collector need not scan them between requests.
    gc.collect()
    gc.freeze()

    def started() -> None:
        workers = len(core.registrations())
        if part is None:
            announce(start_line(config, listener, workers, gateway_port), os.environ)
        else:
            # A supervisor reads the number, and announces itself when all its processes serve.
            print(workers, flush=True)

    return Server(settings, started, beside)


def count_callbacks(registry: MetricRegistry) -> None:
    """Have errors counted that nobody awaits, of timers and of transports; the loop logs them."""

    def count(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # A broken connection is not a bug.
        if not isinstance(context.get("exception"), OSError):
            registry.internal_errors.labels("callback").inc()
        loop.default_exception_handler(context)

    asyncio.get_running_loop().set_exception_handler(count)


def _redis_problem(config: Config, error: StoreError) -> str:
    if config.redis is None:
        return f"the private store: {error}"
    fix = "start it, or correct the URL (--redis); without one, a private server is started"
    return f"Redis at {without_password(config.redis)}: {error}" + (
        f"; {fix}" if isinstance(error, StoreUnavailable) else ""
    )


def _connections_possible(wanted: int) -> int:
    """`wanted`, or what the limit on open files leaves: without files, nothing is accepted and nothing is connected
    to."""
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
