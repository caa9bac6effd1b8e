# SPDX-License-Identifier: Apache-2.0
"""The description of SGLang.

SGLang's own events cover full attention only: they report no removal of a sliding window's pages or of a Mamba state.

Source: SGLang 0.5.23 srt/disaggregation/kv_events.py, srt/mem_cache/events.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from kvrouter.contract.worker_status import EngineCache
from kvrouter.router.base.common.ids import CPU, STORAGE
from kvrouter.router.model.engines.engine import Engine, EngineGauges, OperatorFlags, TokenEndpoints
from kvrouter.router.model.engines.reading import SGLANG_READING
from kvrouter.router.model.engines.sglang.server_info import SERVER_INFO_PATH, streams_in
from kvrouter.router.model.kvcache.block_hash import HashScheme
from kvrouter.router.model.kvcache.catalog import FULL_KINDS
from kvrouter.router.model.kvcache.offload_connectors import HICACHE
from kvrouter.router.model.workers.engine_cache import positive_count
from kvrouter.router.model.workers.hash_algorithms import LOOKAHEAD_TOKENS
from kvrouter.router.model.workers.registration import CatalogSpec

# Source: SGLang 0.5.23 srt/observability/metrics_collector.py:1289.
_CACHE_LINE = re.compile(
    rb"^sglang:(page_size|num_pages|max_total_num_tokens)(?:\{([^}\n]*)\})? +([-+0-9.eE]+)(?: +-?\d+)?\r?$",
    re.MULTILINE,
)
_RANK = re.compile(rb'(?:^|,) *dp_rank="(\d{1,9})"')


def schemes(spec: CatalogSpec, seed: str | None) -> tuple[HashScheme, ...]:
    """Return both schemes of SGLang, the stated one first: pages of tokens, and pages of bigrams (EAGLE).

    SGLang has no seed, so the worker's first page shows which of them it uses, also where the stated one is wrong. A
    stated algorithm of another engine is ignored.
    """
    algos = sorted(LOOKAHEAD_TOKENS, key=lambda algo: (algo != spec.hash_algo, LOOKAHEAD_TOKENS[algo]))
    return tuple(HashScheme(algo, b"") for algo in algos)


def completed(spec: CatalogSpec) -> CatalogSpec:
    """Return the stated catalog, completed by the values that are the same in all engines of SGLang."""
    return msgspec.structs.replace(
        spec,
        partial_hits=False,
        offload_connector=spec.offload_connector or HICACHE,
        whole_windows=True,
    )


def stock_problem(spec: CatalogSpec) -> str:
    """Return why SGLang's own events prove no hit, or "" if the stated groups are all of full attention.

    The groups have to be stated, because the events of a hybrid model look the same.
    """
    if spec.groups and all(group.kind in FULL_KINDS for group in spec.groups):
        return ""
    return (
        "SGLang's own events do not tell which sliding-window pages and Mamba states were evicted, nor whether the model "
        "has any: load the engine patch there, or register a catalog with one group of full_attention if that is all it has"
    )


def skips_cache(fields: Mapping[str, object]) -> bool:
    """Return whether a request wants the log-probabilities of its echoed prompt.

    They begin at the first token of the prompt, so SGLang reuses nothing.

    Source: SGLang 0.5.23 entrypoints/openai/serving_completions.py, managers/schedule_batch.py:1774.
    """
    return fields.get("echo") is True and bool(fields.get("logprobs"))


def cache_in(page: bytes, dp_rank: int) -> EngineCache | None:
    """Return the KV cache of the core with this rank, None if the metrics page does not describe it.

    The page does not say whether the radix cache is on.
    """
    cores: dict[int | None, dict[bytes, bytes]] = {}
    for name, labels, value in _CACHE_LINE.findall(page):
        rank = _RANK.search(labels)
        cores.setdefault(int(rank[1]) if rank else None, {})[name] = value
    core = next(iter(cores.values())) if len(cores) == 1 else cores.get(dp_rank)
    if core is None:
        return None
    return EngineCache(
        block_size=positive_count(core.get(b"page_size", b"")),
        blocks=positive_count(core.get(b"num_pages", b"")),
        tokens=positive_count(core.get(b"max_total_num_tokens", b"")),
    )


# SGLang has no process_start_time_seconds, because its metrics are gathered from several processes. The duration of its
# start has nine digits, which do not recur at another start. Source: SGLang 0.5.23 observability/metrics_collector.py.
GAUGES = EngineGauges(
    waiting=b"sglang:num_queue_reqs",
    running=b"sglang:num_running_reqs",
    kv_usage=b"sglang:token_usage",
    rank_label=b"dp_rank",
    life=re.compile(
        rb'^sglang:startup_time_seconds\{[^}\n]*phase="scheduler_e2e"[^}\n]*\} ([0-9.eE+-]+)\r?\n', re.MULTILINE
    ),
)

# Source: SGLang 0.5.23 entrypoints/openai/serving_tokenize.py, protocol.py (TokenizeRequest). SGLang's chats and
# completions have neither of the ignored fields.
TOKENS = TokenEndpoints(
    render_paths={},
    how_to_render="SGLang has none",
    chat_fields=None,
    text_fields=("prompt",),
    ignored_fields=frozenset({"add_generation_prompt", "add_special_tokens"}),
    names_arguments=False,
    reading=SGLANG_READING,
)

FLAGS = OperatorFlags(
    serve="python -m sglang.launch_server ...",
    events=(
        '--kv-events-config \'{"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}\''
    ),
    usage="--enable-cache-report",
    prefix_cache="(without --disable-radix-cache)",
    memory="--mem-fraction-static",
    hashes=(
        "pages of tokens and pages of bigrams (EAGLE) were both tried: check that it is SGLang (engine=sglang), in a "
        "version that docs/how-to/sglang.md names"
    ),
)

# Messages of Anthropic's API become chats without the salt, and embeddings, scores and classes have no such field.
# Source: SGLang 0.5.23 entrypoints/{openai,anthropic}/{protocol,serving}*.py, managers/io_struct.py.
SALTED_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/generate"})

SGLANG = Engine(
    name="sglang",
    title="SGLang",
    schemes=schemes,
    completed=completed,
    stock_problem=stock_problem,
    media={"CPU_PINNED": CPU, "DISK": STORAGE},
    tiers_shown=False,
    info_path=SERVER_INFO_PATH,
    streams_in=streams_in,
    # SGLang's /health takes a second or more and generates a token; /ready shows whether it accepts requests.
    health_path="/ready",
    gauges=GAUGES,
    cache_in=cache_in,
    tokens=TOKENS,
    flags=FLAGS,
    skips_cache=skips_cache,
    # Its hashes cover an id that it makes at each load, which only the patch reports.
    lists_hashed_paths=False,
    salted_paths=SALTED_PATHS,
    # Source: SGLang 0.5.23 entrypoints/openai/usage_processor.py.
    sums_cached_tokens=True,
)
