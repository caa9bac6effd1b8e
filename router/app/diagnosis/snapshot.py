# SPDX-License-Identifier: Apache-2.0
"""What the checks look at: all that one router process knows, at one moment. Values of other rooms, unjudged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kvrouter.router.app.diagnosis.endpoint_probe import EndpointAnswer
from kvrouter.router.base.common.escaping import printable
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.store.server_settings import ServerSettings
from kvrouter.router.model.kvcache.catalog import Catalog
from kvrouter.router.model.kvcache.scheme_verification import SchemeState
from kvrouter.router.model.workers.engine_answers import Stream
from kvrouter.router.model.workers.engine_cache import EngineCache
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.stream_state import StreamState
from kvrouter.router.observe.quality.prediction_judge import Doubt
from kvrouter.router.route.tokens.unknown_prompts import MissingTokens


class PromptCount(msgspec.Struct, frozen=True):
    """Prompts that a worker computed, since this process started. short: of at most one unit of reuse, so that nothing
    of them can be reused. whole: of more than one, so that events must have followed."""

    total: int = 0
    short: int = 0
    whole: int = 0


class WorkerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One worker. A text is a sentence of the part that judges it; empty: nothing is wrong."""

    registration: Registration
    state: StreamState
    catalog: Catalog
    scheme: SchemeState
    hash_label: str = ""
    # Why the state is what it is.
    reason: str = ""
    # Why the router may not connect there.
    refusal: str = ""
    # Why requests for the model would get 404.
    unserved: str = ""
    # Why its engine refuses this router's queries.
    refused_key: str = ""
    # Why no requests are sent there.
    breaker: str = ""
    disk: str = ""
    cpu_tier: str = ""
    # Why blocks found no room in memory.
    refused: str = ""
    # Why blocks beside the GPU earn no credit.
    withheld: str = ""
    # Whether a batch of its events ever came.
    is_heard: bool = False
    is_silent: bool = False
    is_patched: bool = False
    # How many blocks it holds.
    blocks: int = 0
    # The path or name that the engine loaded its model from; empty: it does not say.
    engine_model: str = ""
    prompts: PromptCount = PromptCount()
    doubt: Doubt | None = None
    # The KV cache as the engine describes it.
    cache: EngineCache = EngineCache()
    # The event endpoints that its engine names.
    published: Sequence[Stream] = ()
    # Whether its engine says where its events are, or that there are none.
    names_streams: bool = False
    # For how many seconds it has taken no new requests, as far as this process knows.
    drains_s: float | None = None

    @property
    def name(self) -> str:
        return f"worker {printable(self.registration.worker.route_name)}"

    @property
    def is_down(self) -> bool:
        return self.state is StreamState.DOWN


class RouterWord(msgspec.Struct, frozen=True):
    """What the heartbeat of a router says of itself."""

    version: str
    settings: dict[str, str]


class Unregistered(msgspec.Struct, frozen=True):
    """A worker that a source lists and that is not registered."""

    worker_id: str
    dp_rank: int
    source: str
    reason: str
    # How to remove the reason.
    fix: str


class Contested(msgspec.Struct, frozen=True):
    """A worker of which two sources, or two routers' sources of one name, say different things."""

    worker_id: str
    dp_rank: int
    source: str
    reason: str


class StoreFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The state of Redis; an empty text: nothing is wrong."""

    # Why Redis does not answer.
    problem: str = ""
    # Why it takes no commits.
    unwritten: tuple[str, ...] = ()
    # Values in it that no router writes.
    unreadable: tuple[str, ...] = ()
    # The other schemas in it, and the parts of the former one that are not taken over.
    schemas: tuple[str, ...] = ()
    # The settings of each server by address; empty where they do not answer.
    servers: Mapping[str, ServerSettings] = {}
    # Whether it is this router's own server.
    is_private: bool = False
    # Why no worker is registered although some were.
    lost: str = ""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the checks of the doctor look at, at one moment."""

    version: str = ""
    # Names this process among `routers`.
    token: str = ""
    # This process's clock, since 1970, when Redis answered.
    time_s: float = 0.0
    workers: Sequence[WorkerFacts] = ()
    unregistered: Sequence[Unregistered] = ()
    # Registered workers that are not followed here, and why.
    left_out: Mapping[WorkerKey, str] = {}
    contested: Sequence[Contested] = ()
    # The answer of each endpoint that workers are registered with.
    endpoints: Mapping[str, EndpointAnswer] = {}
    # Seconds by which each engine's clock is ahead of this process's, by URL.
    engine_clocks: Mapping[str, float] = {}
    # Model, URL and problem wherever tokens of texts are not known to be the engine's.
    tokens: Sequence[tuple[str, str, str]] = ()
    # Models whose texts mostly have no tokens.
    missing_tokens: Sequence[MissingTokens] = ()
    store: StoreFacts = StoreFacts()
    routers: Mapping[str, RouterWord] = {}
    load_problems: Sequence[str] = ()
    source_problems: Sequence[tuple[str, str]] = ()
    task_problems: Sequence[str] = ()
    is_open: str | None = None
    uncompiled: str | None = None
    # Why no request would be placed.
    unready: str = ""
    # Why the present contents of a file with a certificate or keys are not used.
    unused_files: Sequence[str] = ()
    # A sentence if the certificate has expired.
    expiry_problem: str | None = None
    # A sentence if the certificate expires soon.
    expiry_caution: str | None = None
