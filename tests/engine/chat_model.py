# SPDX-License-Identifier: Apache-2.0
"""A tiny hybrid model that chats: `gemma3_config` with the tokenizer and the template of `tiny_tokenizer.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.engine.engine_process import gemma3_config
from tests.support.tiny_tokenizer import VOCAB_SIZE, write_tokenizer


def chat_config() -> dict[str, Any]:
    """Return the config of six layers, five of them with a sliding window, over the tiny tokenizer's vocabulary."""
    return gemma3_config() | {"vocab_size": VOCAB_SIZE, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def write_chat_model(folder: Path) -> Path:
    """Write a model that `vllm serve FOLDER --load-format dummy` serves, and return its folder."""
    write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(chat_config()))
    return folder


def write_adapter(folder: Path) -> Path:
    """Write a LoRA adapter with random weights for the model's query projections, and return its folder.

    `vllm serve` loads it with `--enable-lora --lora-modules NAME=FOLDER`.
    """
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config, rank = chat_config(), 8
    generator = torch.Generator().manual_seed(1)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        queries = config["num_attention_heads"] * config["head_dim"]
        weights[f"{name}.lora_A.weight"] = torch.randn(rank, config["hidden_size"], generator=generator)
        weights[f"{name}.lora_B.weight"] = torch.randn(queries, rank, generator=generator)
    save_file(weights, str(folder / "adapter_model.safetensors"))
    adapter_config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(adapter_config))
    return folder
