# SPDX-License-Identifier: Apache-2.0
"""vLLM's own scheduler, driven without a model, under any version from 0.20 on.

The other tests' oracle is written against one version. This one inspects each version's signatures for the arguments
that they accept. It drives the scheduler and reads the resident blocks; `version_probe` judges them.
"""

from __future__ import annotations

import inspect
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import common
from vllm.model_executor.models.registry import ModelRegistry
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tests.engine.version_layouts import Layout
from tests.engine.workload import PromptTree

# The architecture that the tests' model folder names.
ARCHITECTURE = "LlamaForCausalLM"
MAX_MODEL_LEN = 4096
VOCAB_SIZE = 512
RETENTION_VARIABLE = "VLLM_PREFIX_CACHE_RETENTION_INTERVAL"
# A chunk's bytes in every layout. Versions differ in how they round it, but none rounds a page.
CHUNK_BYTES = 4096
# Far more than the longest load of the tests needs.
MAX_DRAIN_STEPS = 2_000
IDLE_STEPS = 6


class NoModel(torch.nn.Module):
    """A class with the methods that vLLM requires of a text model.

    To inspect a real model's class would cost vLLM a process and ten seconds.
    """

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None: ...

    def get_input_embeddings(self, input_ids: torch.Tensor) -> torch.Tensor: ...

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor: ...

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor: ...

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor: ...


def accepted(call: Callable[..., Any], **arguments: Any) -> Any:
    """Call a function with those of the arguments that this version's signature has."""
    parameters = inspect.signature(call).parameters
    return call(**{name: value for name, value in arguments.items() if name in parameters})


def vllm_config(layout: Layout, model: Path, endpoint: str, replay_endpoint: str) -> VllmConfig:
    model_config = ModelConfig(
        model=str(model), skip_tokenizer_init=True, max_model_len=MAX_MODEL_LEN, dtype="bfloat16", seed=0
    )
    cache = accepted(
        CacheConfig,
        block_size=layout.block_size,
        enable_prefix_caching=True,
        prefix_cache_retention_interval=layout.retention,
    )
    transfer = None
    if layout.cpu_chunks:
        extra = {
            "cpu_bytes_to_use": layout.cpu_chunks * CHUNK_BYTES,
            "self_describing_kv_events": layout.self_describing,
        }
        transfer = KVTransferConfig(
            kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra
        )
    scheduler = accepted(
        SchedulerConfig,
        max_num_seqs=4,
        max_num_batched_tokens=192,
        max_model_len=MAX_MODEL_LEN,
        is_encoder_decoder=False,
        async_scheduling=False,
    )
    config = VllmConfig(
        model_config=model_config,
        cache_config=cache,
        scheduler_config=scheduler,
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=transfer,
        kv_events_config=KVEventsConfig(
            enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint, replay_endpoint=replay_endpoint
        ),
    )
    # The CPU platform rewrites some of these fields while it checks a model's config, so set the layout's values again.
    scheduler.disable_hybrid_kv_cache_manager = len(layout.groups) == 1
    cache.block_size = layout.block_size
    cache.num_gpu_blocks = layout.num_blocks
    if hasattr(cache, "prefix_cache_retention_interval"):
        cache.prefix_cache_retention_interval = layout.retention
    cache.mamba_cache_mode = "align" if any(group.kind == "mamba" for group in layout.groups) else "none"
    if layout.eagle_groups:
        # The scheduler reads only the method. A config with a real eagle method would need a draft model to load.
        speculative = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=1,
            target_model_config=model_config,
            target_parallel_config=ParallelConfig(),
        )
        speculative.method = "eagle"
        config.speculative_config = speculative
    return config


def kv_cache_config(layout: Layout) -> KVCacheConfig:
    tensors = []
    if "shared_by" in inspect.signature(KVCacheTensor).parameters:
        # The size of the offload tier follows from these tensors; later versions use the specs if there are no tensors.
        tensors = [KVCacheTensor(size=layout.num_blocks * CHUNK_BYTES, shared_by=["layer.0"])]
    groups = [
        KVCacheGroupSpec([f"layer.{i}"], group.spec(), is_eagle_group=i in layout.eagle_groups)
        for i, group in enumerate(layout.groups)
    ]
    return accepted(
        KVCacheConfig,
        num_blocks=layout.num_blocks,
        kv_cache_tensors=tensors,
        kv_cache_groups=groups,
        prefix_cache_retention_interval=layout.retention,
    )


