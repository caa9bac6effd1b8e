# SPDX-License-Identifier: Apache-2.0
"""vLLM's own Scheduler over a simulator's geometry, and the requests for both.

The Scheduler's model runner samples the tokens that the simulator samples.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from kvrouter.simulator.cache.cpu_tier import CacheEvent, EvictedChunk, OffloadedChunk
from kvrouter.simulator.cache.groups import make_group
from kvrouter.simulator.cache.pool import BlockPool, Cleared, Key, Removed, Stored
from kvrouter.simulator.cache.shapes import (
    Geometry,
    GroupShape,
    deepseek_v4,
    gemma3,
    gpt_oss,
    llama,
    llama4,
    qwen3_next,
)
from kvrouter.simulator.cache.text import next_token
from kvrouter.simulator.engine.replica import Completion
from tests.engine.offload_worker import OffloadWorker

Batch = list[CacheEvent]

# Few enough that requests wait, and enough that they interfere with each other.
MAX_RUNNING = 4

FULL: Final = "full_attention"
SWA: Final = "sliding_window"
CHUNKED: Final = "chunked_local_attention"
# Geometries without a sparse group, for which vLLM refuses a retention interval.
DENSE = {"llama", "llama4", "llama4 chunk off the block grid", "chunked only"}
# The most tokens of a prompt of `requests` with its answer.
LONGEST_TOKENS = 740
GEOMETRIES: dict[str, Callable[[int | None], Geometry]] = {
    "llama": lambda keep: llama(16, keep),
    "gemma3": lambda keep: gemma3(16, 64, retention_interval=keep),
    "gemma3 window off the block grid": lambda keep: gemma3(16, 100, retention_interval=keep),
    "gpt-oss": lambda keep: gpt_oss(16, 128, keep),
    "gpt-oss tiny window": lambda keep: gpt_oss(16, 8, keep),
    "gpt-oss window of one token": lambda keep: gpt_oss(16, 1, keep),
    "qwen3-next": lambda keep: qwen3_next(16, 3, keep),
    "qwen3-next block wider than a chunk": lambda keep: qwen3_next(80, 3, keep),
    "window only": lambda keep: Geometry("swa", (GroupShape(SWA, 16, 48),), keep),
    "two windows and full": lambda keep: Geometry(
        "3-way", (GroupShape(SWA, 16, 32), GroupShape(SWA, 16, 96), GroupShape(FULL, 16)), keep
    ),
    "window, Mamba and full": lambda keep: Geometry(
        "3-kinds", (GroupShape(SWA, 16, 40), GroupShape("mamba", 16), GroupShape(FULL, 16)), keep
    ),
    "full block wider": lambda keep: Geometry("mixed", (GroupShape(SWA, 16, 48), GroupShape(FULL, 32)), keep),
    "window block wider": lambda keep: Geometry("mixed", (GroupShape(SWA, 32, 70), GroupShape(FULL, 16)), keep),
    "llama4": lambda keep: llama4(16, 64, retention_interval=keep),
    "llama4 chunk off the block grid": lambda keep: llama4(16, 100, retention_interval=keep),
    "chunked only": lambda keep: Geometry("chunked", (GroupShape(CHUNKED, 16, attention_chunk=48),), keep),
    "deepseek-v4": lambda keep: deepseek_v4(128, 24, keep),
    "deepseek-v4 at its own sizes": lambda keep: deepseek_v4(retention_interval=keep),
    "three block sizes": lambda keep: Geometry(
        "mixed", (GroupShape(SWA, 16, 40), GroupShape(SWA, 32, 70), GroupShape(FULL, 48)), keep
    ),
}


class Engine:
    """vLLM's Scheduler with a model runner that samples the simulator's tokens."""

    def __init__(
        self, geometry: Geometry, num_blocks: int, chunk_tokens: int, folder: Path, *, cpu_chunks: int = 0
    ) -> None:
        """Build the scheduler with a CPU tier of about `cpu_chunks` chunks; `num_cpu_chunks` is the exact number."""
        import torch
        from vllm.config import (
            CacheConfig,
            DeviceConfig,
            KVEventsConfig,
            KVTransferConfig,
            ModelConfig,
            SchedulerConfig,
            VllmConfig,
            set_current_vllm_config,
        )
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import (
            ChunkedLocalAttentionSpec,
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
            MambaSpec,
            MLAAttentionSpec,
            SlidingWindowMLASpec,
            SlidingWindowSpec,
        )
        from vllm.v1.structured_output import StructuredOutputManager

        (folder / "config.json").write_text(
            json.dumps(
                {
                    "architectures": ["LlamaForCausalLM"],
                    "model_type": "llama",
                    "hidden_size": 64,
                    "intermediate_size": 64,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 1,
                    "num_key_value_heads": 1,
                    "max_position_embeddings": 32768,
                    "vocab_size": 64000,
                    "torch_dtype": "float32",
                }
            )
        )
        init_none_hash(sha256)
        spec = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}

        def group(shape: GroupShape) -> Any:
            size = shape.block_size
            if shape.kind == "full_attention":
                return FullAttentionSpec(block_size=size, **spec)
            if shape.kind == "mla_attention":
                return MLAAttentionSpec(block_size=size, **spec)
            if shape.kind == "sliding_window":
                return SlidingWindowSpec(block_size=size, sliding_window=shape.sliding_window, **spec)
            if shape.kind == "sliding_window_mla":
                return SlidingWindowMLASpec(block_size=size, sliding_window=shape.sliding_window, **spec)
            if shape.kind == "chunked_local_attention":
                return ChunkedLocalAttentionSpec(block_size=size, attention_chunk_size=shape.attention_chunk, **spec)
            return MambaSpec(
                block_size=shape.block_size, shapes=((1, 1),), dtypes=(torch.float32,), mamba_cache_mode="align"
            )

        transfer = None
        if cpu_chunks:
            transfer = KVTransferConfig(
                kv_connector="OffloadingConnector",
                kv_role="kv_both",
                # A chunk's bytes are rounded up to a page.
                kv_connector_extra_config={"cpu_bytes_to_use": cpu_chunks * 4096, "blocks_per_chunk": 1},
            )
        mamba = any(shape.kind == "mamba" for shape in geometry.groups)
        config = VllmConfig(
            model_config=ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=32768),
            cache_config=CacheConfig(
                block_size=geometry.groups[0].block_size if mamba else geometry.scheduler_block_size,
                enable_prefix_caching=True,
                mamba_cache_mode="align" if mamba else "none",
            ),
            scheduler_config=SchedulerConfig(
                max_num_seqs=MAX_RUNNING,
                max_num_batched_tokens=chunk_tokens,
                max_model_len=32768,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                async_scheduling=False,
            ),
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=transfer,
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        )
        config.cache_config.num_gpu_blocks = num_blocks
        config.cache_config.prefix_cache_retention_interval = geometry.retention_interval
        with set_current_vllm_config(config):
            self.scheduler = Scheduler(
                vllm_config=config,
                kv_cache_config=KVCacheConfig(
                    num_blocks=num_blocks,
                    kv_cache_tensors=[],
                    kv_cache_groups=[KVCacheGroupSpec([f"l{i}"], group(s)) for i, s in enumerate(geometry.groups)],
                    prefix_cache_retention_interval=geometry.retention_interval,
                ),
                structured_output_manager=StructuredOutputManager(config),
                block_size=geometry.scheduler_block_size,
                hash_block_size=geometry.hash_block_size,
            )
        self.scheduler.kv_event_publisher = self
        self.hasher = get_request_block_hasher(geometry.hash_block_size, sha256)
        self.batches: list[Any] = []
        self.requests = 0
        self.worker: OffloadWorker | None = None
        self.num_cpu_chunks = 0
        if cpu_chunks:
            self.worker = OffloadWorker(random.Random(num_blocks))
            self.num_cpu_chunks = self.scheduler.connector.connector_scheduler.manager._num_chunks
        # Requests in the order in which they ended.
        self.over: list[str] = []
        # Numbers of the transfers that ended in the last step.
        self.ended: list[int] = []
        # By request: the cached tokens that its usage reports.
        self.reused: dict[str, int] = {}

    def publish(self, batch: Any) -> None:
        """Keep a batch's events, in place of vLLM's publisher."""
        self.batches.append(batch.events)

    def add(self, prompt: list[int], max_tokens: int, cache_salt: str | None) -> Any:
        """Queue a request, and return vLLM's own object."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        self.requests += 1
        request = Request(
            request_id=str(self.requests),
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            pooling_params=None,
            cache_salt=cache_salt,
            block_hasher=self.hasher,
        )
        self.scheduler.add_request(request)
        return request

    def abort(self, request: Any) -> None:
        """Forget a request, as when its client goes away."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
        self.over.append(request.request_id)

    def step(self) -> list[str]:
        """Run one step, and return the ids of the requests that it computed, in order."""
        from vllm.v1.outputs import ModelRunnerOutput

        # vLLM keeps these ids in a set, which is ordered by the strings' hashes and decides the tier's recency.
        self.scheduler.finished_req_ids = sorted(self.scheduler.finished_req_ids, key=self.over.index)
        output = self.scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = self.scheduler.requests[name]
            whole = request.num_computed_tokens >= request.num_tokens
            sampled.append([next_token(request.all_token_ids)] if whole else [])
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        if self.worker is not None:
            result.kv_connector_output = self.worker.run(output.kv_connector_metadata)
            self.ended = list(result.kv_connector_output.kv_connector_worker_meta.completed_jobs)
        computed = [self.scheduler.requests[name] for name in names]
        for client_outputs in self.scheduler.update_from_output(output, result).values():
            for request_output in client_outputs.outputs:
                if request_output.prefill_stats is not None:
                    self.reused[request_output.request_id] = request_output.prefill_stats.num_cached_tokens
        self.over += [request.request_id for request in computed if request.is_finished()]
        return names

    def run(self, prompt: list[int], max_tokens: int, cache_salt: str | None) -> Completion:
        """Run one request to its end."""
        request = self.add(prompt, max_tokens, cache_salt)
        while self.scheduler.has_unfinished_requests():
            assert self.step(), "vLLM cannot schedule the request: the pool is too small"
        return Completion(len(prompt), self.reused[request.request_id], tuple(request.output_token_ids))


def tuplify(event: Any, geometry: Geometry) -> CacheEvent:
    """Return a vLLM event as the simulator's type, and fail on an event that the simulator would not send."""
    from vllm.distributed import kv_events

    if isinstance(event, kv_events.AllBlocksCleared):
        return Cleared()
    if event.medium == "CPU":
        if isinstance(event, kv_events.BlockRemoved):
            return EvictedChunk(event.group_idx, tuple(event.block_hashes))
        (block_hash,) = event.block_hashes
        assert (event.block_size, event.token_ids, event.kv_cache_spec_kind) == (0, [], None)
        return OffloadedChunk(Key(event.group_idx, block_hash))
    assert event.medium == "GPU"
    if isinstance(event, kv_events.BlockRemoved):
        (block_hash,) = event.block_hashes
        return Removed(Key(event.group_idx, block_hash))
    shape = geometry.groups[event.group_idx]
    assert event.kv_cache_spec_kind == shape.kind
    assert event.kv_cache_spec_sliding_window == shape.sliding_window
    keys = event.extra_keys or [None] * len(event.block_hashes)
    return Stored(
        group_idx=event.group_idx,
        hashes=tuple(event.block_hashes),
        parent=event.parent_block_hash,
        tokens=tuple(event.token_ids),
        block_size=event.block_size,
        extra_keys=tuple(None if key is None else tuple(key) for key in keys),
    )


