# SPDX-License-Identifier: Apache-2.0
"""A tiny hybrid model that sees, with random weights: Idefics3 over a Llama with five sliding-window layers of six.

This family takes any number of images, and vLLM serves it without torchvision. Its text layers are sliding where
`layer_types` says so. Each image is one tile, whatever its size, and takes `IMAGE_LENGTH` tokens of the prompt.
"""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from random import Random
from typing import Any

from PIL import Image
from tokenizers import AddedToken, Tokenizer

from tests.engine.engine_process import HYBRID_LAYERS
from tests.support.tiny_tokenizer import BOS, CHAT_TEMPLATE, EOS, PAD, VOCAB_SIZE, build_tokenizer, write_tokenizer

IMAGE, AROUND_IMAGE, GLOBAL_IMAGE, END_OF_UTTERANCE = (
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
)
MEDIA_TOKENS = (IMAGE, AROUND_IMAGE, GLOBAL_IMAGE, END_OF_UTTERANCE)
# The tokenizer may hold fewer tokens than were requested, and the added tokens need room behind them.
MEDIA_VOCAB_SIZE = VOCAB_SIZE + 64

IMAGE_SIZE_PIXELS = 64
PATCH_SIZE_PIXELS = 8
# The embeddings of one image, and its tokens: one for each embedding, and three that frame them.
IMAGE_EMBEDDINGS = (IMAGE_SIZE_PIXELS // PATCH_SIZE_PIXELS) ** 2
IMAGE_LENGTH = IMAGE_EMBEDDINGS + 3

_TEXT_PART = "{%- if part.type == 'text' %}{{- part.text | trim }}{%- endif %}"
_ANY_PART = (
    "{%- if part.type == 'text' %}{{- part.text | trim }}{%- elif part.type == 'image' %}{{- '"
    + IMAGE
    + "' }}{%- endif %}"
)
MEDIA_TEMPLATE = CHAT_TEMPLATE.replace(_TEXT_PART, _ANY_PART)


def media_tokenizer() -> Tokenizer:
    """Return the tiny tokenizer with the tokens that stand for images."""
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in MEDIA_TOKENS])
    return tokenizer


def media_config() -> dict[str, Any]:
    """Return a config with `HYBRID_LAYERS` as text layers, behind a vision tower of two layers."""
    tokenizer = build_tokenizer()
    ids = {"bos_token_id": tokenizer.token_to_id(BOS), "eos_token_id": tokenizer.token_to_id(EOS)}
    ids["pad_token_id"] = tokenizer.token_to_id(PAD)
    return {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "image_token_id": media_tokenizer().token_to_id(IMAGE),
        "scale_factor": 1,
        "torch_dtype": "float32",
        **ids,
        "text_config": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **HYBRID_LAYERS,
            "vocab_size": MEDIA_VOCAB_SIZE,
            **ids,
        },
        "vision_config": {
            "model_type": "idefics3_vision",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": IMAGE_SIZE_PIXELS,
            "patch_size": PATCH_SIZE_PIXELS,
        },
    }


def write_media_model(folder: Path) -> Path:
    """Write a model for chats with images and without, and return its folder.

    `vllm serve FOLDER --load-format dummy` serves it.
    """
    write_tokenizer(folder, MEDIA_TEMPLATE)
    media_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(media_config()))
    image_processor = {
        "image_processor_type": "Idefics3ImageProcessor",
        "do_image_splitting": False,
        "size": {"longest_edge": IMAGE_SIZE_PIXELS},
        "max_image_size": {"longest_edge": IMAGE_SIZE_PIXELS},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(image_processor))
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": IMAGE_EMBEDDINGS}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    return folder


def image_png(random: Random, width_pixels: int = 48, height_pixels: int = 32) -> bytes:
    """Return a PNG of random pixels."""
    stream = io.BytesIO()
    Image.frombytes("RGB", (width_pixels, height_pixels), random.randbytes(3 * width_pixels * height_pixels)).save(
        stream, "PNG"
    )
    return stream.getvalue()


def image_part(png: bytes) -> dict[str, Any]:
    """Return the part of a chat message's content that holds this image."""
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(png).decode()}}