class JobWorker:
    """The worker side of offloading, without memory: transfers end in their own step or later."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._loads: dict[int, str] = {}
        self._stores: set[int] = set()

    def run(self, metadata: Any, _finished: set[str]) -> KVConnectorOutput:
        self._loads.update({job_id: job.req_id for job_id, job in metadata.load_jobs.items()})
        flushed = (metadata.jobs_to_flush or set()) & (self._stores | set(metadata.store_jobs) | self._loads.keys())
        done = flushed | {job for job in [*self._loads, *sorted(self._stores)] if self._rng.random() < 0.8}
        self._stores = (self._stores | set(metadata.store_jobs)) - done
        received = {self._loads.pop(job) for job in sorted(done) if job in self._loads}
        report = common.OffloadingWorkerMetadata()
        for job in sorted(done):
            if hasattr(report, "mark_completed"):
                report.mark_completed(job)
            else:
                report.completed_jobs[job] = 1
        return KVConnectorOutput(finished_recving=received or None, kv_connector_worker_meta=report)


class RequestWorker:
    """The worker side of offloading for vLLM 0.20, which knows transfers by their request.

    Stores are reported once their request has finished.
    """

    def __init__(self) -> None:
        self._storing: set[str] = set()
        self._finished: set[str] = set()

    def run(self, metadata: Any, finished: set[str]) -> KVConnectorOutput:
        self._finished |= finished
        sent = self._storing & self._finished
        self._storing = (self._storing | set(metadata.reqs_to_store)) - sent
        self._finished -= sent
        return KVConnectorOutput(finished_sending=sent or None, finished_recving=set(metadata.reqs_to_load) or None)


class Engine:
    """An engine core without its model.

    The same seed gives the same events, byte for byte, except their times.
    """

    def __init__(self, layout: Layout, model: Path, endpoint: str, replay_endpoint: str, seed: int) -> None:
        self.layout = layout
        self.endpoint, self.replay_endpoint = endpoint, replay_endpoint
        # Batches that were handed to the publisher.
        self.batches = 0
        # For every hash unit of every request: its end in tokens, and the hash before it (None at the start).
        self.ends: dict[int, int] = {}
        self._before: dict[int, int | None] = {}
        self._rng = Random(seed)
        self._tree = PromptTree(self._rng, VOCAB_SIZE)
        self._names = 0
        ModelRegistry.register_model(ARCHITECTURE, NoModel)
        os.environ["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] = str(int(layout.int_hashes))
        os.environ.pop(RETENTION_VARIABLE, None)
        if layout.retention is not None and any(group.kind != "full_attention" for group in layout.groups):
            os.environ[RETENTION_VARIABLE] = str(layout.retention)
        config = vllm_config(layout, model, endpoint, replay_endpoint)
        cache = kv_cache_config(layout)
        with set_current_vllm_config(config):
            self.block_size, self.hash_block_size = kv_cache_utils.resolve_kv_cache_block_sizes(cache, config)
            self.scheduler = Scheduler(
                vllm_config=config,
                kv_cache_config=cache,
                structured_output_manager=StructuredOutputManager(config),
                block_size=self.block_size,
                hash_block_size=self.hash_block_size,
            )
        # The engine core also draws NONE_HASH after its scheduler is built.
        kv_cache_utils.init_none_hash(sha256)
        # From 0.33 on, with EAGLE, a hash also covers the tokens that follow its block.
        self.lookahead_tokens = getattr(config, "num_hash_lookahead_tokens", 0)
        reach = (self.lookahead_tokens,) if self.lookahead_tokens else ()
        self._hasher = kv_cache_utils.get_request_block_hasher(self.hash_block_size, sha256, *reach)
        publish = self.scheduler.kv_event_publisher.publish

        def count_and_publish(batch: Any) -> None:
            self.batches += 1
            publish(batch)

        self.scheduler.kv_event_publisher.publish = count_and_publish
        self._worker: Any = None
        if layout.cpu_chunks:
            by_job = hasattr(common, "OffloadingWorkerMetadata")
            self._worker = JobWorker(self._rng) if by_job else RequestWorker()

    def close(self) -> None:
        self.scheduler.shutdown()

    def work(self, steps: int) -> None:
        """Run steps of a random load, and then until no request is unfinished."""
        for _ in range(steps):
            if self.scheduler.get_num_unfinished_requests() < 6:
                self.submit()
            self.step()
        self.drain()

    def drain(self) -> None:
        # A few more steps, so that the connector learns what finished and its last transfers end.
        idle = 0
        for _ in range(MAX_DRAIN_STEPS):
            self.step()
            idle = 0 if self.scheduler.get_num_unfinished_requests() else idle + 1
            if idle == IDLE_STEPS:
                return
        raise AssertionError(f"{self.scheduler.get_num_unfinished_requests()} requests never end")

    def submit(self) -> None:
        prompt = self._tree.request()
        self._names += 1
        request = Request(
            request_id=f"r{self._names}",
            prompt_token_ids=list(prompt.token_ids),
            sampling_params=SamplingParams(max_tokens=self._rng.choice((1, 3, 3, 40)), ignore_eos=True),
            pooling_params=None,
            cache_salt=prompt.cache_salt,
            block_hasher=self._hasher,
            **({"eos_token_id": None} if "eos_token_id" in inspect.signature(Request).parameters else {}),
        )
        self.scheduler.add_request(request)

    def hash_before(self, block_hash: int, block_size: int) -> int | None:
        """Return the hash of the block before this one; None at the start of its prompt, or if the hash is unknown."""
        before: int | None = block_hash
        for _ in range(block_size // self.hash_block_size):
            if before is None:
                return None
            before = self._before.get(before)
        return before

    def _learn(self, request: Any) -> None:
        before = None
        for i, block_hash in enumerate(request.block_hashes):
            short = int.from_bytes(block_hash[-8:], "big")
            self.ends[short], self._before[short] = (i + 1) * self.hash_block_size, before
            before = short

    def step(self) -> None:
        running = list(self.scheduler.requests.values())
        self._step()
        for request in running:
            self._learn(request)

    def _step(self) -> None:
        output = self.scheduler.schedule()
        result = self._run_model(output)
        if self._worker is not None:
            result.kv_connector_output = self._worker.run(output.kv_connector_metadata, output.finished_req_ids)
        self.scheduler.update_from_output(output, result)
        if self.layout.eagle_groups:
            names = [request.request_id for request in self.scheduler.running]
            drafts = DraftTokenIds(names, [[self._rng.randrange(VOCAB_SIZE)] for _ in names])
            self.scheduler.update_draft_token_ids(drafts)

    def _run_model(self, output: Any) -> ModelRunnerOutput:
        """Return the output of a worker: a random token for each request whose known tokens are all computed now."""
        sampled: list[list[int]] = []
        for name in output.num_scheduled_tokens:
            request = self.scheduler.requests[name]
            drafted = output.scheduled_spec_decode_tokens.get(name, [])
            if request.num_computed_tokens < request.num_tokens:
                sampled.append([])  # a chunk of a prefill
                continue
            taken = drafted if drafted and self._rng.random() < 0.5 else []
            sampled.append([*taken, self._rng.randrange(VOCAB_SIZE)])
        names = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled)

    # Resident blocks, from the objects that decide reuse: (group_idx, medium) -> hash (its last 8 bytes) -> copies.

    def gpu_blocks(self) -> dict[tuple[int, str], Counter[int]]:
        held: dict[tuple[int, str], Counter[int]] = {}
        for key, blocks in self.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache.items():
            copies = len(blocks) if isinstance(blocks, dict) else 1
            held.setdefault((kv_cache_utils.get_group_id(key), "GPU"), Counter())[_short(key)] += copies
        return held

    def cpu_blocks(self) -> dict[tuple[int, str], Counter[int]]:
        held: dict[tuple[int, str], Counter[int]] = {}
        if self.scheduler.connector is None:
            return held
        policy = self.scheduler.connector.connector_scheduler.manager._policy
        stored = policy.chunks if hasattr(policy, "chunks") else policy.blocks
        for key, status in stored.items():
            if status.is_ready:
                held.setdefault((kv_cache_utils.get_group_id(key), "CPU"), Counter())[_short(key)] += 1
        return held


def _short(key: bytes) -> int:
    """Return the last 8 bytes of a key's hash; a key is a hash and 4 bytes of group index."""
    return int.from_bytes(key[-12:-4], "big")
