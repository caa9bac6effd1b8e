# SPDX-License-Identifier: Apache-2.0
"""What a user says of a worker when registering it: where it listens and, optionally, its catalog."""

from __future__ import annotations

import re

import msgspec

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.model.workers.role import HandoverWay, Role
from kvrouter.router.model.workers.source_precedence import REGISTER

# The largest hybrid models have below ten groups. The hit rule has room for this many, and does not check.
MAX_GROUPS = 64

# Far over any engine's block (vLLM: up to some thousand tokens for Mamba) and any window; the product of two still fits
# the rule's int64.
MAX_TOKENS = 2**31 - 1


class GroupSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """One KV cache group as a user or the engine patch states it; sizes and windows in tokens."""

    group_idx: int | None
    kind: str
    block_size: int
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    eagle: bool = False
    prefix_cacheable: bool = True
    # Groups of one class are looked up jointly, as vLLM does for equal specs; None: derived from kind, block size and
    # window.
    spec_class: int | None = None


class CatalogSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """A catalog as stated; what is None is learned or derived. docs/reference/http.md has the fields."""

    groups: tuple[GroupSpec, ...] = ()
    hash_block_size: int | None = None
    scheduler_block_size: int | None = None
    hash_algo: str | None = None
    none_hash: str | None = None
    none_hash_seed: str | None = None
    # Tokens after a block that its hash covers too; None: none or one, whichever explains its blocks.
    hash_lookahead_tokens: int | None = None
    partial_hits: bool | None = None
    offload_blocks_per_chunk: int | None = None
    # vLLM's name of the KV connector whose rule holds for what is on CPU or disk (offload_connectors.py).
    offload_connector: str | None = None
    # Whether hits of a SimpleCPUOffloadConnector may end wherever those of the GPU may; not so in its lazy mode.
    offload_partial_hits: bool | None = None
    # Whether as many tokens as the window has must be resident before a boundary, as in SGLang; vLLM: one less.
    whole_windows: bool = False
    lora_paths: dict[str, str] = {}


# The model of a registration whose engine must be queried for it.
UNKNOWN_MODEL = ""

# In place of the patch's endpoint: do not look for one.
NO_PATCH = "off"


# The end of an OpenAI client's base URL. The paths that are sent to an engine begin with it, so it is taken off. A host
# of that name is not meant.
_BASE_PATH = re.compile(r"(?<=[^/:])/v1/*\Z")


class Registration(msgspec.Struct, frozen=True, omit_defaults=True):
    """One worker as registered. `events` and `replay` are ZMQ endpoints, `url` the engine's HTTP address.

    patch: where the engine patch answers requests; None: beside `events`, if it does; NO_PATCH: not looked for.
    draining: it gets no new requests, because a client said so, and its events are still followed; retiring: the same,
    because its source said so. numbered: see `given_id`.
    patch_key: the public key (Z85) that the patch must prove; then nothing that is not encrypted with it is listened
    to. handover: how it is handed a prompt that a prefill worker has computed.
    source: who says that it is there (source_precedence.py). note: what that source could not find out, for people.
    """

    worker: WorkerKey
    events: str | None = None
    replay: str | None = None
    url: str | None = None
    block_size: int | None = None
    lora_name: str | None = None
    catalog: CatalogSpec | None = None
    patch: str | None = None
    patch_key: str | None = None
    draining: bool = False
    role: Role = Role.BOTH
    handover: HandoverWay = HandoverWay.KV_TRANSFER_PARAMS
    retiring: bool = False
    source: str = REGISTER
    note: str = ""
    # What kind of engine it is (engine_name.py); None: not known yet.
    engine: str | None = None
    # Its id came as a number: clients of Dynamo's services want it back as one.
    numbered: bool = False

    def __post_init__(self) -> None:
        """Remove a trailing /v1 from the URL, wherever the registration comes from."""
        if self.url is not None and _BASE_PATH.search(self.url):
            msgspec.structs.force_setattr(self, "url", _BASE_PATH.sub("", self.url))

    @property
    def drains(self) -> bool:
        """Whether it gets no new request."""
        return self.draining or self.retiring

    @property
    def given_id(self) -> str | int:
        """The worker's id as given."""
        return int(self.worker.worker_id) if self.numbered else self.worker.worker_id
