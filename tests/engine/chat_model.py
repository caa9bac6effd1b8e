# SPDX-License-Identifier: Apache-2.0
"""A tiny hybrid model that chats: `gemma3_config` with the tokenizer and the template of `tiny_tokenizer.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine_process import gemma3_config
from tiny_tokenizer import VOCAB_SIZE, write_tokenizer


def chat_config() -> dict[str, Any]:
    """Six layers, five of them with a sliding window, over this vocabulary."""
    return gemma3_config() | {"vocab_size": VOCAB_SIZE, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def write_chat_model(folder: Path) -> Path:
    """A folder that `vllm serve FOLDER --load-format dummy` serves."""
    write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(chat_config()))
    return folder
