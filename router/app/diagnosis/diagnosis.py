# SPDX-License-Identifier: Apache-2.0
"""The async shell around the checks: it collects what this process knows and probes the endpoints of its workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp
import msgspec

from kvrouter.contract.diagnosis import DiagnosisReport, Finding, Severity
from kvrouter.contract.settings import SettingsReply
from kvrouter.contract.store import StoreReply
from kvrouter.router.app.core.router_core import Core
from kvrouter.router.app.diagnosis.cache_checks import cache_findings
from kvrouter.router.app.diagnosis.endpoint_probe import EndpointAnswer, probe_endpoints, probe_engines
from kvrouter.router.app.diagnosis.engine_checks import engine_findings
from kvrouter.router.app.diagnosis.event_checks import endpoints_of, event_findings
from kvrouter.router.app.diagnosis.prediction_checks import prediction_findings
from kvrouter.router.app.diagnosis.router_checks import router_findings
from kvrouter.router.app.diagnosis.snapshot import (
    PromptCount,
    RouterStatement,
    Snapshot,
    StoreFacts,
    WorkerFacts,
)
from kvrouter.router.app.diagnosis.store_checks import store_findings
from kvrouter.router.base.common import compiled
from kvrouter.router.base.common.errors import NoWorker
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.common.version import VERSION
from kvrouter.router.base.redis_client.errors import StoreError
from kvrouter.router.base.redis_client.servers import Servers
from kvrouter.router.follow.discovery.discovery import Discovery
from kvrouter.router.follow.streams.worker_state import WorkerState
from kvrouter.router.index.store.server_settings import ServerSettings, server_settings
from kvrouter.router.model.config.cautions import open_to_all
from kvrouter.router.model.workers.allow_list import AllowList
from kvrouter.router.model.workers.provenance import own_streams
from kvrouter.router.observe.findings.finding import CODES
from kvrouter.router.observe.findings.store_view import store_reply
from kvrouter.router.observe.quality.request_watch import Quality
from kvrouter.router.route.placement.placer import Placer
from kvrouter.router.route.tokens.tokenizer import TextTokenizer
from kvrouter.router.serve.access.access import Access
from kvrouter.router.serve.proxy.admission import Admission
from kvrouter.router.serve.proxy.refused_requests import Difference

# The facts of a worker take some 30 us, during which nothing else is answered.
WORKERS_A_TURN = 64
# Larger than a block of nearly all engines (Mamba models have some hundred tokens); used for workers whose blocks are
# unknown.
USUAL_UNIT_MAX_TOKENS = 1_024
# An engine takes minutes to load a large model. If it has not listed its models for longer than this, it is not starting.
STARTING_S = 600.0
ORDER = list(Severity)


class Diagnosis:
    """A diagnosis of the router and its fleet. Only one report is collected at a time.

    `http` queries engines for the time, and `wall_clock` returns seconds since 1970.
    """

    def __init__(
        self,
        *,
        core: Core,
        placer: Placer,
        admission: Admission,
        quality: Quality,
        tokens: TextTokenizer,
        sources: Discovery,
        servers: Servers,
        http: aiohttp.ClientSession,
        wall_clock: Callable[[], float],
        access: Access,
    ) -> None:
        self._core = core
        self._access = access
        self._placer = placer
        self._admission = admission
        self._quality = quality
        self._tokens = tokens
        self._sources = sources
        self._servers = servers
        self._http = http
        self._wall_clock = wall_clock
        self._settings = access.settings
        self._allowed = AllowList(self._settings.config.allow_hosts)
        # When the settings file was last read again, and what it held then.
        self._reloaded_s: float | None = None
        if self._settings.file is not None:
            self._file_settings = self._settings.file.value
            self._settings.file.subscribe(self._file_changed)
        self._looking = asyncio.Lock()
        # The last report, and the time on the core's clock at which its facts had been collected.
        self._last: tuple[DiagnosisReport, float] | None = None

    async def report(self, max_age_s: float = 0.0) -> DiagnosisReport:
        """Return the findings, the most severe first.

        Args:
            max_age_s: If the last report is younger than this, it is returned again, so that many open pages do not
                each make the router connect to all endpoints of the fleet.
        """
        async with self._looking:
            if self._last is None or self._core.now() - self._last[1] >= max_age_s:
                self._last = await self._examine(), self._core.now()
            report, collected_s = self._last
        return msgspec.structs.replace(report, age_s=self._core.now() - collected_s)

    async def _examine(self) -> DiagnosisReport:
        """Collect the facts and run all checks."""
        snapshot = await self._look()
        findings: list[Finding] = []
        for check in (
            router_findings,
            store_findings,
            engine_findings,
            event_findings,
            cache_findings,
            prediction_findings,
        ):
            findings += check(snapshot)
            await asyncio.sleep(0)
        findings.sort(key=lambda finding: (ORDER.index(finding.severity), finding.code, finding.subject))
        return DiagnosisReport(VERSION, len(snapshot.workers), len(snapshot.routers), len(CODES), findings)

    def settings(self) -> SettingsReply:
        """Return the settings of this process, without secrets."""
        settings = self._settings
        return SettingsReply(settings.in_force.shown(), settings.waiting, self._reloaded_s)

    def _file_changed(self) -> None:
        """Note the time if the settings file was read again. This is also called if only its problem has changed."""
        assert self._settings.file is not None
        if self._settings.file.value is not self._file_settings:
            self._file_settings, self._reloaded_s = self._settings.file.value, self._wall_clock()

    async def store(self) -> StoreReply:
        """Return the store, its routers, and which router follows which worker."""
        servers, _ = await self._servers_settings()
        core = self._core
        return store_reply(
            workers=list(core.registry.followers),
            heartbeats=core.peers.heartbeats,
            token=core.peers.token,
            servers=servers,
            problem=core.contact.problem or "",
            is_private=self._settings.config.redis is None,
        )

    async def _look(self) -> Snapshot:
        (endpoints, ahead), (servers, time_s) = await asyncio.gather(self._probe(), self._servers_settings())
        workers = await self._workers()
        core, store = self._core, self._core.contact
        followers = core.registry.followers.values()
        beats = core.peers.heartbeats
        return Snapshot(
            version=VERSION,
            token=core.peers.token,
            time_s=time_s,
            workers=workers,
            unregistered=self._sources.unregistered(),
            unserved_aliases=core.unserved_aliases(),
            left_out=core.registry.left_out,
            contested=self._sources.contested(),
            endpoints=endpoints,
            engine_clocks=ahead,
            tokens=self._tokens.differences(),
            front_ends=self._tokens.front_ends(),
            renderers=self._tokens.renderer_problems(),
            unread_responses=tuple(self._tokens.unread_responses()),
            missing_tokens=tuple(self._tokens.missing()),
            store=StoreFacts(
                problem=store.problem or "",
                unwritten=tuple(sorted({problem for follower in followers if (problem := follower.state.problem)})),
                unreadable=tuple(core.registry.problems),
                schemas=(*core.adoption.problems, *core.adoption.cautions),
                servers=servers,
                is_private=self._settings.config.redis is None,
                lost=core.registration_mark.problem,
            ),
            routers={token: RouterStatement(beat.software, beat.settings) for token, beat in beats.items()}
            | {core.peers.token: RouterStatement(VERSION, dict(core.peers.settings))},
            load_problems=self._placer.health(),
            source_problems=self._sources.down(),
            task_problems=core.task_problems(),
            is_open=open_to_all(self._settings.config),
            uncompiled=compiled.caution(),
            unused_files=self._settings.files.problems,
            unapplied=self._settings.cautions(),
            expiry_problem=self._access.expiry_problem,
            expiry_caution=self._access.expiry_caution,
            unready=self._unready(),
        )

    def _unready(self) -> str:
        """Return why no request would be placed, in the words of /ready; "" if one would be."""
        try:
            self._placer.takers(self._core.models())
        except NoWorker as error:
            return error.message
        return ""

    async def _probe(self) -> tuple[dict[str, EndpointAnswer], dict[str, float]]:
        """Probe all endpoints that the router may connect to; return the answers and the clocks of the engines.

        An engine's clock is given by the seconds that it is ahead of this machine's, by URL.
        """
        sockets, urls = set[str](), set[str]()
        for registration in self._core.registrations():
            for role, at in endpoints_of(registration).items():
                if not self._allowed.problem(at):
                    (urls if role == "url" else sockets).add(at)
        answers, (closed, ahead) = await asyncio.gather(
            probe_endpoints(sockets), probe_engines(self._http, urls, self._wall_clock)
        )
        return answers | {url: EndpointAnswer(problem) for url, problem in closed.items()}, ahead

    async def _servers_settings(self) -> tuple[dict[str, ServerSettings], float]:
        """Return the settings of the store's servers, none if they do not answer, and the time of the answer."""
        try:
            return await server_settings(self._servers), self._wall_clock()
        except StoreError:
            # `contact` reports a store that does not answer. A server that just came back is seen by the next report.
            return {}, self._wall_clock()

    async def _workers(self) -> list[WorkerFacts]:
        facts: list[WorkerFacts] = []
        refusals = self._admission.refused.problems()
        for worker, follower in sorted(self._core.registry.followers.items()):
            if len(facts) % WORKERS_A_TURN == WORKERS_A_TURN - 1:
                await asyncio.sleep(0)
            facts.append(self._facts(worker, follower.state, refusals.get(worker)))
        return facts

    def _facts(self, worker: WorkerKey, state: WorkerState, refuses: Difference | None) -> WorkerFacts:
        now = self._core.now()
        profile, registration = state.profile, state.registration
        engine = self._core.engine_lists.served.get(registration.url or "")
        return WorkerFacts(
            registration=registration,
            state=state.view.state,
            catalog=profile.catalog,
            scheme=profile.identity.standing,
            hash_label=profile.identity.label,
            reason=state.view.reason,
            refusal=state.facts.refusal or "",
            unserved=state.note,
            refused_key=state.refused,
            breaker=self._admission.breaker_problem(worker) or "",
            refuses=refuses,
            disk=state.disk_problem,
            cpu_tier=state.facts.offload.cpu_tier_problem(now),
            clears=state.clears.problem(now),
            refused=self._core.mirror_sync.lost_credit(worker),
            withheld=state.withheld,
            is_heard=state.shown.seq is not None or profile.contact.last_event_s is not None,
            is_starting=self._is_starting(state),
            is_silent=profile.is_silent,
            is_patched=profile.patch.epoch is not None,
            blocks=sum(state.counts().values()),
            engine_model="" if engine is None else engine.root,
            prompts=self._prompts(worker, state),
            doubt=self._quality.doubt(worker),
            cache=state.cache,
            peer=state.view.peer,
            published=own_streams(registration, self._core.engine_lists.sources),
            names_streams=(registration.url or "") in self._core.engine_lists.sources,
            drains_s=None if state.drains_since_s is None else now - state.drains_since_s,
        )

    def _is_starting(self, state: WorkerState) -> bool:
        """Return whether the worker's engine may be starting: it has not listed its models and adapters yet."""
        url, lists = state.registration.url, self._core.engine_lists
        is_listed = url is None or url in lists.served or url in lists.refusing
        return not is_listed and self._core.now() - state.since_s < STARTING_S

    def _prompts(self, worker: WorkerKey, state: WorkerState) -> PromptCount:
        lengths, catalog = self._placer.weights.prompts, state.profile.catalog
        unit = catalog.align if catalog.problem is None else state.block_size or USUAL_UNIT_MAX_TOKENS
        return PromptCount(lengths.total(worker), lengths.below(worker, unit), lengths.above(worker, unit))
