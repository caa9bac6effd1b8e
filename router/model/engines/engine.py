# SPDX-License-Identifier: Apache-2.0
"""The description of an engine: the facts that the router needs besides the form of events. Pure and without state."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import msgspec

from kvrouter.contract.worker_status import EngineCache
from kvrouter.router.model.engines.reading import Reading
from kvrouter.router.model.kvcache.block_hash import HashScheme
from kvrouter.router.model.workers.engine_answers import EngineAnswers
from kvrouter.router.model.workers.registration import CatalogSpec


class EngineGauges(msgspec.Struct, frozen=True, eq=False):
    """Names on the /metrics page of an engine."""

    # The numbers of waiting and of running requests.
    waiting: bytes
    running: bytes
    # The used share of the KV cache, 0 to 1.
    kv_usage: bytes
    # The label that names a data-parallel rank.
    rank_label: bytes
    # Finds a number that differs between any two processes of the engine, as its first group.
    life: re.Pattern[bytes]


class TokenEndpoints(msgspec.Struct, frozen=True, eq=False):
    """The HTTP endpoints of an engine that turn text into tokens."""

    # For each kind of request ("chat", "text", "responses", "messages"), the endpoint that returns the tokens of such a
    # request without computing an answer. Empty if the engine has no such endpoints.
    render_paths: Mapping[str, str]
    # How an operator switches these endpoints on, for messages.
    how_to_render: str
    # The fields of a chat that /tokenize may get, or None for all fields except `ignored_fields`.
    chat_fields: tuple[str, ...] | None
    # The fields of a completion that /tokenize may get.
    text_fields: tuple[str, ...]
    # Fields that the real endpoint ignores, but /tokenize does not.
    ignored_fields: frozenset[str]
    # Whether /tokenize wants the arguments of the template, and reasoning, under the names that the template uses.
    names_arguments: bool
    # How the engine reads chats and messages of Anthropic's API.
    reading: Reading
    # The path whose answer names a front end that stands before the engine, or "" if the engine never has one.
    version_path: str = ""
    # Returns the name and version of the front end in such an answer, for people, or "" if the engine itself answers.
    front_end_in: Callable[[bytes], str] = lambda answer: ""


class OperatorFlags(msgspec.Struct, frozen=True):
    """The command and the flags with which an operator starts the engine, for messages."""

    # The command.
    serve: str
    # Makes the engine publish KV events.
    events: str
    # Makes the engine report reuse in its answers.
    usage: str
    # Makes the engine reuse prompts at all.
    prefix_cache: str
    # Sets how much of the accelerator's memory the engine uses, which determines the size of its KV cache.
    memory: str
    # The advice if the router cannot compute the engine's block hashes, as a sentence without its full stop.
    hashes: str


class Engine(msgspec.Struct, frozen=True, eq=False):
    """The description of one kind of engine.

    It has no field for the form of events, because all engines publish in one form, which `events/vllm/` reads (ADR 38).
    It has none for the engine patch either, because the patch sends the same reports for all engines.
    """

    # The name in settings and registrations.
    name: str
    # The name for people.
    title: str
    # Returns the hash schemes that may explain a worker's hashes, the likeliest first, for the stated catalog and the
    # configured seed.
    schemes: Callable[[CatalogSpec, str | None], tuple[HashScheme, ...]]
    # Returns the stated catalog, completed by the values that are the same in all engines of this kind.
    completed: Callable[[CatalogSpec], CatalogSpec]
    # Returns why the engine's own events alone prove no hit of a worker with this stated catalog, or "" if they do.
    stock_problem: Callable[[CatalogSpec], str]
    # The index's name of each medium that the engine's events name differently.
    media: Mapping[str, str]
    # Whether the shape of a tier's events shows the tier's connector.
    tiers_shown: bool
    # An HTTP path by whose answer this engine is recognised.
    info_path: str
    # Returns the streams that the answer of `info_path` names, for the engine at this URL. Raises NotThisEngine if
    # another engine sent the answer, and ValueError if the answer cannot be read.
    streams_in: Callable[[bytes, str], EngineAnswers]
    # A path that answers at once, without work for the model.
    health_path: str
    gauges: EngineGauges
    # Returns the KV cache of the core with this rank as a metrics page describes it, or None if it does not.
    cache_in: Callable[[bytes, int], EngineCache | None]
    tokens: TokenEndpoints
    flags: OperatorFlags
    # Returns whether the engine reuses nothing for a request with these fields, because they need the whole prompt
    # computed.
    skips_cache: Callable[[Mapping[str, object]], bool]
    # Whether its list of models names the path of each adapter that its hashes cover, and names the new path as soon as
    # the adapter is loaded again from another one.
    lists_hashed_paths: bool
    # The HTTP paths at which the engine applies `cache_salt`. It ignores the field at all others.
    salted_paths: frozenset[str]
    # Whether `cached_tokens` of a list of prompts is the sum over the prompts. Otherwise it is that of the last prompt,
    # and in a stream that of the prompt whose first token came first.
    sums_cached_tokens: bool


class NotThisEngine(ValueError):
    """The error that another kind of engine answered."""


# Fields that decide whether an engine computes the whole prompt (`Engine.skips_cache`).
SAMPLING_PARAMS = "sampling_params"
CACHE_FIELDS = frozenset({"echo", "logprobs", "prompt_logprobs", SAMPLING_PARAMS})
# Such fields within the object `sampling_params`.
CACHE_PARAMS = frozenset({"prompt_logprobs", "skip_reading_prefix_cache"})
