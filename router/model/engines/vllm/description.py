# SPDX-License-Identifier: Apache-2.0
"""The description of vLLM, for which the router's event format, hash schemes and hit rule were made first."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from kvrouter.contract.worker_status import EngineCache
from kvrouter.router.model.engines.engine import Engine, EngineGauges, OperatorFlags, TokenEndpoints
from kvrouter.router.model.engines.reading import VLLM_READING
from kvrouter.router.model.kvcache.block_hash import HashScheme, known_schemes
from kvrouter.router.model.workers.engine_answers import EngineAnswers, EventsConfig, streams_of
from kvrouter.router.model.workers.engine_cache import positive_count
from kvrouter.router.model.workers.hash_algorithms import DEFAULT_ALGO, LOOKAHEAD_TOKENS
from kvrouter.router.model.workers.registration import CatalogSpec

SOURCES_PATH = "/kv_event_sources"
MAX_VERSION_CHARS = 64

# One KVEventsConfig for each data-parallel rank, in which the ports already include the rank. Source: vLLM 0.32.0
# entrypoints/serve/instrumentator/basic.py:59, config/kv_events.py.
_sources = msgspec.json.Decoder(dict[int, EventsConfig], strict=False)

# The labels are all fields of CacheConfig as Python prints them, one line for each engine core. Source: vLLM 0.32.0
# v1/metrics/loggers.py:1114 (log_metrics_info), config/cache.py:322 (metrics_info).
_CACHE_LINE = re.compile(rb"^vllm:cache_config_info\{(.*)\} +1(?:\.0)?(?: +-?\d+)?\r?$", re.MULTILINE)
_LABEL = re.compile(rb'([A-Za-z_]\w*)="((?:[^"\\\n]|\\.)*)"')
_SWITCH = {b"True": True, b"False": False}


def schemes(spec: CatalogSpec, seed: str | None) -> tuple[HashScheme, ...]:
    """Return the schemes that agree with the stated catalog, or all known schemes if nothing is stated.

    Raises ValueError if a none_hash is stated with an unknown algorithm or has a wrong length.

    Args:
        spec: The stated catalog.
        seed: The engines' PYTHONHASHSEED as configured, or None.
    """
    # An algorithm of SGLang is ignored; one that no engine has raises ValueError.
    algo = None if spec.hash_algo in LOOKAHEAD_TOKENS else spec.hash_algo
    if spec.none_hash is not None:
        return (HashScheme.from_bytes(algo or DEFAULT_ALGO, bytes.fromhex(spec.none_hash)),)
    stated_seed = spec.none_hash_seed if spec.none_hash_seed is not None else seed
    candidates = known_schemes(() if stated_seed is None else (stated_seed,))
    if stated_seed is not None:
        # The scheme of the stated seed comes first; an engine with vLLM's default seed is still recognised.
        candidates = tuple(dict.fromkeys((HashScheme.from_seed(algo or DEFAULT_ALGO, stated_seed), *candidates)))
    return tuple(scheme for scheme in candidates if algo is None or scheme.algo == algo) or candidates


def completed(spec: CatalogSpec) -> CatalogSpec:
    """Return the stated catalog unchanged, because no value is the same in all engines of vLLM."""
    return spec


def stock_problem(spec: CatalogSpec) -> str:
    """Return "", because vLLM publishes the stores and removals of every group."""
    return ""


def skips_cache(fields: Mapping[str, object]) -> bool:
    """Return whether a request wants log-probabilities of the prompt's tokens, which need the whole prompt computed.

    Source: vLLM 0.32.0 v1/request.py (skip_reading_prefix_cache), sampling_params.py,
    entrypoints/openai/completion/protocol.py.
    """
    skips = fields.get("skip_reading_prefix_cache")
    if skips is not None:
        return skips is True
    echoed = fields.get("echo") is True and fields.get("logprobs") is not None
    return fields.get("prompt_logprobs") is not None or echoed


def streams_in(answer: bytes, url: str) -> EngineAnswers:
    """Read the answer of the engine at `url` to `GET /kv_event_sources`, which vLLM has from 0.31 on.

    The `streams` of the result are never None. Raises ValueError if the answer cannot be read.
    """
    try:
        configs = _sources.decode(answer)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"its {SOURCES_PATH} cannot be read: {error}") from None
    return streams_of(configs, url, f"start it with {FLAGS.events}")


class _Version(msgspec.Struct):
    rust_frontend_version: str = ""


def front_end_in(answer: bytes) -> str:
    """Return the name of vLLM's Rust front end if it sent this answer to `GET /version`, else "".

    Source: vLLM's rust/src/server/src/routes/version.rs; the front end of Python has no such field.
    """
    try:
        version = msgspec.json.decode(answer, type=_Version).rust_frontend_version
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return ""
    return f"vLLM's Rust front end {version[:MAX_VERSION_CHARS]}" if version else ""


def cache_in(page: bytes, dp_rank: int) -> EngineCache | None:
    """Return the KV cache of the core with this rank, None if the metrics page does not describe it."""
    cores = [dict(_LABEL.findall(labels)) for labels in _CACHE_LINE.findall(page)]
    own_cores = [core for core in cores if core.get(b"engine") == b"%d" % dp_rank]
    if len(cores) != 1 and len(own_cores) != 1:
        return None
    (core,) = cores if len(cores) == 1 else own_cores
    # Each core's line has the sum of the blocks of all cores (v1/engine/core_client.py:850).
    blocks = positive_count(core.get(b"num_gpu_blocks", b""))
    return EngineCache(
        prefix_caching=_SWITCH.get(core.get(b"enable_prefix_caching", b"")),
        block_size=positive_count(core.get(b"block_size", b"")),
        blocks=None if blocks is None else blocks // len(cores) or None,
        tokens=positive_count(core.get(b"kv_cache_size_tokens", b"")),
    )


GAUGES = EngineGauges(
    waiting=b"vllm:num_requests_waiting",
    running=b"vllm:num_requests_running",
    kv_usage=b"vllm:kv_cache_usage_perc",
    rank_label=b"engine",
    # The pattern matches the whole line, so that it does not match a number that was cut in two.
    life=re.compile(rb"^process_start_time_seconds ([0-9.eE+]+)\r?\n", re.MULTILINE),
)

# Source: vLLM 0.32.0 entrypoints/scale_out/render, entrypoints/serve/tokenize.
TOKENS = TokenEndpoints(
    render_paths={
        "chat": "/v1/chat/completions/render",
        "text": "/v1/completions/render",
        "responses": "/v1/responses/render",
        "messages": "/v1/messages/render",
    },
    how_to_render="vLLM has one with --enable-scale-out",
    chat_fields=(
        *("messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens"),
        *("chat_template", "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs"),
    ),
    text_fields=("prompt", "add_special_tokens"),
    ignored_fields=frozenset(),
    names_arguments=True,
    reading=VLLM_READING,
    version_path="/version",
    front_end_in=front_end_in,
)

FLAGS = OperatorFlags(
    serve="vllm serve ...",
    events=(
        '--kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", '
        '"replay_endpoint": "tcp://*:5558"}\''
    ),
    usage="--enable-prompt-tokens-details",
    prefix_cache="--enable-prefix-caching",
    memory="--gpu-memory-utilization",
    hashes=(
        "state the seed that its PYTHONHASHSEED has, by kvrouter serve --none-hash-seed SEED or for one worker by "
        "none_hash_seed=SEED, and its --prefix-caching-hash-algo by hash_algo=ALGORITHM; or install the engine patch"
    ),
)

# Some ways of scoring drop the salt. Source: vLLM 0.32.0
# entrypoints/{openai,anthropic,pooling,scale_out}/**/{protocol,serving,io_processor}.py.
SALTED_PATHS = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"),
        *("/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"),
        *("/inference/v1/generate", "/pooling", "/classify"),
    }
)

VLLM = Engine(
    name="vllm",
    title="vLLM",
    schemes=schemes,
    completed=completed,
    stock_problem=stock_problem,
    media={},
    tiers_shown=True,
    info_path=SOURCES_PATH,
    streams_in=streams_in,
    health_path="/health",
    gauges=GAUGES,
    cache_in=cache_in,
    tokens=TOKENS,
    flags=FLAGS,
    skips_cache=skips_cache,
    # Source: vLLM 0.32.0 entrypoints/openai/models/serving.py:156, v1/core/kv_cache_utils.py:595.
    lists_hashed_paths=True,
    salted_paths=SALTED_PATHS,
    # Source: vLLM 0.19.1 to 0.33.0 entrypoints/openai/completion/serving.py.
    sums_cached_tokens=False,
)
