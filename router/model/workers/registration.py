# SPDX-License-Identifier: Apache-2.0
"""The registration of a worker: its addresses, the stated part of its catalog, and its role."""

from __future__ import annotations

import re

import msgspec

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.model.workers.role import HandoverWay, Role
from kvrouter.router.model.workers.source_precedence import REGISTER

# The largest hybrid models have fewer than ten groups. The tables of the hit rule hold this many, and the rule does not
# check the number.
MAX_GROUPS = 64

# Far more than any engine's block (vLLM: up to some thousand tokens for Mamba) and any window. The product of two such
# numbers still fits the rule's int64.
MAX_TOKENS = 2**31 - 1


class GroupSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """One KV cache group as a user or the engine patch states it. Sizes and windows are in tokens."""

    # The engine's number of the group, or None if its events name no groups.
    group_idx: int | None
    # vLLM's kind of the group's KV cache, such as "full_attention".
    kind: str
    block_size: int
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    eagle: bool = False
    prefix_cacheable: bool = True
    # Groups of one class are looked up jointly, as vLLM does for equal specs. If this is None, the class follows from
    # kind, block size and window.
    spec_class: int | None = None


class CatalogSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """The stated part of a worker's catalog. A field that is None is learned or derived.

    docs/reference/http.md describes the fields.
    """

    groups: tuple[GroupSpec, ...] = ()
    hash_block_size: int | None = None
    scheduler_block_size: int | None = None
    hash_algo: str | None = None
    none_hash: str | None = None
    none_hash_seed: str | None = None
    # Tokens after a block that its hash covers too. If this is None, 0 or 1 is used, whichever explains the blocks.
    hash_lookahead_tokens: int | None = None
    partial_hits: bool | None = None
    offload_blocks_per_chunk: int | None = None
    # vLLM's name of the KV connector whose rule holds for blocks on CPU or disk (offload_connectors.py).
    offload_connector: str | None = None
    # Whether hits of a SimpleCPUOffloadConnector may end wherever those of the GPU may. In its lazy mode they may not.
    offload_partial_hits: bool | None = None
    # Whether a hit needs as many resident tokens before its end as the window has, as in SGLang. vLLM needs one less.
    whole_windows: bool = False
    # The path of each LoRA adapter as the engine loaded it, by the adapter's name.
    lora_paths: dict[str, str] = {}


# The model of a registration until the engine is queried for it.
UNKNOWN_MODEL = ""

# Replaces the endpoint of the engine patch: the router does not look for a patch.
NO_PATCH = "off"


# The end of an OpenAI client's base URL. It is removed, because the paths that are sent to an engine begin with it. The
# pattern does not match a host of that name.
_BASE_PATH = re.compile(r"(?<=[^/:])/v1/*\Z")
BASE_PATH_LEFT_OUT = "/v1 at the end of a worker's url is left out, because the router's requests add it"


class Registration(msgspec.Struct, frozen=True, omit_defaults=True):
    """One worker as registered."""

    worker: WorkerKey
    # The ZMQ endpoint of its KV events, or None.
    events: str | None = None
    # The ZMQ endpoint that replays missed events, or None.
    replay: str | None = None
    # The HTTP address of the engine, or None.
    url: str | None = None
    block_size: int | None = None
    lora_name: str | None = None
    catalog: CatalogSpec | None = None
    # The endpoint at which the engine patch answers requests. If this is None, the router looks for a patch beside
    # `events`; with NO_PATCH it looks for none.
    patch: str | None = None
    # The public key (Z85) that the patch must prove. With a key, the router ignores everything that is not encrypted
    # with it.
    patch_key: str | None = None
    # Whether a client wants the worker to get no new requests. Its events are still followed.
    draining: bool = False
    role: Role = Role.BOTH
    # The way in which a prompt that a prefill worker computed is handed to this worker.
    handover: HandoverWay = HandoverWay.KV_TRANSFER_PARAMS
    # Whether its source wants the worker to get no new requests. Its events are still followed.
    retiring: bool = False
    # The source that names the worker (source_precedence.py).
    source: str = REGISTER
    # Facts that the source could not find out, for people.
    note: str = ""
    # The kind of the engine (engine_name.py), or None while it is not known.
    engine: str | None = None
    # The name of its key in each router's worker_api_keys_file (engine_key.py), or None for the default one.
    engine_key: str | None = None
    # Where vLLM's own p2p tier lends blocks, as HOST:PORT of its rank 0, or None. An address that the engine patch declares
    # replaces it.
    peer: str | None = None
    # Whether the id was given as a number, because clients of Dynamo's services want it back as one.
    numbered: bool = False

    def __post_init__(self) -> None:
        """Remove a trailing /v1 from the URL, wherever the registration comes from."""
        if self.url is not None and _BASE_PATH.search(self.url):
            msgspec.structs.force_setattr(self, "url", _BASE_PATH.sub("", self.url))

    @property
    def drains(self) -> bool:
        """Whether the worker gets no new requests, because a client or its source wants so."""
        return self.draining or self.retiring

    @property
    def given_id(self) -> str | int:
        """The worker's id as the client gave it: a number if it was one."""
        return int(self.worker.worker_id) if self.numbered else self.worker.worker_id
