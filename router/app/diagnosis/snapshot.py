# SPDX-License-Identifier: Apache-2.0
"""The input of the checks: everything that one router process knows, at one moment. Unjudged values of other rooms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kvrouter.contract.worker_status import EngineCache
from kvrouter.events.patch.messages import PeerAddress
from kvrouter.router.app.diagnosis.endpoint_probe import EndpointAnswer
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.store.server_settings import ServerSettings
from kvrouter.router.model.kvcache.catalog import Catalog
from kvrouter.router.model.kvcache.scheme_verification import SchemeState
from kvrouter.router.model.workers.engine_answers import Stream
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.stream_state import StreamState
from kvrouter.router.model.workers.unregistered_worker import UnregisteredWorker
from kvrouter.router.observe.findings.subject import Subject
from kvrouter.router.observe.quality.prediction_judge import Doubt
from kvrouter.router.route.tokens.engine.verified_engines import UnreadResponses
from kvrouter.router.route.tokens.unknown_prompts import MissingTokens
from kvrouter.router.serve.proxy.refused_requests import Difference


class PromptCount(msgspec.Struct, frozen=True):
    """The prompts that a worker computed since this process started."""

    total: int = 0
    # Prompts that are certainly shorter than one unit of reuse, so that no part of them can be reused.
    short: int = 0
    # Prompts that are certainly longer than one unit, so that events must have followed.
    whole: int = 0


class WorkerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about one worker.

    Each text is a sentence by the part that judges it; it is empty if nothing is wrong.
    """

    registration: Registration
    state: StreamState
    catalog: Catalog
    scheme: SchemeState
    hash_label: str = ""
    # The reason for the state.
    reason: str = ""
    # Why the router may not connect to the worker.
    refusal: str = ""
    # Why requests for the model would get 404.
    unserved: str = ""
    # Why its engine refuses this router's queries.
    refused_key: str = ""
    # Why no requests are sent to the worker.
    breaker: str = ""
    # How many more requests it refuses than its peers, or None if it does not.
    refuses: Difference | None = None
    # The problem of the disk that its engine offloads to.
    disk: str = ""
    # The problem of its engine's CPU tier.
    cpu_tier: str = ""
    # How often its engine clears its cache if that is too often, otherwise "".
    clears: str = ""
    # Why blocks found no room in memory.
    refused: str = ""
    # Why blocks beside the GPU earn no credit.
    withheld: str = ""
    # Whether a batch of its events ever arrived.
    is_heard: bool = False
    # Whether its engine may be starting: it has not listed its models and adapters yet.
    is_starting: bool = False
    # Whether it has no event endpoint.
    is_silent: bool = False
    # Whether a publisher of the engine patch is followed.
    is_patched: bool = False
    # How many blocks it holds.
    blocks: int = 0
    # The path or name that the engine loaded its model from; empty if the engine does not name it.
    engine_model: str = ""
    prompts: PromptCount = PromptCount()
    doubt: Doubt | None = None
    # The KV cache as the engine describes it.
    cache: EngineCache = EngineCache()
    # Where its engine lends blocks; None if it lends none.
    peer: PeerAddress | None = None
    # The event endpoints that its engine names.
    published: Sequence[Stream] = ()
    # Whether its engine names its event endpoints, or reports that it has none.
    names_streams: bool = False
    # For how many seconds it has taken no new requests, as far as this process knows; None if it takes some.
    drains_s: float | None = None

    @property
    def name(self) -> str:
        """The worker's name in the evidence of findings."""
        return self.subject.text

    @property
    def subject(self) -> Subject:
        """The subject of findings about the worker."""
        return Subject.of_worker(self.registration.worker)

    @property
    def is_down(self) -> bool:
        """Whether the engine does not answer."""
        return self.state is StreamState.DOWN


class RouterStatement(msgspec.Struct, frozen=True):
    """The version and settings that the heartbeat of a router states."""

    version: str
    settings: dict[str, str]


class StoreFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about Redis. Each text is empty if nothing is wrong."""

    # Why Redis does not answer.
    problem: str = ""
    # Why it takes no commits.
    unwritten: tuple[str, ...] = ()
    # Values in it that no router writes.
    unreadable: tuple[str, ...] = ()
    # The other schemas in it, and the parts of the former one that are not taken over.
    schemas: tuple[str, ...] = ()
    # The settings of each server by address; empty if the servers do not answer.
    servers: Mapping[str, ServerSettings] = {}
    # Whether Redis is this router's private server.
    is_private: bool = False
    # Why no worker is registered although some were.
    lost: str = ""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The input of all checks of the doctor, at one moment."""

    version: str = ""
    # Names this process among `routers`.
    token: str = ""
    # This process's clock, since 1970, when Redis answered.
    time_s: float = 0.0
    workers: Sequence[WorkerFacts] = ()
    unregistered: Sequence[UnregisteredWorker] = ()
    # The aliases (`model_aliases`) of models and adapters that no worker serves, each with the name that it stands for.
    unserved_aliases: Mapping[str, str] = {}
    # Registered workers that are not followed here, and why.
    left_out: Mapping[WorkerKey, str] = {}
    # Source, id and rank, and reason of each worker that two sources, or two routers' sources of one name, describe
    # differently.
    contested: Sequence[tuple[str, tuple[str, int], str]] = ()
    # The answer of each endpoint that workers are registered with.
    endpoints: Mapping[str, EndpointAnswer] = {}
    # Seconds by which each engine's clock is ahead of this process's, by URL.
    engine_clocks: Mapping[str, float] = {}
    # The cases in which the router's tokens of a text may differ from the engine's: model, engine's URL (empty if the
    # case concerns no single engine) and problem.
    tokens: Sequence[tuple[str, str, str]] = ()
    # Front ends without the engine's render endpoints: model, engine's URL, and what they lack.
    front_ends: Sequence[tuple[str, str, str]] = ()
    # The renderers that are away or differ from an engine: model, renderer's URL and problem.
    renderers: Sequence[tuple[str, str, str]] = ()
    # Models whose requests to /v1/responses are placed by load.
    unread_responses: Sequence[UnreadResponses] = ()
    # Models whose texts mostly have no tokens.
    missing_tokens: Sequence[MissingTokens] = ()
    store: StoreFacts = StoreFacts()
    # The routers on this Redis, by token.
    routers: Mapping[str, RouterStatement] = {}
    # Why the load of other routers is unknown.
    load_problems: Sequence[str] = ()
    # The sources that cannot be read, each with its problem.
    source_problems: Sequence[tuple[str, str]] = ()
    task_problems: Sequence[str] = ()
    # Why the router is open to everybody; None if it is not.
    is_open: str | None = None
    # Which modules are not compiled; None if all are.
    uncompiled: str | None = None
    # Why no request would be placed.
    unready: str = ""
    # Why the present contents of a file with settings, a certificate or keys are not used.
    unused_files: Sequence[str] = ()
    # Warnings that name the changed settings that wait for a restart.
    unapplied: Sequence[str] = ()
    # A sentence if the certificate has expired.
    expiry_problem: str | None = None
    # A sentence if the certificate expires soon.
    expiry_caution: str | None = None