def requests(rng: random.Random, count: int) -> Iterator[tuple[list[int], int, str | None]]:
    """Yield (prompt, most tokens, salt) of prompts that share prefixes, continue an answer, repeat, or are new."""
    shared = [[rng.randrange(64_000) for _ in range(rng.randrange(1, 320))] for _ in range(4)]
    past: list[list[int]] = []
    for _ in range(count):
        kind = rng.random()
        if past and kind < 0.35:
            text = rng.choice(past)
            prompt = text + [rng.randrange(64_000) for _ in range(rng.randrange(1, 90))]
        elif past and kind < 0.5:
            text = rng.choice(past)
            prompt = text[: rng.randrange(1, len(text) + 1)]
        elif kind < 0.85:
            prompt = rng.choice(shared) + [rng.randrange(64_000) for _ in range(rng.randrange(0, 150))]
        else:
            prompt = [rng.randrange(64_000) for _ in range(rng.randrange(1, 500))]
        prompt = prompt[:700]
        max_tokens = rng.choice([1, 1, 2, 5, 17, 40])
        salt = rng.choice([None, None, None, "tenant"])
        yield prompt, max_tokens, salt
        text = list(prompt)
        for _ in range(max_tokens):
            text.append(next_token(text))
        past.append(text)
        past = past[-8:]


def fewest_blocks(geometry: Geometry, tokens: int, chunk_tokens: int) -> int:
    """Return the blocks of the smallest pool in which a request of that length can run."""
    groups = [make_group(i, geometry, BlockPool(2)) for i in range(len(geometry.groups))]
    return 1 + sum(group.peak_blocks(tokens, chunk_tokens) for group in groups)
