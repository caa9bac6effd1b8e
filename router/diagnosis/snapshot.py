# SPDX-License-Identifier: Apache-2.0
"""What the checks look at: all that one router process knows, at one moment. Values of other rooms, unjudged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kvrouter.router.common.escaping import printable
from kvrouter.router.common.ids import WorkerKey
from kvrouter.router.diagnosis.endpoint_probe import EndpointAnswer
from kvrouter.router.index.server_settings import ServerSettings
from kvrouter.router.kvcache.catalog import Catalog
from kvrouter.router.kvcache.scheme_verification import SchemeState
from kvrouter.router.quality.prediction_judge import Doubt
from kvrouter.router.tokens.unknown_prompts import MissingTokens
from kvrouter.router.workers.engine_answers import Stream
from kvrouter.router.workers.engine_cache import EngineCache
from kvrouter.router.workers.registration import Registration
from kvrouter.router.workers.stream_state import StreamState


class PromptCount(msgspec.Struct, frozen=True):
    """Prompts that a worker computed, since this process started. short: of at most one unit of reuse, so that nothing
    of them can be reused. whole: of more than one, so that events must have followed."""

    total: int = 0
    short: int = 0
    whole: int = 0


class WorkerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One worker. The texts are sentences of those who judge; empty: nothing is wrong.

    reason: why the state is what it is. refusal: why the router may not connect there. unserved: why requests for the
    model would get 404. refused_key: why its engine refuses what the router asks it.
    breaker: why no requests are sent there. refused: why blocks found no room in memory. withheld:
    why what lies beside the GPU earns no credit. is_heard: a batch of its events came, ever. blocks: that it holds.
    engine_model: what the engine loaded its model from, empty where it does not say. cache: its KV cache, by its own
    word. published: where its engine says that its events are; names_streams: it says that, also that there are none.
    drains_s: for how long it has taken no new requests, as far as is known."""

    registration: Registration
    state: StreamState
    catalog: Catalog
    scheme: SchemeState
    hash_label: str = ""
    reason: str = ""
    refusal: str = ""
    unserved: str = ""
    refused_key: str = ""
    breaker: str = ""
    disk: str = ""
    cpu_tier: str = ""
    refused: str = ""
    withheld: str = ""
    is_heard: bool = False
    is_silent: bool = False
    is_patched: bool = False
    blocks: int = 0
    engine_model: str = ""
    prompts: PromptCount = PromptCount()
    doubt: Doubt | None = None
    cache: EngineCache = EngineCache()
    published: Sequence[Stream] = ()
    names_streams: bool = False
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
    """A worker that a source lists and that is not registered. fix: what to do about the reason."""

    worker_id: str
    dp_rank: int
    source: str
    reason: str
    fix: str


class Contested(msgspec.Struct, frozen=True):
    """A worker of which two sources, or two routers' sources of one name, say different things."""

    worker_id: str
    dp_rank: int
    source: str
    reason: str


class StoreFacts(msgspec.Struct, frozen=True, kw_only=True):
    """problem: why Redis is not heard. unwritten: why it takes no commits. unreadable: what it holds that no router
    writes. schemas: which other schemas it holds, and what of the former one is not taken over. servers: by address; empty
    where they do not answer. is_private: it is this router's own server. lost: why no worker is registered although some
    were."""

    problem: str = ""
    unwritten: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    schemas: tuple[str, ...] = ()
    servers: Mapping[str, ServerSettings] = {}
    is_private: bool = False
    lost: str = ""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """token: names this process among `routers`. endpoints: what listens at each endpoint that workers are registered
    with. left_out: registered workers that are not followed here, and why. engine_clocks, by URL: seconds by which the
    engine's clock is ahead of this process's. time_s: its clock, since 1970, when Redis answered. tokens: model, URL
    and problem wherever tokens of texts are not known to be the engine's. missing_tokens: models whose texts mostly have
    none. unready: why no request would be placed.
    unused_files: why what a certificate's or keys' file holds now is not used. expiry_problem, expiry_caution: that the
    certificate has ended, or does soon."""

    version: str = ""
    token: str = ""
    time_s: float = 0.0
    workers: Sequence[WorkerFacts] = ()
    unregistered: Sequence[Unregistered] = ()
    left_out: Mapping[WorkerKey, str] = {}
    contested: Sequence[Contested] = ()
    endpoints: Mapping[str, EndpointAnswer] = {}
    engine_clocks: Mapping[str, float] = {}
    tokens: Sequence[tuple[str, str, str]] = ()
    missing_tokens: Sequence[MissingTokens] = ()
    store: StoreFacts = StoreFacts()
    routers: Mapping[str, RouterWord] = {}
    load_problems: Sequence[str] = ()
    source_problems: Sequence[tuple[str, str]] = ()
    task_problems: Sequence[str] = ()
    is_open: str | None = None
    uncompiled: str | None = None
    unready: str = ""
    unused_files: Sequence[str] = ()
    expiry_problem: str | None = None
    expiry_caution: str | None = None
