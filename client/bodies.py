# SPDX-License-Identifier: Apache-2.0
"""What is sent. Names and types are those of the router's OpenAPI document, which `tests/unit/test_client_shapes.py`
holds them to; other clients' names of the same fields are left out.

None: the field is not sent, and the router's default holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec


class QueryBody(msgspec.Struct, kw_only=True):
    """How much of a prompt each worker would reuse. token_ids: of the whole prompt. explain: the answer has `groups`
    and `limited_by`; held: and where the prompt's blocks lie."""

    token_ids: Sequence[int]
    model: str | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    workers: Sequence[str | int] | None = None
    explain: bool = False
    held: bool = False


class QueryByHashBody(msgspec.Struct, kw_only=True):
    """The same by block hashes from block 0, at the hash block size: u64, i64 or hex. num_tokens: length of the prompt;
    default: one token more than the hashes cover."""

    block_hashes: Sequence[int | str]
    num_tokens: int | None = None
    model: str | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    workers: Sequence[str | int] | None = None
    explain: bool = False
    held: bool = False


class PinnedBody(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The only worker allowed."""

    worker_id: str | int
    dp_rank: int | None = None


class SelectBody(msgspec.Struct, kw_only=True):
    """A prompt to place: exactly one of token_ids, block_hashes, prompt and messages.

    extra: fields beside `prompt` and `messages` that count as in OpenAI's API (tools, chat_template_kwargs ...).
    max_tokens: expected length of the answer. dry_run: of `select` alone, the prompt is not sent anywhere. selection_id:
    1 to 128 characters without `/`, `?` and `#`; default: generated."""

    model: str | None = None
    token_ids: Sequence[int] | None = None
    block_hashes: Sequence[int | str] | None = None
    prompt: str | Sequence[int] | None = None
    messages: Sequence[dict[str, Any]] | None = None
    extra: dict[str, Any] | None = None
    num_tokens: int | None = None
    max_tokens: int | None = None
    session_id: str | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    workers: Sequence[str | int] | None = None
    exclude_workers: Sequence[str | int] | None = None
    dp_rank: int | None = None
    pinned_worker: PinnedBody | None = None
    selection_id: str | None = None
    dry_run: bool = False
    explain: bool = False


class GroupBody(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One KV cache group; sizes and windows in tokens. kind: vLLM's."""

    kind: str
    block_size: int
    group_idx: int | None = None
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    eagle: bool = False
    prefix_cacheable: bool = True
    spec_class: int | None = None


class CatalogBody(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is known of a KV cache. It overrides what the router learns, and the rest is still learned."""

    groups: Sequence[GroupBody] | None = None
    hash_block_size: int | None = None
    scheduler_block_size: int | None = None
    hash_algo: str | None = None
    none_hash: str | None = None
    none_hash_seed: str | int | None = None
    hash_lookahead_tokens: int | None = None
    partial_hits: bool | None = None
    offload_blocks_per_chunk: int | None = None
    offload_connector: str | None = None
    lora_paths: dict[str, str] | None = None


class RegisterBody(msgspec.Struct, kw_only=True):
    """A worker. With a `url` alone, the router queries the engine for the rest. role: both (default), prefill, decode.
    handover: kv_transfer_params (default), header. engine: vllm, sglang."""

    worker_id: str | int
    model: str | None = None
    url: str | None = None
    endpoint: str | None = None
    replay_endpoint: str | None = None
    dp_rank: int | None = None
    patch_endpoint: str | None = None
    patch_key: str | None = None
    block_size: int | None = None
    lora_name: str | None = None
    catalog: CatalogBody | None = None
    role: str | None = None
    handover: str | None = None
    engine: str | None = None


class UnregisterBody(msgspec.Struct, kw_only=True):
    """The worker to drop: all its ranks where dp_rank is absent."""

    worker_id: str | int
    model: str | None = None
    dp_rank: int | None = None
