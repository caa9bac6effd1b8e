# SPDX-License-Identifier: Apache-2.0
"""The parent's side of `offload_child.py`: a real engine with our offload tier, or without one."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.engine.engine_forks import ForkedEngine
from tests.engine.engine_process import ANSWER_TIMEOUT_S, VOCAB_SIZE, EngineProcess, gemma3_config
from tests.support.ports import free_port

SPEC = {"spec_name": "HybridOffloadingSpec", "spec_module_path": "kvrouter.engine_patch.offload.spec"}
HEARTBEAT_S = "0.05"
# The GPU cache must hold at least this many tokens, however small it is made.
MAX_MODEL_LEN = 1024
# A page of one layer of the model: keys and values of 32 tokens, one head of 64 numbers of 4 bytes.
PAGE_BYTES = 2 * 32 * 64 * 4


# Much smaller weights give logits that hardly depend on the prompt. Much larger weights give a single token, which does
# not depend on the prompt either.
WEIGHTS_STD = 0.1


def gemma3(folder: Path) -> Path:
    """Write a model with five sliding-window layers and one layer with full attention."""
    return _write(folder, gemma3_config())


def lfm2(folder: Path) -> Path:
    """Write a model with three layers that have a recurrent state and one layer with full attention.

    The recurrent layers are short convolutions, which are Mamba groups in vLLM.
    """
    return _write(
        folder,
        {
            "architectures": ["Lfm2ForCausalLM"],
            "model_type": "lfm2",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 128,
            "intermediate_size": 256,
            "block_dim": 128,
            "block_ff_dim": 256,
            "block_multiple_of": 32,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
            "conv_dim": 128,
            "conv_bias": False,
            "conv_L_cache": 3,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 2048,
            "norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "torch_dtype": "float32",
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
    )


def _write(folder: Path, config: dict[str, Any]) -> Path:
    """Write a model with random weights that are always the same, and whose answers depend on the whole prompt."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"initializer_range": WEIGHTS_STD}))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    model.save_pretrained(folder)
    # Write the config again, because the one that transformers saved lacks the fields that transformers does not know.
    (folder / "config.json").write_text(json.dumps(config | {"initializer_range": WEIGHTS_STD}))
    return folder


class OffloadEngine(EngineProcess):
    """An engine process with our offload tier, or without a connector if `offload` is None.

    `offload` holds the fields of `kv_connector_extra_config` beside the spec, and `more` other options of the child.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        num_blocks: int,
        offload: dict[str, Any] | None,
        patch: bool = True,
        **more: Any,
    ) -> None:
        folder.mkdir(exist_ok=True)
        environment = {
            "KVROUTER_PATCH": str(int(patch)),
            "KVROUTER_PATCH_HEARTBEAT_S": HEARTBEAT_S,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        super().__init__(folder, free_port(), free_port(), environment)
        self._model, self._num_blocks, self._offload, self._more = model, num_blocks, offload, more

    def start(self, options: dict[str, Any]) -> Any:
        return ForkedEngine(options, self.environment, self.folder, self.log)

    def model(self) -> Path:
        return self._model

    def options(self) -> dict[str, Any]:
        offload = None if self._offload is None else SPEC | self._offload
        return {"num_blocks": self._num_blocks, "offload": offload, "max_model_len": MAX_MODEL_LEN, **self._more}

    def do(self, name: str, **arguments: Any) -> Any:
        """Call a method of `offload_child.Child`, and return its result."""
        return self._ask({"do": name, **arguments})

    def run(
        self, token_ids: tuple[int, ...], max_tokens: int, tiers: list[str] | None = None, source: int | None = None
    ) -> dict[str, Any]:
        """Run one prompt until the engine rests.

        Args:
            token_ids: The prompt.
            max_tokens: How many tokens to generate.
            tiers: The media that the prompt may load from; None allows all of them.
            source: The port at which another engine lends its chunks, or None.
        """
        return dict(self.do("generate", token_ids=token_ids, max_tokens=max_tokens, tiers=tiers, source=source))

    def begin(self, requests: Sequence[dict[str, Any]]) -> None:
        """Begin to run prompts at the same time: `offload_child.Child.generate_all` has their fields."""
        assert self._process is not None and self._process.stdin is not None
        print(json.dumps({"do": "generate_all", "requests": requests}), file=self._process.stdin, flush=True)

    def answers(self) -> list[dict[str, Any]]:
        """Wait for the answers to `begin`."""
        return list(self._read(ANSWER_TIMEOUT_S))

    def pause(self) -> None:
        """Stop the process until `resume`, so that it answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused process go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process, so that it finishes and reports nothing, as on a machine that fails."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
