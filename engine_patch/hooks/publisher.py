# SPDX-License-Identifier: Apache-2.0
"""Makes vLLM's ZmqEventPublisher drop batches instead of blocking, and connects the patch's reporter to it.

The publisher is vLLM's own object and its thread runs vLLM's own code: only its queue and its counter are exchanged,
before anything can be in them. Batches that did not fit into the full queue use up their seqs at the place where they
are missing, so that subscribers and the replay see a gap there.
Source: vLLM 0.32.0 distributed/kv_events.py, ZmqEventPublisher.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

from kvrouter.engine_patch.setup.features import Feature, Features, misfit

# The attribute of a publisher and a scheduler that holds their `EventTap`.
ATTRIBUTE = "_kvrouter_tap"
# The attribute of a replacement that holds the function or class of vLLM that it replaces.
ORIGINAL = "_kvrouter_original"


class Seqs:
    """The publisher's counter of seqs, which can leave numbers out."""

    def __init__(self) -> None:
        self._next = 0

    def __iter__(self) -> Seqs:
        return self

    def __next__(self) -> int:
        seq = self._next
        self._next += 1
        return seq

    def skip(self, count: int) -> None:
        """Leave out the next `count` seqs."""
        self._next += count


class DroppingQueue(queue.Queue[Any]):
    """A queue that drops new items while it is full, and makes the next item that it accepts skip as many seqs.

    Only the publisher's thread gets items, and it takes a seq after each item, so the two stay in step. The sentinel
    that ends that thread (None) is always accepted.
    """

    def __init__(self, maxsize: int, seqs: Seqs) -> None:
        super().__init__(maxsize)
        self.dropped = 0
        # Items dropped since the last accepted one.
        self._missing = 0
        self._seqs = seqs

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Add the item, or drop and count it if the queue is full; never wait."""
        with self.mutex:
            if item is not None and 0 < self.maxsize <= self._qsize():
                self.dropped += 1
                self._missing += 1
                return
            self._put((self._missing, item))
            self._missing = 0
            self.unfinished_tasks += 1
            self.not_empty.notify()

    def _get(self) -> Any:
        missing, item = super()._get()
        if missing:
            self._seqs.skip(missing)
        return item


def unblock(publisher: Any) -> None:
    """Replace the publisher's queue and counter, so that a full queue drops batches instead of blocking the engine.

    The publisher's thread may still wait for the old queue, which stays empty; it turns to the new one within 0.1 s.
    """
    seqs = Seqs()
    dropping_queue = DroppingQueue(publisher._event_queue.maxsize, seqs)
    publisher._seq_gen = seqs
    publisher._event_queue = dropping_queue


def cannot_unblock(publisher: Any) -> str | None:
    """Return why the publisher's queue and counter cannot be exchanged, or None if they can be."""
    stock_queue = getattr(publisher, "_event_queue", None)
    if type(stock_queue) is not queue.Queue or stock_queue.qsize():
        return "the publisher's _event_queue is no empty queue.Queue"
    if not hasattr(publisher, "_seq_gen") or not hasattr(publisher, "_thread"):
        return "the publisher has no _seq_gen or no _thread"
    return None


def watch(publisher: Any, published: Callable[[Any], None], close: Callable[[], None], feature: Feature) -> None:
    """Wrap the publisher's `publish` and `shutdown` on the instance.

    Args:
        publisher: vLLM's publisher.
        published: Called with each batch that vLLM's publisher took.
        close: Called after the publisher has shut down.
        feature: Turned off if the methods look different or a callback fails.
    """

    def apply() -> None:
        stock_publish, stock_shutdown = publisher.publish, publisher.shutdown

        def end() -> None:
            try:
                close()
            except Exception:
                feature.failed()

        def publish(events: Any) -> Any:
            result = stock_publish(events)
            if feature.on:
                try:
                    published(events)
                except Exception:
                    feature.failed()
            return result

        def shutdown(*args: Any, **kwargs: Any) -> Any:
            try:
                return stock_shutdown(*args, **kwargs)
            finally:
                end()

        publisher.publish, publisher.shutdown = publish, shutdown

    feature.install(lambda: misfit(publisher, "publish", ("events",)) or misfit(publisher, "shutdown", ()), apply)


def constructor(stock: Any, make_features: Callable[[], Features], tap: Callable[[Any, Features, str], Any]) -> Any:
    """Return the constructor that replaces `stock` for "zmq" in the factory's registry.

    Args:
        stock: The publisher's class.
        make_features: Returns new features for a publisher.
        tap: Builds and connects a tap from (publisher, features, configured endpoint); None if nothing can listen.
    """

    def build(*args: Any, **kwargs: Any) -> Any:
        publisher = stock(*args, **kwargs)
        features = make_features()
        features["queue"].install(lambda: cannot_unblock(publisher), lambda: unblock(publisher))
        try:
            setattr(publisher, ATTRIBUTE, tap(publisher, features, str(kwargs.get("endpoint", ""))))
        except Exception:
            features["reports"].failed()
        return publisher

    setattr(build, ORIGINAL, stock)
    return build
