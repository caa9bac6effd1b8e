# SPDX-License-Identifier: Apache-2.0
"""What the router has to know of an engine besides its events' general form. Pure: descriptions hold no state."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import msgspec

from kvrouter.router.model.kvcache.block_hash import HashScheme
from kvrouter.router.model.workers.engine_answers import EngineAnswers
from kvrouter.router.model.workers.engine_cache import EngineCache
from kvrouter.router.model.workers.registration import CatalogSpec


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

    The wire has no field: both publish in one form, which `events/vllm/` reads (ADR 38). The patch has none either:
    both send the same reports, in which an engine names itself.
    """

    name: str
    title: str
    # Returns the hash schemes that may explain a worker's hashes, likeliest first, for the stated catalog and the
    # configured seed.
    schemes: Callable[[CatalogSpec, str | None], tuple[HashScheme, ...]]
    # Returns the stated catalog with everything that is the same in all of these engines.
    completed: Callable[[CatalogSpec], CatalogSpec]
    # Returns why the engine's own events alone prove no hit of a worker with this stated catalog; empty where they do.
    stock_problem: Callable[[CatalogSpec], str]
    # The names of media in its events, where the index has others.
    media: Mapping[str, str]
    # Whether the shape of tier events shows which connector keeps them.
    tiers_shown: bool
    # An HTTP path that this engine alone has.
    info_path: str
    # Returns the streams that the answer of `info_path` names, for the engine at this URL. Raises NotThisEngine where
    # the answer is another engine's, and ValueError where it cannot be read.
    streams_in: Callable[[bytes, str], EngineAnswers]
    # A path that answers at once, without work for the model.
    health_path: str
    gauges: EngineGauges
    # Returns the KV cache of the core with this rank as a metrics page describes it; None where it does not.
    cache_in: Callable[[bytes, int], EngineCache | None]
    tokens: TokenEndpoints
    flags: OperatorFlags
    # Returns whether the fields of a request make the engine reuse nothing, as it wants the whole prompt computed.
    skips_cache: Callable[[Mapping[str, object]], bool]


class NotThisEngine(ValueError):
    """Another engine answers on this path."""


# Fields that decide whether an engine computes the whole prompt (`Engine.skips_cache`).
CACHE_FIELDS = frozenset({"echo", "logprobs", "prompt_logprobs"})
