# SPDX-License-Identifier: Apache-2.0
"""The reports that the patch should send, read from the objects that they describe, and a reader that checks them."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import vllm
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils

from kvrouter.events.patch.messages import (
    DeclaredCatalog,
    Events,
    Heartbeat,
    ReportCleared,
    ReportRemoved,
    ReportStored,
    unpack_hashes,
)
from tests.engine.version_engine import MAX_MODEL_LEN, Engine
from tests.engine.version_layouts import FULL
from tests.support.report_peer import Peer, apply

_major, _minor, *_ = vllm.__version__.split(".")
VERSION = int(_major), int(_minor)
# Time for the reporter's thread to catch up with an idle engine; it takes milliseconds.
PATIENCE_S = 20.0


def held(engine: Engine) -> dict[tuple[int, str, None], tuple[int, int, int]]:
    """Return (blocks, copies, digest) by place, from the pool and the offload tier."""
    return {
        (group_idx, medium, None): (len(copies), copies.total(), sum(copies) % 2**64)
        for (group_idx, medium), copies in sorted((engine.gpu_blocks() | engine.cpu_blocks()).items())
        if copies
    }


def expected_catalog(engine: Engine) -> dict[str, Any]:
    """Return the catalog that should be declared, from the layout and the objects that look hits up."""
    layout, scheduler = engine.layout, engine.scheduler
    coordinator = scheduler.kv_cache_manager.coordinator
    partial = bool(getattr(coordinator, "enable_partial_hash_hits", False))
    sparse = any(group.kind != "full_attention" for group in layout.groups)
    single = len(layout.groups) == 1
    token_ids = list(range(engine.hash_block_size + engine.lookahead_tokens))
    block, following = token_ids[: engine.hash_block_size], token_ids[engine.hash_block_size :]
    example = kv_cache_utils.hash_block_tokens(sha256, None, block, (None, *following) if following else None)
    by_lookup = [] if single else [entry[1] for entry in coordinator.attention_groups]
    return {
        "groups": [
            {
                "group_idx": i,
                "kind": group.kind,
                "block_size": scheduler.kv_cache_manager.coordinator.single_type_managers[i].block_size,
                "sliding_window": group.window,
                "attention_chunk_size": None,
                "eagle": i in layout.eagle_groups and not engine.lookahead_tokens,
                "prefix_cacheable": True,
                "spec_class": next((n for n, ids in enumerate(by_lookup) if i in ids), 0 if single else None),
            }
            for i, group in enumerate(layout.groups)
        ],
        "hash_block_size": engine.hash_block_size,
        "scheduler_block_size": engine.block_size,
        "align": engine.hash_block_size if partial else engine.block_size,
        "partial_hits": partial,
        # Before 0.23 there is no interval, and until 0.29 a layout of full attention alone must not request one.
        "retention_interval": layout.retention if VERSION >= (0, 29) or (VERSION >= (0, 23) and sparse) else None,
        "hash_algo": "sha256",
        "none_hash": kv_cache_utils.NONE_HASH.hex(),
        "hash_example": {"token_ids": token_ids, "block_hash": int.from_bytes(example[-8:], "big")},
        "hash_lookahead_tokens": engine.lookahead_tokens,
        "replay_window_tokens": 0,
        "extra_keys_form": "tagged" if VERSION >= (0, 31) else "plain",
        "offload_blocks_per_chunk": 1 if layout.cpu_chunks else None,
        "lora_paths": {},
        "model_name": scheduler.vllm_config.model_config.model,
        "dp_rank": 0,
        "max_model_len": MAX_MODEL_LEN,
        "num_gpu_blocks": layout.num_blocks,
        "dcp_size": 1,
        "pcp_size": 1,
        "connector": "OffloadingConnector" if layout.cpu_chunks else None,
        "engine": "vllm",
        "engine_version": vllm.__version__,
        "connectors": ["OffloadingConnector"] if layout.cpu_chunks else [],
        "offload_partial_hits": None,
        "peer": None,
    }


def declared(catalog: DeclaredCatalog | None) -> dict[str, Any]:
    assert catalog is not None, "no catalog"
    fields = {name: getattr(catalog, name) for name in catalog.__struct_fields__}
    fields["groups"] = [{name: getattr(g, name) for name in g.__struct_fields__} for g in catalog.groups]
    if catalog.hash_example is not None:
        fields["hash_example"] = {
            "token_ids": catalog.hash_example.token_ids,
            "block_hash": catalog.hash_example.block_hash,
        }
    return fields


def text_of(places: dict[tuple[int, str, None], tuple[int, int, int]]) -> dict[str, list[int]]:
    return {f"{medium} {group_idx}": [blocks, copies] for (group_idx, medium, _), (blocks, copies, _) in places.items()}


def resident_copies(engine: Engine) -> Counter[Any]:
    return Counter(
        {
            (group_idx, medium, None, block_hash): count
            for (group_idx, medium), copies in (engine.gpu_blocks() | engine.cpu_blocks()).items()
            for block_hash, count in copies.items()
        }
    )


class Listener:
    """A reader that applies every message of our topic in the slow and obvious way and checks each stored event."""

    def __init__(self, engine: Engine, peer: Peer) -> None:
        self._engine, self._peer = engine, peer
        self.copies: Counter[Any] = Counter()
        self.next_seq = 0
        self.stored: Counter[str] = Counter()
        self.removed: Counter[str] = Counter()
        self.placed: Counter[str] = Counter()
        self.cleared: list[list[str]] = []
        self.wrong: list[str] = []
        self._on_gpu: set[tuple[int | None, int]] = set()

    def settle(self) -> tuple[Heartbeat, bool]:
        """Read until a heartbeat agrees with the engine's blocks, and return the last one and whether it agrees."""
        goal = held(self._engine)
        give_up_s = time.monotonic() + PATIENCE_S
        while True:
            seq, message = self._peer.next()
            if isinstance(message, Events):
                self._take(seq, message)
            elif isinstance(message, Heartbeat):
                self._fault(seq != self.next_seq, f"a heartbeat at {seq}, after {self.next_seq} messages")
                sums = {(p.group_idx, p.medium, p.ownership): (p.blocks, p.copies, p.digest) for p in message.places}
                if sums == goal or time.monotonic() > give_up_s:
                    return message, sums == goal

    def _fault(self, is_wrong: bool, text: str) -> None:
        if is_wrong and len(self.wrong) < 20:
            self.wrong.append(text)

    def _take(self, seq: int, message: Events) -> None:
        self._fault(seq != self.next_seq, f"message {seq} where {self.next_seq} was due")
        self.next_seq = seq + 1
        for event in message.events:
            if isinstance(event, ReportStored):
                self._check(event)
            elif isinstance(event, ReportRemoved):
                self.removed[f"{event.medium} {event.group_idx}"] += len(event.hashes) // 8
            elif isinstance(event, ReportCleared):
                self.cleared.append([event.medium, event.reason])
        apply(self.copies, message.events)

    def _check(self, event: ReportStored) -> None:
        place = f"{event.medium} {event.group_idx}"
        hashes = unpack_hashes(event.hashes).tolist()
        self.stored[place] += len(hashes)
        if event.group_idx is None:
            self._fault(True, f"{place}: stored without a group")
            return
        group = self._engine.layout.groups[event.group_idx]
        sizes = {group.block_size, self._engine.hash_block_size}
        self._fault(event.block_size not in sizes, f"{place}: block size {event.block_size}")
        self._fault(event.medium == "CPU" and event.kind != group.kind, f"{place}: kind {event.kind}")
        self._fault(event.kind not in (group.kind, None), f"{place}: kind {event.kind}")
        for block_hash in hashes:
            self._fault(block_hash not in self._engine.ends, f"{place}: {block_hash} is no block of a prompt")
            if event.medium == "GPU":
                self._on_gpu.add((event.group_idx, block_hash))
            elif group.kind == FULL.kind:
                # The block was copied from the GPU under the same hash. Sparse groups may offload blocks that the GPU
                # does not keep for reuse.
                seen = (event.group_idx, block_hash) in self._on_gpu
                self._fault(not seen, f"{place}: {block_hash} never on the GPU")
        if event.runs:
            self._check_positions(event, place, hashes)

    def _check_positions(self, event: ReportStored, place: str, hashes: list[int]) -> None:
        ends = [end + i * event.block_size for end, count in event.runs for i in range(count)]
        self._fault(len(ends) != len(hashes), f"{place}: {len(ends)} positions for {len(hashes)} hashes")
        for end, block_hash in zip(ends, hashes, strict=False):
            self.placed[place] += 1
            true_end = self._engine.ends.get(block_hash)
            self._fault(true_end != end, f"{place}: {block_hash} said to end at {end}, ends at {true_end}")
        before = self._engine.hash_before(hashes[0], event.block_size)
        self._fault(event.parent_hash != before, f"{place}: parent {event.parent_hash}, not {before}")
