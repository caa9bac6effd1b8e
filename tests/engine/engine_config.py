# SPDX-License-Identifier: Apache-2.0
"""The configuration objects of an engine that never loads a model: enough for vLLM's own Scheduler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.config.kv_events import KVEventsConfig
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

from tests.engine.group_sets import GroupSet

MAX_MODEL_LEN = 4096
VOCAB_SIZE = 512
# Below the longest prompts, so that prefills are cut into chunks.
MAX_BATCHED_TOKENS = 192
MAX_RUNNING = 4
# Any size works, because nothing is ever copied.
SIMPLE_BLOCK_BYTES = 4096


def write_model(folder: Path) -> Path:
    """Write a folder that vLLM accepts as a model as long as nothing loads it, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_MODEL_LEN,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def build_vllm_config(
    group_set: GroupSet, model: Path, offload: dict[str, Any] | None, connector: str = "OffloadingConnector"
) -> VllmConfig:
    """Return the config of an engine with these groups.

    Args:
        group_set: The layout of the KV cache groups.
        model: The model's folder; see `write_model`.
        offload: The connector's `kv_connector_extra_config`, or None for an engine without a connector.
        connector: The connector's name.
    """
    model_config = ModelConfig(
        model=str(model), skip_tokenizer_init=True, max_model_len=MAX_MODEL_LEN, dtype="bfloat16", seed=0
    )
    cache_config = CacheConfig(
        block_size=group_set.block_size,
        enable_prefix_caching=True,
        prefix_cache_retention_interval=group_set.retention,
        prefix_match_unit=group_set.match_unit,
    )
    transfer = None
    if offload is not None:
        transfer = KVTransferConfig(kv_connector=connector, kv_role="kv_both", kv_connector_extra_config=offload)
    config = VllmConfig(
        model_config=model_config,
        cache_config=cache_config,
        scheduler_config=SchedulerConfig(
            max_num_seqs=MAX_RUNNING,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            max_model_len=MAX_MODEL_LEN,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=transfer,
        kv_events_config=KVEventsConfig(
            # With VLLM_HOST_IP=127.0.0.1 the publisher binds free ports and reports them.
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint="tcp://*:0",
            replay_endpoint="tcp://*:0",
        ),
    )
    # The CPU platform rewrites some of these fields while it checks a model's config, so set the layout's values again.
    cache_config.block_size = group_set.block_size
    cache_config.num_gpu_blocks = group_set.num_blocks
    cache_config.prefix_cache_retention_interval = group_set.retention
    cache_config.mamba_cache_mode = "align" if group_set.has_mamba else "none"
    if group_set.eagle:
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


def build_kv_cache_config(group_set: GroupSet, connector: str | None) -> KVCacheConfig:
    layers = [f"layer.{i}" for i in range(len(group_set.specs))]
    tensor = KVCacheTensor(group_set.num_blocks * SIMPLE_BLOCK_BYTES, layers, 0, SIMPLE_BLOCK_BYTES)
    return KVCacheConfig(
        num_blocks=group_set.num_blocks,
        # The SimpleCPUOffloadConnector compares its bytes with these tensors to size its pool.
        kv_cache_tensors=[tensor] if connector in ("SimpleCPUOffloadConnector", "MultiConnector") else [],
        kv_cache_groups=[
            KVCacheGroupSpec([layers[i]], spec, is_eagle_group=group_set.eagle and i in group_set.eagle_groups)
            for i, spec in enumerate(group_set.specs)
        ],
        prefix_cache_retention_interval=group_set.retention,
    )
