# SPDX-License-Identifier: Apache-2.0
"""One router process, put together from its settings. The exit stack that it is given ends all its parts.

Only this module chooses clocks and randomness.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
import zmq
from prometheus_client import PlatformCollector, ProcessCollector

from kvrouter.router.app.core.router_core import Core
from kvrouter.router.app.diagnosis.diagnosis import Diagnosis
from kvrouter.router.app.server.checks import engine_keys_file, log_cautions, patch_client_secret, tracing_of
from kvrouter.router.app.server.descriptors import connections_possible
from kvrouter.router.app.server.listener import start_line
from kvrouter.router.app.server.memory_release import release_memory, trim_function
from kvrouter.router.app.server.private_store import private_store
from kvrouter.router.app.server.process_part import PRIVATE_TOKEN, ProcessPart
from kvrouter.router.app.server.router_metrics import RouterMetrics
from kvrouter.router.app.server.service_manager import announce
from kvrouter.router.app.server.siblings import Siblings
from kvrouter.router.app.server.stopping import EndBeside, Server
from kvrouter.router.base.common.errors import NoWorker, StartError
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.common.random_ids import RandomIds
from kvrouter.router.base.common.shutdown import Shutdown
from kvrouter.router.base.common.task_supervisor import TaskSupervisor
from kvrouter.router.base.redis_client.embedded_valkey import EmbeddedStoreError
from kvrouter.router.base.redis_client.errors import StoreError, StoreUnavailable
from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.follow.discovery.discovery import Discovery
from kvrouter.router.follow.discovery.source import Source
from kvrouter.router.follow.discovery.sources import sources_of
from kvrouter.router.follow.feed.event_feed import EventFeed
from kvrouter.router.index.store.store import IndexStore
from kvrouter.router.model.config.live_settings import LiveSettings
from kvrouter.router.model.config.loading import Origin
from kvrouter.router.model.config.settings import Config, without_password
from kvrouter.router.model.engines.known import RENDERER_WAYS
from kvrouter.router.model.upstream.engine_client import EngineClient
from kvrouter.router.model.upstream.pool import KEEP_IDLE_S, Pool
from kvrouter.router.model.upstream.resolver import CheckedResolver
from kvrouter.router.model.workers.allow_list import AllowList
from kvrouter.router.model.workers.engine_key import EngineKey
from kvrouter.router.model.workers.renderer_spec import parse_renderers
from kvrouter.router.observe.decisions.decision_log import DecisionLog
from kvrouter.router.observe.decisions.watch import Watch
from kvrouter.router.observe.history.history_keeper import HistoryKeeper
from kvrouter.router.observe.history.shadow_cache import worker_caches
from kvrouter.router.observe.quality.request_watch import Quality
from kvrouter.router.route.owners.response_owners import EngineSign, ResponseOwners
from kvrouter.router.route.placement.placer import Placer
from kvrouter.router.route.tokens.engine.client import Engine
from kvrouter.router.route.tokens.engine.verification import LocalMaker
from kvrouter.router.route.tokens.tokenizer import TextTokenizer
from kvrouter.router.serve.access.access import Access
from kvrouter.router.serve.api.decision_reply import find_decision, list_decisions
from kvrouter.router.serve.api.http.deadlines import HttpLimits
from kvrouter.router.serve.api.http.fastapi_app import build_api
from kvrouter.router.serve.api.http.http_connection import connection_factory
from kvrouter.router.serve.proxy.admission import Admission
from kvrouter.router.serve.proxy.body_decoding import BodyDecoding
from kvrouter.router.serve.proxy.proxy import Proxy

log = logging.getLogger(__name__)

# A worker with the patch has four sockets: two connections, a snapshot under way, and a look for another life. Each of
# them has a monitor's pair as well. ZMQ's own limit of 1,023 would refuse some of a hundred workers.
SOCKETS_PER_WORKER = 12
SPARE_SOCKETS = 64
# ZMQ_ZERO_COPY_RECV, which pyzmq does not define. With that option, each small frame of an unfinished message would
# hold the whole 8 KiB buffer that it was read into.
ZERO_COPY_RECV = 10

# How long aiohttp keeps idle connections by default, in seconds.
AIOHTTP_KEEP_S = 15.0


class Assembly:
    """The parts of one process that are shared while the others are made."""

    def __init__(
        self, config: Config, origin: Origin, part: ProcessPart | None, shutdown: Shutdown, stack: AsyncExitStack
    ) -> None:
        """Create the shared parts without starting anything. Raises SettingError.

        Args:
            config: The settings.
            origin: The source of `config`.
            part: This process's place under a supervisor; None: it is the only process.
            shutdown: The shutdown state of the process.
            stack: Ends everything that `start` starts.
        """
        self._config = config
        self._origin = origin
        self._part = part
        self._shutdown = shutdown
        self._stack = stack
        self._registry = MetricRegistry()
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        count_callbacks(self._registry)
        self._metrics = RouterMetrics(self._registry)
        # Settings come first: a wrong one ends the start before anything is started.
        self.settings = LiveSettings(config, origin, os.environ, self._metrics.http.access.files)
        # A process that is restarted later begins with the present settings of the file.
        self._config = config = self.settings.config
        self._supervisor = TaskSupervisor(
            clock=time.monotonic, rng=random.Random(), failures=self._registry.task_failures
        )
        self._allowed = AllowList(config.allow_hosts)
        self._engine_key = EngineKey(config.worker_api_key, self._allowed)
        self._engine_keys = engine_keys_file(self.settings)
        self.settings.subscribe(lambda _: self._take_engine_keys())
        if self._engine_keys is not None:
            self._engine_keys.subscribe(self._take_engine_keys)
            self._engine_key.reader = partial(self._engine_keys.look, at_once=True)
        self._take_engine_keys()

    async def start(self, local: Mapping[str, LocalMaker], listener: socket.socket) -> Server:
        """Start everything but the HTTP server, and return that server, which is to serve at `listener`.

        `local` has the settings' tokenizers, by model. Raises SettingError and StartError.
        """
        config, metrics, stack = self._config, self._metrics, self._stack
        access = Access(self.settings, metrics.http.access, clock=time.monotonic, wall_clock=time.time)
        tracing = tracing_of(config, metrics.quality)
        if tracing is not None:
            stack.push_async_callback(tracing.close)
        self._start_upkeep()
        if self._part is None:
            log_cautions(config)
        sources = await self._make_sources()
        http = await self._session()
        siblings = await self._start_siblings()
        # Each start numbers its events from one, so each needs a new life.
        feed = EventFeed(life=secrets.token_hex(4), wall_clock=time.time, metrics=metrics.core.watch)
        self._shutdown.on_begin(feed.close)
        decisions = DecisionLog(config.decisions_kept, feed, time.monotonic, metrics.core.watch)
        try:
            store = await self._open_store()
            core = self._make_core(store, feed, http)
            admission = Admission(core.registry.drains, time.monotonic, metrics.proxy)
            placer = self._make_placer(core, store, admission, decisions)
            await core.start()
            stack.push_async_callback(placer.stop)
            placer.start()
            discovery = await self._start_discovery(core, sources, http)
        except EmbeddedStoreError as error:
            raise StartError(str(error)) from None
        except StoreError as error:
            raise StartError(_redis_problem(config, error)) from None
        tokenizer = await self._start_tokens(core, local)
        quality = Quality(
            metrics.quality,
            time.monotonic,
            tracing,
            decisions,
            traffic=placer.traffic,
            sums_lists=core.sums_lists,
            logs_access=config.access_log == "on",
        )
        core.registry.subscribe(view=quality.on_view, life=quality.begin_life)
        history = HistoryKeeper(
            placer.traffic,
            writer=secrets.token_hex(8),
            clock=time.monotonic,
            wall_clock=time.time,
            caches=partial(worker_caches, core.registry),
            metrics=metrics.history,
            servers=store.servers,
            supervisor=self._supervisor,
        )
        history.start()
        stack.push_async_callback(history.stop)
        watch = Watch(feed, decisions)
        if siblings is not None:
            siblings.own_decision = partial(find_decision, decisions)
            siblings.own_decisions = partial(list_decisions, decisions)
            watch = Watch(feed, decisions, siblings.decision, siblings.decisions)
        diagnosis = Diagnosis(
            core=core,
            placer=placer,
            admission=admission,
            quality=quality,
            tokens=tokenizer,
            sources=discovery,
            servers=store.servers,
            http=http,
            wall_clock=time.time,
            access=access,
        )
        owners = self._start_owners(core, store)
        proxy = self._make_proxy(core, placer, admission, tokenizer, quality, access, owners)
        for apply in (core.apply, placer.apply, tokenizer.apply, proxy.apply):
            self.settings.subscribe(apply)
        api = build_api(
            core,
            placer,
            config,
            metrics.http,
            time.perf_counter,
            tokenizer,
            proxy,
            quality.tracing,
            discovery,
            self._shutdown,
            watch,
            diagnosis,
            access,
            history,
            core.hand_overs,
        )
        end_gateway, gateway_port = await self._start_gateway(core, placer, proxy, admission, quality, access)
        limits = HttpLimits(max_connections=connections_possible(HttpLimits().max_connections))
        settings = uvicorn.Config(
            api.cold,
            loop="none",
            # uvicorn accepts any callable that returns a protocol.
            http=connection_factory(api, limits, lambda: access.context),  # type: ignore[arg-type]
            proxy_headers=False,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=config.drain_s,
        )
        # Objects that exist now live long, so the garbage collector need not scan them between requests.
        gc.collect()
        gc.freeze()
        return Server(settings, partial(self._tell_started, core, listener, gateway_port), end_gateway)

    def _take_engine_keys(self) -> None:
        """Use the keys of the settings and of their file from now on."""
        by_name = {} if self._engine_keys is None else self._engine_keys.value
        self._engine_key.take(self.settings.config.worker_api_key, by_name)

    def reload(self) -> None:
        """Read the settings file and the files that the settings name now, changed or not."""
        log.info("files are read again")
        self.settings.files.wake()

    def _start_upkeep(self) -> None:
        tasks = {"files": self.settings.files.watch}
        if (trim := trim_function()) is not None:
            tasks["memory_release"] = partial(release_memory, trim)
        for name, run in tasks.items():
            self._stack.callback(self._supervisor.start(name, run).cancel)

    async def _make_sources(self) -> Sequence[Source]:
        if self._part is not None and self._part.number:
            # The first process has the sources of workers; the others follow the registry.
            return []
        return sources_of(
            self.settings,
            self._origin,
            os.environ,
            alone=self._own_token() is not None,
            session=await self._stack.enter_async_context(aiohttp.ClientSession()),
            rng=random.Random(),
        )

    async def _session(self, keep_s: float = AIOHTTP_KEEP_S) -> aiohttp.ClientSession:
        """Return a session for HTTP to engines that keeps idle connections for `keep_s` seconds."""
        connector = aiohttp.TCPConnector(resolver=CheckedResolver(self._allowed), keepalive_timeout=keep_s)
        return await self._stack.enter_async_context(aiohttp.ClientSession(connector=connector))

    async def _start_siblings(self) -> Siblings | None:
        part = self._part
        if part is None:
            return None
        siblings = Siblings(Path(part.folder), part.number, self._config.processes, self._registry.own_page)
        self._stack.push_async_callback(siblings.close)
        await siblings.start()
        self._metrics.http.page = siblings.page
        return siblings

    async def _open_store(self) -> IndexStore:
        url = self._config.redis
        if url is None:
            folder = Path(self._config.data_dir)
            url = await self._stack.enter_async_context(private_store(folder, self._supervisor))
        store = await IndexStore.open(url)
        self._stack.push_async_callback(store.close)
        return store

    def _own_token(self) -> str | None:
        """Return the lasting name of this process in leases; None if others may follow the same workers."""
        if self._part is not None:
            return self._part.token
        return PRIVATE_TOKEN if self._config.redis is None else None

    def _make_core(self, store: IndexStore, feed: EventFeed, http: aiohttp.ClientSession) -> Core:
        config, stack = self._config, self._stack
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        context.set(zmq.MAX_SOCKETS, SOCKETS_PER_WORKER * config.max_workers + SPARE_SOCKETS)
        context.set(ZERO_COPY_RECV, 0)
        stack.callback(context.destroy, linger=0)
        engine_client = EngineClient(asyncio.get_running_loop(), self._engine_key)
        stack.callback(engine_client.close)
        core = Core(
            store=store,
            config=config,
            metrics=self._metrics.core,
            zmq_context=context,
            clock=time.monotonic,
            rng=random.Random(),
            http=http,
            engine_client=engine_client,
            engine_key=self._engine_key,
            token=self._own_token() or secrets.token_hex(8),
            supervisor=self._supervisor,
            feed=feed,
            patch_secret=patch_client_secret(config),
            store_folder=None if self._own_token() is None else Path(config.data_dir),
        )
        self._engine_key.registrations = core.registry.registrations
        stack.push_async_callback(core.stop)
        return core

    def _make_placer(self, core: Core, store: IndexStore, admission: Admission, decisions: DecisionLog) -> Placer:
        placer = Placer(
            core.finder,
            config=self._config,
            metrics=self._metrics.placement,
            clock=time.monotonic,
            rng=random.Random(),
            # Ids that nobody can guess keep clients from ending the reservations of others.
            new_id=RandomIds(),
            unavailable=admission.problem,
            prefillers=core.registry.prefill_workers,
            record=decisions.record,
            noticed=decisions.take_notice,
            servers=store.servers,
            process=core.peers.token,
            supervisor=self._supervisor,
        )
        decisions.send_notice = placer.send_notice
        core.registry.subscribe(
            view=admission.on_view, load=placer.take_engine_load, life=placer.weights.prompts.forget
        )
        core.registry.subscribe(view=placer.on_view, life=admission.refused.forget)
        return placer

    async def _start_discovery(self, core: Core, sources: Sequence[Source], http: aiohttp.ClientSession) -> Discovery:
        discovery = Discovery(
            core.fleet,
            core.registrations,
            sources,
            session=http,
            engine_key=self._engine_key,
            allowed=self._allowed,
            metrics=self._metrics.discovery,
            clock=time.monotonic,
            rng=random.Random(),
            supervisor=self._supervisor,
        )
        self._stack.push_async_callback(discovery.stop)
        await discovery.start()
        return discovery

    async def _start_tokens(self, core: Core, local: Mapping[str, LocalMaker]) -> TextTokenizer:
        tokenizer = TextTokenizer(
            models=core.models,
            workers=lambda model: sum(registration.worker.model == model for registration in core.registrations()),
            engines=lambda model: [
                Engine(url, f"{kind.name} {epoch}", kind.tokens, drains)
                for url, (epoch, kind, drains) in core.engine_urls(model).items()
            ],
            # An engine that closes an idle connection must not look like one that crashed on a prompt.
            session=await self._session(KEEP_IDLE_S),
            engine_key=self._engine_key,
            local=local,
            renderers=parse_renderers(self._config.renderers),
            renderer_ways=RENDERER_WAYS,
            timeout_s=self._config.tokenize_timeout_s,
            metrics=self._metrics.tokens,
            clock=time.monotonic,
            rng=random.Random(),
            supervisor=self._supervisor,
        )
        self._stack.push_async_callback(tokenizer.stop)
        tokenizer.start()
        return tokenizer

    def _start_owners(self, core: Core, store: IndexStore) -> ResponseOwners:
        registry = core.registry

        def engine(worker: WorkerKey) -> EngineSign | None:
            is_down = registry.is_down(worker)
            return None if is_down is None else EngineSign(is_down, registry.engine_start_s(worker))

        owners = ResponseOwners(
            self._metrics.owners,
            time.monotonic,
            engine=engine,
            servers=store.servers,
            supervisor=self._supervisor,
        )
        owners.start()
        self._stack.push_async_callback(owners.stop)
        return owners

    def _make_proxy(
        self,
        core: Core,
        placer: Placer,
        admission: Admission,
        tokenizer: TextTokenizer,
        quality: Quality,
        access: Access,
        owners: ResponseOwners,
    ) -> Proxy:
        proxy = Proxy(
            placer=placer,
            tokens=tokenizer,
            resolve=core.resolve,
            registrations=core.registry.registrations,
            ranks=core.request_ranks,
            admission=admission,
            pool=Pool(asyncio.get_running_loop(), self._allowed),
            metrics=self._metrics.proxy,
            quality=quality,
            owners=owners,
            allowed=self._allowed,
            silence_s=self._config.answer_timeout_s,
            engine_key=self._engine_key,
            has_own_key=access.keys is not None,
            shows_hits=self._config.predicted_hit_header == "on",
            trusts_sources=self._config.trust_client_kv_sources == "on",
        )
        self._stack.callback(proxy.close)
        return proxy

    async def _start_gateway(
        self, core: Core, placer: Placer, proxy: Proxy, admission: Admission, quality: Quality, access: Access
    ) -> tuple[EndBeside | None, int | None]:
        """Start the gRPC port for gateways, if it is wanted; return what ends it, and the port. Raises SettingError."""
        config, metrics = self._config, self._metrics
        if config.gateway_port is None:
            return None, None
        # Imported only if the port is wanted, because gRPC is an extra.
        from kvrouter.router.serve.gateway.grpc_server import Certificate, GatewayServer
        from kvrouter.router.serve.gateway.picker import Picker, translated_paths

        def ready() -> str | None:
            if self._shutdown.begun:
                return "it is shutting down"
            reason = core.readiness()
            if reason is None:
                try:
                    placer.takers(core.models())
                except NoWorker as error:
                    reason = error.message
            return reason

        picker = Picker(
            proxy=proxy,
            placer=placer,
            admission=admission,
            quality=quality,
            metrics=metrics.gateway,
            decoding=BodyDecoding(config.max_body_bytes, metrics.http.encoded_bodies),
            models=core.models,
            fallbacks=config.gateway_fallbacks,
            translated=translated_paths(config.gateway_translated_paths),
            tenants=lambda: access.tenants,
            clock=time.monotonic,
            rng=random.Random(),
        )
        errors = metrics.http.internal_errors.labels("gateway")
        server = GatewayServer(picker.pick, ready, metrics.gateway, errors.inc, max_body_bytes=config.max_body_bytes)
        certificate = None
        if (pems := access.gateway_pems) is not None:
            certificate = Certificate(lambda: access.gateway_pems or pems)
        port = await server.start(config.host, config.gateway_port, certificate, shared=config.processes > 1)
        self._stack.push_async_callback(server.stop, 0)
        return server.stop, port

    def _tell_started(self, core: Core, listener: socket.socket, gateway_port: int | None) -> None:
        workers = len(core.registrations())
        if self._part is None:
            announce(start_line(self._config, listener, workers, gateway_port), os.environ)
        else:
            # Tell the supervisor the number of workers. It takes the line as the sign that this process serves, and
            # announces itself once all its processes serve.
            print(workers, flush=True)


def count_callbacks(registry: MetricRegistry) -> None:
    """Count errors of timers and transports, which no task awaits; the loop logs them."""

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
