# SPDX-License-Identifier: Apache-2.0
"""What the router has to know of an engine besides its events' general form. Pure: descriptions hold no state."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import msgspec

from kvrouter.router.kvcache.block_hash import HashScheme
from kvrouter.router.workers.engine_answers import EngineAnswers
from kvrouter.router.workers.engine_cache import EngineCache
from kvrouter.router.workers.registration import CatalogSpec


class EngineGauges(msgspec.Struct, frozen=True, eq=False):
    """Names on an engine's /metrics: of its requests that wait and run, of how full its KV cache is (0 to 1), and the
    label that names a data-parallel rank. life: finds a number that every other process has otherwise."""

    waiting: bytes
    running: bytes
    kv_usage: bytes
    rank_label: bytes
    life: re.Pattern[bytes]


class TokenEndpoints(msgspec.Struct, frozen=True, eq=False):
    """How an engine's HTTP makes tokens of text.

    render_paths: by kind of request ("chat", "text", "responses", "messages"), the endpoint that returns the prompt of
    the real one; empty where it has none. how_to_render: what switches them on. chat_fields, text_fields: what of a
    request /tokenize may be given; None: all but those of ignored_fields, which the real endpoint ignores and /tokenize
    does not. names_arguments: /tokenize wants the template's arguments, and reasoning, under the template's own names.
    reads_messages: it turns messages of Anthropic's API into chats as this router does.
    """

    render_paths: Mapping[str, str]
    how_to_render: str
    chat_fields: tuple[str, ...] | None
    text_fields: tuple[str, ...]
    ignored_fields: frozenset[str]
    names_arguments: bool
    reads_messages: bool


class OperatorFlags(msgspec.Struct, frozen=True):
    """What an operator starts the engine with. serve: its command. events: publishes KV events. usage: reports reuse in
    its answers. prefix_cache: reuses prompts at all. memory: how much of the accelerator's is its cache's."""

    serve: str
    events: str
    usage: str
    prefix_cache: str
    memory: str


class Engine(msgspec.Struct, frozen=True, eq=False):
    """One kind of engine.

    schemes: what may explain a worker's hashes, likeliest first, from what is stated and the configured seed.
    completed: what is stated of a catalog, with what is the same in every one of these engines. media: its events'
    names of media, where the index has others. tiers_shown: the shape of tier events shows which connector keeps them.
    stock_problem: why the engine's own events alone prove no hit of a worker with this stated catalog; empty where they
    do. info_path: an HTTP path that this engine alone has; streams_in: what its answer says, from the engine at this
    URL; raises NotThisEngine where it is another's, and ValueError where it cannot be read. health_path: answers at once,
    without work for the model. cache_in: what a metrics page says of the KV cache of the core with this rank; None where it
    says nothing. skips_cache: fields of a request for which the engine reuses nothing, as it wants the
    whole prompt computed.

    The wire has no field: both publish in one form, which `events/vllm/` reads (ADR 38). Nor has the patch: both send the
    same reports, in which an engine names itself.
    """

    name: str
    title: str
    schemes: Callable[[CatalogSpec, str | None], tuple[HashScheme, ...]]
    completed: Callable[[CatalogSpec], CatalogSpec]
    stock_problem: Callable[[CatalogSpec], str]
    media: Mapping[str, str]
    tiers_shown: bool
    info_path: str
    streams_in: Callable[[bytes, str], EngineAnswers]
    health_path: str
    gauges: EngineGauges
    cache_in: Callable[[bytes, int], EngineCache | None]
    tokens: TokenEndpoints
    flags: OperatorFlags
    skips_cache: Callable[[Mapping[str, object]], bool]


class NotThisEngine(ValueError):
    """Another engine answers on this path."""


# Fields that decide whether an engine computes the whole prompt (`Engine.skips_cache`).
CACHE_FIELDS = frozenset({"echo", "logprobs", "prompt_logprobs"})
