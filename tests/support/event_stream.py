# SPDX-License-Identifier: Apache-2.0
"""A subscriber over real sockets with the items that it returned so far, and a replay endpoint that a test scripts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import zmq

from kvrouter.events.transport.progress import CaughtUp, FellBehind
from kvrouter.events.vllm.publisher import EventPublisher
from kvrouter.events.vllm.settings import SubscriberSettings
from kvrouter.events.vllm.stream_items import Batch, StreamItem
from kvrouter.events.vllm.subscriber import Subscriber

Context = zmq.Context[zmq.Socket[bytes]]

ANY = "tcp://127.0.0.1:0"
END = b"\xff" * 8
# The longest wait; only a failing test reaches it.
PATIENCE_S = 15.0
QUIET = SubscriberSettings(idle_check_s=0, settle_s=0.05, reconnect_min_s=0.01, reconnect_max_s=0.05)
IMPATIENT = SubscriberSettings(idle_check_s=0, settle_s=60, answer_timeout_s=0.1)


def seq8(seq: int) -> bytes:
    return seq.to_bytes(8, "big")


class Stream:
    """A subscriber that runs from entry to exit, and the items that it has returned."""

    def __init__(self, subscriber: Subscriber) -> None:
        self.subscriber = subscriber
        self.items: list[StreamItem] = []
        # Whether, according to the items, the engine has sent more than the subscriber has returned.
        self.behind = False

    async def __aenter__(self) -> Stream:
        await self.subscriber.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.subscriber.close()

    async def until(self, enough: Callable[[list[StreamItem]], object]) -> list[StreamItem]:
        """Wait until `enough` is true for the collected items; then return and forget them."""
        while not enough(self.items):
            items = await self.subscriber.next()
            for item in items:
                if isinstance(item, FellBehind | CaughtUp):
                    self.behind = isinstance(item, FellBehind)
            self.items += items
        items, self.items = self.items, []
        return items

    async def until_kind(self, kind: type[StreamItem], count: int = 1) -> list[StreamItem]:
        return await self.until(lambda items: sum(isinstance(item, kind) for item in items) >= count)

    def _is_live(self, items: list[StreamItem]) -> bool:
        return not self.behind and any(isinstance(item, Batch) and not item.replayed for item in items)

    async def until_live(self, publisher: EventPublisher) -> int:
        """Publish batches until one arrives live, and return the seq of the last published one.

        A PUB socket drops messages until it has received the subscription.
        """
        while True:
            publisher.publish(b"warm%d" % publisher.next_seq)
            try:
                await asyncio.wait_for(self.until(self._is_live), 0.1)
            except TimeoutError:
                continue
            return publisher.next_seq - 1


def seqs(items: list[StreamItem]) -> list[int]:
    return [item.seq for item in items if isinstance(item, Batch)]


def kinds(items: list[StreamItem]) -> list[str]:
    return [type(item).__name__ for item in items if not isinstance(item, Batch)]


def subscribe(publisher: EventPublisher, context: Context, **options: Any) -> Stream:
    options.setdefault("settings", QUIET)
    return Stream(Subscriber(publisher.endpoint, publisher.replay_endpoint, context=context, **options))


async def answer(
    router: zmq.Socket[bytes], ring: list[tuple[int, bytes]], *, topic: tuple[bytes, ...] = (b"",), end: bool = True
) -> int:
    """Wait for one replay request, answer it, and return the first seq that it requested.

    Args:
        router: The socket of the replay endpoint.
        ring: The seq and the payload of each batch that can be replayed.
        topic: The topic frame of each message (vLLM since 0.26), or an empty tuple for none.
        end: Whether to send the message that ends the replay.
    """
    while not router.poll(0):
        await asyncio.sleep(0.005)
    client, empty, start = router.recv_multipart()
    assert empty == b""
    first = int.from_bytes(start, "big")
    for seq, payload in ring:
        if seq >= first:
            router.send_multipart([client, b"", *topic, seq8(seq), payload])
    if end:
        router.send_multipart([client, b"", *topic, END, b""])
    return first
