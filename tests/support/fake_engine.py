# SPDX-License-Identifier: Apache-2.0
"""The event stream of an engine without the engine: the real publisher, and events with vLLM's real hashes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import zmq

from kvrouter.events.vllm.codec import encode_batch
from kvrouter.events.vllm.publisher import EventPublisher
from kvrouter.events.vllm.wire import WireRemoved, WireStored
from kvrouter.router.model.kvcache.block_hash import HashScheme, HashSpace
from kvrouter.router.model.kvcache.prompt_hasher import PromptHasher, SegmentMemory
from tests.support.ports import free_port

BLOCK = 16
WINDOW = 64
SCHEME = HashScheme.default()

FULL = {"kind": "full_attention"}
SLIDING = {"kind": "sliding_window", "window": WINDOW}
MAMBA = {"kind": "mamba"}


def prompt(seed: int, blocks: int = 12) -> list[int]:
    """Return a prompt of this many blocks and 8 more tokens."""
    return [int(t) for t in np.random.default_rng(seed).integers(0, 50_000, blocks * BLOCK + 8)]


def hashes(tokens: list[int], cache_salt: str | None = None, lora: tuple[str, str] | None = None) -> list[int]:
    """Return the block hashes of a prompt, as vLLM computes them; `lora` has an adapter's name and path."""
    space = HashSpace(SCHEME, BLOCK, lora, cache_salt)
    hasher = PromptHasher(space, np.array(tokens, np.int64), SegmentMemory(0))
    while len(hasher.extend()):
        pass
    return [int(block_hash) for block_hash in hasher.hashes]


def stored(tokens: list[int], first: int, last: int, group: int | None = 0, **given: Any) -> WireStored:
    """Return the event that stores the blocks first..last-1 of a prompt.

    Args:
        tokens: The prompt.
        first: Index of the first block.
        last: Index after the last block.
        group: The group that stores the blocks.
        **given: Fields that replace the defaults, such as `medium` (default GPU); also `chain`, the prompt's block
            hashes if they are known, `cache_salt`, and the group's `kind` and `window`.
    """
    chain = given.pop("chain", None) or hashes(tokens, given.get("cache_salt"))
    salt = given.pop("cache_salt", None)
    kind, window = given.pop("kind", "full_attention"), given.pop("window", None)
    fields: dict[str, Any] = {
        "block_hashes": chain[first:last],
        "parent_block_hash": chain[first - 1] if first else None,
        "token_ids": tokens[first * BLOCK : last * BLOCK],
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [(salt,) if salt and i == 0 else None for i in range(first, last)],
        "group_idx": group,
        "kv_cache_spec_kind": kind,
        "kv_cache_spec_sliding_window": window,
    }
    return WireStored(**(fields | given))


def placeholder(block_hash: int, group: int = 0, medium: str = "CPU") -> WireStored:
    """Return a store as vLLM's offloading connector sends it by default: one hash without tokens or parent."""
    return WireStored(
        block_hashes=[block_hash], parent_block_hash=None, token_ids=[], block_size=0, lora_id=None, medium=medium,
        lora_name=None, group_idx=group,
    )  # fmt: skip


def removed(chain: list[int], group: int | None = 0, medium: str = "GPU") -> list[WireRemoved]:
    """Return one removal for each block, as the GPU pool sends them."""
    return [WireRemoved(block_hashes=[block_hash], medium=medium, group_idx=group) for block_hash in chain]


# The longest wait; only a failing test reaches it.
PATIENCE_S = 30.0


class HearingContext:
    """A ZMQ context whose PUB sockets are XPUB sockets: equal on the wire, but they receive the subscriptions."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._context = context
        self._readers = 0

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        if kind != zmq.PUB:
            return self._context.socket(kind)
        self._publishing = self._context.socket(zmq.XPUB)
        self._publishing.setsockopt(zmq.XPUB_VERBOSER, 1)
        return self._publishing

    def wait_readers(self, some: bool) -> None:
        """Wait until there is a subscriber, or (if not `some`) none.

        Call it only while nothing is published: the socket belongs to the publisher's thread.
        """
        while self._publishing.poll(0) or (self._readers > 0) is not some:
            assert self._publishing.poll(int(1_000 * PATIENCE_S)), f"{self._readers} are subscribed"
            self._readers += 1 if self._publishing.recv().startswith(b"\1") else -1


class FakeEngine:
    """An engine's publisher; `restart` replaces it by a new one on the same ports."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], *, replay: bool = True, **options: Any) -> None:
        self._context = context
        self._options = options
        self._replay = replay
        # The rank in its batches.
        self.dp_rank = 0
        # The kernel gives these ports to no connection, so they are still free after a restart.
        events, second = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        self.publisher = self._open(events, second if replay else None)
        self.endpoint = self.publisher.endpoint
        self.replay_endpoint = self.publisher.replay_endpoint

    def _open(self, endpoint: str, replay_endpoint: str | None) -> EventPublisher:
        self._hearing = HearingContext(self._context)
        return EventPublisher(endpoint, replay_endpoint, context=self._hearing, **self._options)  # type: ignore[arg-type]

    def wait_subscribed(self, some: bool = True) -> None:
        """Wait until a subscriber will receive the next batches, or (if not `some`) until all subscribers have left."""
        self.publisher.flush(PATIENCE_S)
        self._hearing.wait_readers(some)

    def registration(self, worker_id: str, model: str, **more: Any) -> dict[str, Any]:
        body: dict[str, Any] = {"worker_id": worker_id, "model": model, "endpoint": self.endpoint, **more}
        return body | ({"replay_endpoint": self.replay_endpoint} if self._replay else {})

    def join(self, router: Any, worker_id: str, model: str, **more: Any) -> None:
        """Register at a router, and wait until it receives what is published."""
        router.request("POST", "/register", self.registration(worker_id, model, **more))
        router.wait_connected(worker_id, self.wait_subscribed)

    def publish(self, *events: Any, **options: Any) -> int:
        """Send one batch and return its seq."""
        seq = self.publisher.next_seq
        self.publisher.publish(encode_batch(time.time(), list(events), self.dp_rank, **options))
        self.publisher.flush(5.0)
        return seq

    def publish_raw(self, payload: bytes) -> int:
        seq = self.publisher.next_seq
        self.publisher.publish(payload)
        self.publisher.flush(5.0)
        return seq

    def restart(self) -> None:
        self.publisher.close()
        self.publisher = self._open(self.endpoint, self.replay_endpoint)

    def close(self) -> None:
        self.publisher.close()


# Makes a publisher that is closed after the test; the fixture `new_engine` is one.
NewEngine = Callable[..., FakeEngine]
