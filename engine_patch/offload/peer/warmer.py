# SPDX-License-Identifier: Apache-2.0
"""The thread that receives a hand-over: it exists while one goes on, also in an engine that is idle.

Its messages come from the thread that lends. One hand-over goes on at a time; the results of the last ones are kept.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from kvrouter.engine_patch.offload.peer.peer_miss import PeerMiss
from kvrouter.engine_patch.offload.peer.peer_source import MAX_HOST_CHARS, MAX_PORT
from kvrouter.engine_patch.offload.tiers.tiering import Tiering
from kvrouter.engine_patch.offload.tiers.warming import Warming
from kvrouter.engine_patch.setup.throttled_log import ThrottledLog
from kvrouter.events.peer.hand_over import (
    BUSY,
    MAX_SHARES,
    MAX_WITHIN_S,
    HandOverReply,
    HandOverRequest,
    Refused,
    Warm,
    WarmQuery,
)

# How often the thread looks whether a batch has arrived: 16 MiB in this time are 8 GB/s, more than a link reaches.
TICK_S = 0.002
# Ended hand-overs whose result can be queried.
KEPT_RESULTS = 16


class Warmer:
    """The hand-overs to this engine; `answer` and `close` are for the thread that lends."""

    def __init__(
        self, tiers: Tiering, chunk_bytes: int, num_slots: int, clock: Callable[[], float], log: ThrottledLog
    ) -> None:
        """Start without a thread; the first hand-over starts one."""
        self._tiers = tiers
        self._chunk_bytes, self._num_slots = chunk_bytes, num_slots
        self._clock, self._log = clock, log
        self._results: OrderedDict[int, Warming] = OrderedDict()
        self._thread: threading.Thread | None = None
        self._is_closing = threading.Event()

    def answer(self, message: HandOverRequest) -> HandOverReply:
        """Return the answer to a message, or why it is refused."""
        if isinstance(message, Warm):
            problem = self._begin(message)
            if problem is not None:
                return Refused(problem[0].value, problem[1])
        known = self._results.get(message.number)
        if known is None:
            return Refused(
                PeerMiss.GONE.value, "this engine knows no hand-over of that number: it restarted, or had many since"
            )
        if not isinstance(message, Warm | WarmQuery):
            self._tiers.stop_warming(message.number)
        return known.warmed()

    def close(self) -> None:
        """End the thread."""
        self._is_closing.set()
        if self._thread is not None:
            self._thread.join()

    def _begin(self, warm: Warm) -> tuple[PeerMiss, str] | None:
        if warm.number in self._results:
            return None
        peers = self._tiers.peers
        is_sound = (
            0 <= warm.share < warm.num_shares <= MAX_SHARES
            and warm.max_bytes > 0
            and 0 < warm.within_s <= MAX_WITHIN_S
            and 0 < warm.port <= MAX_PORT
            and 0 < len(warm.host) <= MAX_HOST_CHARS
        )
        if peers is None or not is_sound:
            return PeerMiss.PROTOCOL, (
                f"a hand-over needs a source, a share below the number of shares ({MAX_SHARES} at most), bytes, and seconds "
                f"up to {MAX_WITHIN_S:g}"
            )
        if self._thread is not None and self._thread.is_alive():
            return PeerMiss(BUSY), "another hand-over to this engine is under way: wait until it has ended"
        warming = Warming(warm, self._chunk_bytes, self._num_slots, peers.timeout_s, self._clock)
        self._tiers.warm(warming)
        thread = threading.Thread(target=self._run, daemon=True, name="kvrouter-warm")
        # It raises if the system can start no more threads; then there is no hand-over of that number.
        thread.start()
        self._thread = thread
        self._results[warm.number] = warming
        while len(self._results) > KEPT_RESULTS:
            self._results.popitem(last=False)
        return None

    def _run(self) -> None:
        try:
            while not self._is_closing.is_set() and self._tiers.advance_warming():
                time.sleep(TICK_S)
        except Exception as error:
            # The books are as consistent as after any error in a step; what is under way is collected by the scheduler.
            self._log.warning(f"warm {type(error).__name__}", "a hand-over ended early", error=repr(error))
            self._tiers.fail_warming()
