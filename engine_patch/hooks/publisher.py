# SPDX-License-Identifier: Apache-2.0
"""vLLM's ZmqEventPublisher, made to drop instead of block, with our reporter beside it.

The publisher is vLLM's own object and its thread is vLLM's own code: only its queue and its counter are exchanged,
before anything can be in them. Batches that the full queue did not take use up their seqs where they are missing, so
that subscribers and the replay see a gap where there is one.
Source: vLLM 0.32.0 distributed/kv_events.py, ZmqEventPublisher.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

from kvrouter.engine_patch.setup.features import Feature, Features, misfit

# On the publisher and on the scheduler: the `Tap` that belongs to them.
ATTRIBUTE = "_kvrouter_tap"
# On what replaces a function or class of vLLM: what it stands for.
ORIGINAL = "_kvrouter_original"


class Seqs:
    """The publisher's counter, which can leave numbers out."""

    def __init__(self) -> None:
        self._next = 0

    def __iter__(self) -> Seqs:
        return self

    def __next__(self) -> int:
        seq = self._next
        self._next += 1
        return seq

    def skip(self, count: int) -> None:
        self._next += count


class DroppingQueue(queue.Queue[Any]):
    """A full one drops what is put, counts it, and makes the next item it did take skip as many seqs.

    Only the publisher's thread gets items, and it asks for a seq after each: the two stay in step. The sentinel that
    ends that thread (None) is always taken.
    """

    def __init__(self, maxsize: int, seqs: Seqs) -> None:
        super().__init__(maxsize)
        self.dropped = 0
        self._missing = 0
        self._seqs = seqs

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
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
    """Exchange queue and counter. The thread may still wait for the old queue, which stays empty: it looks again in 0.1
    s."""
    seqs = Seqs()
    fresh = DroppingQueue(publisher._event_queue.maxsize, seqs)
    publisher._seq_gen = seqs
    publisher._event_queue = fresh


def cannot_unblock(publisher: Any) -> str | None:
    old = getattr(publisher, "_event_queue", None)
    if type(old) is not queue.Queue or old.qsize():
        return "the publisher's _event_queue is no empty queue.Queue"
    if not hasattr(publisher, "_seq_gen") or not hasattr(publisher, "_thread"):
        return "the publisher has no _seq_gen or no _thread"
    return None


def watch(publisher: Any, published: Callable[[Any], None], close: Callable[[], None], feature: Feature) -> None:
    """Wrap publish and shutdown, on the instance. published: takes each batch that vLLM's publisher took."""

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

        def shutdown(*given: Any, **named: Any) -> Any:
            try:
                return stock_shutdown(*given, **named)
            finally:
                end()

        publisher.publish, publisher.shutdown = publish, shutdown

    feature.install(lambda: misfit(publisher, "publish", ("events",)) or misfit(publisher, "shutdown", ()), apply)


def constructor(stock: Any, make_features: Callable[[], Features], tap: Callable[[Any, Features, str], Any]) -> Any:
    """What the factory's registry gets for "zmq". tap: builds and connects what listens, None where nothing can."""

    def build(*given: Any, **named: Any) -> Any:
        publisher = stock(*given, **named)
        features = make_features()
        features["queue"].install(lambda: cannot_unblock(publisher), lambda: unblock(publisher))
        try:
            setattr(publisher, ATTRIBUTE, tap(publisher, features, str(named.get("endpoint", ""))))
        except Exception:
            features["reports"].failed()
        return publisher

    setattr(build, ORIGINAL, stock)
    return build
