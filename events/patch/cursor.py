# SPDX-License-Identifier: Apache-2.0
"""The order of a publisher's reports: which is next, missing or of another life, and when to take a snapshot. Pure.

The shell feeds in decoded messages, answers and connection changes, takes `items` out, sends exactly the snapshot
request that `request` numbers, and confirms it with `on_request_sent`. The shell also paces requests and decides when
an answer is overdue.

The design rests on two facts. One thread of the publisher numbers messages, sends them and freezes snapshots: a
snapshot contains every message received before its request, so messages are held only while one is under way. And only
the current life answers, so an answer requested after the last change of life decides which life that is.
"""

from __future__ import annotations

from collections import deque
from typing import TypeAlias

from kvrouter.events.patch.items import (
    Declared,
    Expired,
    Greeted,
    HeartbeatSeen,
    Loaded,
    NewEpoch,
    PatchHeard,
    PatchSilent,
    ReportBatch,
    ReportGap,
    ReportItem,
    ReportResume,
    Snapshot,
    SnapshotFailed,
)
from kvrouter.events.patch.messages import CatalogMessage, DeclaredCatalog, Events, Heartbeat, Hello, SnapshotPart
from kvrouter.events.patch.snapshot_assembly import DEFAULT_MAX_SNAPSHOT_BLOCKS, SnapshotAssembly, SnapshotError
from kvrouter.events.transport.held_queue import HeldQueue
from kvrouter.events.transport.holding_cursor import HoldingCursor
from kvrouter.events.transport.progress import CaughtUp, FellBehind
from kvrouter.events.transport.settings import DEFAULT_MAX_HELD_BYTES
from kvrouter.events.vllm.stream_items import Connected, Disconnected, Flooded, Malformed

# Messages that may be held during a snapshot: a minute of 1,000 messages a second. A batch of a long prefill has some
# 10 KB.
DEFAULT_MAX_HELD = 65_536

# The number of past lives whose last messages may still arrive.
REMEMBERED_EPOCHS = 16

# None stands for an `events` message that could not be read.
_Message: TypeAlias = Events | Heartbeat | None


class ReportCursor(HoldingCursor[ReportItem, HeldQueue[_Message]]):
    """The position in one publisher's reports. Single-threaded; never raises, whatever the wire brings.

    A new life voids seq, snapshot, catalog and liveness together.
    """

    def __init__(
        self,
        *,
        resume: ReportResume | None = None,
        max_held: int = DEFAULT_MAX_HELD,
        max_held_bytes: int = DEFAULT_MAX_HELD_BYTES,
        max_snapshot_blocks: int = DEFAULT_MAX_SNAPSHOT_BLOCKS,
    ) -> None:
        """Begin at the resume point, or without any state.

        Args:
            resume: The state that the consumer has stored.
            max_held: Bound on the messages that are held during a snapshot.
            max_held_bytes: Bound on their bytes.
            max_snapshot_blocks: Bound on the blocks of a snapshot.
        """
        super().__init__(HeldQueue(max_held, max_held_bytes))
        # The number of the wanted snapshot; None if none is needed.
        self._request: int | None = None
        # Whether the current life has answered a greeting with its catalog. Its snapshot waits for that, as blocks earn
        # nothing without their groups.
        self._greeted = False
        # Snapshots that have failed since the last success.
        self.failures = 0
        # Whether the publisher must be greeted; answers to earlier greetings then no longer count. The shell clears
        # this when it sends the greeting.
        self.greeting_wanted = True
        # Messages of the current life so far. The shell takes a new one as a sign of life.
        self.heard = 0
        self._max_snapshot_blocks = max_snapshot_blocks
        self._epoch = resume.epoch if resume else None
        self._past: deque[str] = deque(maxlen=REMEMBERED_EPOCHS)
        # The seq of the next batch to hand out; None until the first snapshot of a life.
        self._expected = resume.next_seq if resume else None
        self._resuming = resume is not None
        self._requests = 0
        # None while the wanted snapshot has not been requested.
        self._assembly: SnapshotAssembly | None = None
        # Messages below this seq that arrived since the request were dropped from `_held`.
        self._overflowed_seq = -1
        self._declared = -1
        self._catalog_asked = 0
        # The reasons of the last heartbeat for withholding everything, and for withholding the tiers.
        self._withheld = ("", "")
        self._connected = False
        self._silent = False
        # Whether a snapshot was loaded whose `CaughtUp` was not announced yet.
        self._loaded = False
        # Whether `CaughtUp` was announced, which may still wait for the consumer.
        self._caught_up = False
        if resume is None:
            self._want_snapshot()

    @property
    def request(self) -> int | None:
        """Return the number of the snapshot request that should be under way now, or None if there should be none.

        None means that no snapshot is needed, or that the publisher's current life has not sent its hello yet.
        """
        return self._request if self._greeted else None

    @property
    def is_silent(self) -> bool:
        """Whether the publisher is silent: `PatchSilent` was announced and `PatchHeard` was not."""
        return self._silent

    def connected(self) -> None:
        """Note that the live socket has a peer. Seqs reveal what it missed, and epochs reveal another life."""
        self._connected = True
        self.items.append(Connected())

    def disconnected(self) -> None:
        """Note that the live socket lost its peer."""
        if self._connected:
            self._connected = False
            self.items.append(Disconnected())

    def silent(self, silent_s: float) -> None:
        """Note that no message of the current life arrived for too long."""
        if not self._silent:
            self._silent = True
            self.items.append(PatchSilent(silent_s))

    def malformed(self, reason: str) -> None:
        """Report a message or an answer that cannot be read."""
        self.items.append(Malformed(reason))

    def flooded(self, reason: str, *, is_live: bool) -> None:
        """Report that a connection was closed because of the bytes that it brought.

        `is_live` says whether it was the connection of the stream itself.
        """
        self.items.append(Flooded(reason, is_live))

    def hello(self, hello: Hello) -> None:
        """Handle the answer to a greeting that was sent after the last change of life."""
        if hello.epoch != self._epoch:
            self._enter_life(hello.epoch, hello.started_s, "another life answers")
            self.greeting_wanted = False
        elif self._resuming and self._request is None:
            self._judge_resume(hello.next_seq)
        # Another life voids all known state, so `NewEpoch` comes before the other items of that life.
        self.items.append(Greeted(hello))
        self._resuming = False
        self._greeted = True
        if hello.catalog is not None:
            self._declare(hello.catalog_version, hello.catalog)

    def events(self, seq: int, message: Events, size_bytes: int) -> None:
        """Handle an `events` message of the live socket; 0 <= seq < 2**63, size_bytes as on the wire."""
        if self._is_of_this_life(message.epoch, message.started_s):
            self._follow(seq, message, size_bytes)

    def heartbeat(self, seq: int, message: Heartbeat, size_bytes: int) -> None:
        """Handle a heartbeat of the live socket."""
        if not self._is_of_this_life(message.epoch, message.started_s):
            return
        if message.withheld or message.tiers_withheld:
            withheld = (message.withheld, message.tiers_withheld)
            # Greet the publisher again, as its answer names the features that failed.
            self.greeting_wanted |= withheld != self._withheld
            self._withheld = withheld
        if message.catalog_version > max(self._declared, self._catalog_asked):
            # The message with this catalog was lost.
            self._catalog_asked = message.catalog_version
            self.greeting_wanted = True
        self._follow(seq, message, size_bytes)

    def catalog(self, seq: int, message: CatalogMessage) -> None:
        """Handle a catalog of the live socket."""
        if not self._is_of_this_life(message.epoch, message.started_s):
            return
        self._declare(message.version, message.catalog)
        if self._request is None and self._expected is not None and seq > self._expected:
            self._lose(self._expected, seq, 0, f"a catalog of seq {seq} came next")

    def unreadable(self, seq: int, epoch: str | None, size_bytes: int) -> None:
        """Handle an `events` message that cannot be read. Damage never begins a life."""
        if epoch is None or epoch == self._epoch:
            self._follow(seq, None, size_bytes)

    def request_snapshot(self) -> None:
        """Request a snapshot, as the consumer doubts its state. No batch follows before the snapshot."""
        if self._request is None:
            self._want_snapshot()

    def expire(self) -> None:
        """Assume that the known life has ended, as another source reports.

        The publisher is greeted again, and catalog and snapshot are requested again.
        """
        self._declared, self._catalog_asked = -1, 0
        self._greeted = False
        self.greeting_wanted = True
        self.items.append(Expired())
        self._want_snapshot()

    def on_request_sent(self) -> None:
        """Note that the wanted snapshot was just requested: from now on messages are held."""
        if self.request is not None:
            self._assembly = SnapshotAssembly(self._max_snapshot_blocks)
            self._drop_held()

    def part(self, part: SnapshotPart) -> None:
        """Handle a part of a snapshot. Parts of other requests are ignored."""
        assembly = self._assembly
        if assembly is None or part.id != self._request:
            return
        try:
            snapshot = assembly.add(part)
        except SnapshotError as error:
            self.snapshot_failed(str(error))
            return
        if assembly.parts == 1:
            if part.epoch != self._epoch:
                self._enter_life(part.epoch, part.started_s, "another life sends the snapshot")
                return
            if self._expected is not None and part.next_seq < self._expected:
                self.snapshot_failed(f"it is of seq {part.next_seq}, older than what was handed out ({self._expected})")
                return
        if part.next_seq < self._overflowed_seq:
            self.snapshot_failed(f"messages up to seq {self._overflowed_seq - 1} could not be held meanwhile")
        elif snapshot is not None:
            self._load(snapshot)

    def snapshot_overdue(self) -> None:
        """Handle an answer that made no progress for too long."""
        parts = 0 if self._assembly is None else self._assembly.parts
        self.snapshot_failed(f"the answer stopped after {parts} parts" if parts else "no answer")

    def snapshot_failed(self, reason: str) -> None:
        """Drop an answer that is missing or unusable. Another snapshot is wanted."""
        if self._request is not None:
            self.failures += 1
            self.items.append(SnapshotFailed(reason))
            self._want_snapshot()

    def _is_of_this_life(self, epoch: str, started_s: float) -> bool:
        if epoch != self._epoch:
            if epoch in self._past:
                return False
            self._enter_life(epoch, started_s, "its messages come")
        self.heard += 1
        if self._silent:
            self._silent = False
            self.items.append(PatchHeard())
        return True

    def _enter_life(self, epoch: str, started_s: float, reason: str) -> None:
        old, self._epoch = self._epoch, epoch
        self._expected = None
        self._resuming = False
        self._declared = -1
        self._catalog_asked = 0
        self._greeted = False
        self.greeting_wanted = True
        self._drop_held()
        if old is not None:
            self._past.append(old)
            self.items.append(NewEpoch(epoch, started_s, reason))
            self._want_snapshot()

    def _judge_resume(self, next_seq: int) -> None:
        """Find the messages missed while disconnected, by the first answer, which comes before any live message."""
        expected = self._expected
        assert expected is not None
        if next_seq > expected:
            self._lose(expected, next_seq, 0, "they were published while nobody listened")
        elif next_seq < expected:
            self._expected = None
            self._lose(next_seq, next_seq, 0, f"the publisher is at seq {next_seq}, before {expected} of what was kept")

    def _declare(self, version: int, catalog: DeclaredCatalog) -> None:
        if version > self._declared:
            self._declared = version
            self.items.append(Declared(version, catalog))

    def _follow(self, seq: int, message: _Message, size_bytes: int) -> None:
        if self._assembly is not None:
            self._hold(seq, message, size_bytes)
        elif self._request is None:
            self._accept(seq, message, size_bytes)

    def _accept(self, seq: int, message: _Message, size_bytes: int) -> None:
        expected = self._expected
        if expected is None or seq < expected:
            return
        if seq > expected:
            if isinstance(message, Heartbeat):
                self._lose(expected, seq, 0, f"a heartbeat of seq {seq} came next")
            else:
                # The publisher dropped the messages just before this one; a snapshot may still contain some of them.
                dropped = min(message.dropped, seq - expected) if message else 0
                self._lose(expected, seq, dropped, f"seq {seq} came next")
        elif message is None:
            self._lose(seq, seq + 1, 0, f"seq {seq} cannot be read")
        elif isinstance(message, Events):
            self._expected = seq + 1
            self.items.append(ReportBatch(seq, message, size_bytes))
        else:
            self.items.append(HeartbeatSeen(seq, message))

    def _lose(self, first_seq: int, next_seq: int, dropped: int, reason: str) -> None:
        self.items.append(ReportGap(first_seq, next_seq, dropped, reason))
        self._want_snapshot()

    def _catch_up(self) -> None:
        """Announce `CaughtUp` if everything that came during the snapshot was handed out and nothing is unread."""
        if self._loaded and not self._unread:
            self._loaded, self._caught_up = False, True
            self.items.append(CaughtUp())

    def _want_snapshot(self) -> None:
        self._loaded = False
        self._requests += 1
        self._request = self._requests
        self._assembly = None
        self._drop_held()

    def _load(self, snapshot: Snapshot) -> None:
        for seq, _, _ in self._held:
            if seq > snapshot.next_seq:
                # The subscription came too late, or messages were dropped, so the loaded state would be outdated.
                self.snapshot_failed(f"messages {snapshot.next_seq} to {seq - 1} after it did not come")
                return
            if seq == snapshot.next_seq:
                break
        self._request = None
        self._assembly = None
        self.failures = 0
        self._expected = snapshot.next_seq
        if self._caught_up:
            # Otherwise a consumer that is slower than the snapshot would take the last `CaughtUp` for this snapshot's.
            self._caught_up = False
            self.items.append(FellBehind())
        self.items.append(Loaded(snapshot))
        held = list(self._held)
        self._drop_held()
        for seq, message, size_bytes in held:
            self._accept(seq, message, size_bytes)
            if self._request is not None:
                # The next snapshot contains the messages that are left.
                return
        self._loaded = True
        self._catch_up()

    def _hold(self, seq: int, message: _Message, size_bytes: int) -> None:
        for dropped_seq, dropped, _ in self._held.append(seq, message, size_bytes):
            if not isinstance(dropped, Heartbeat):
                self._overflowed_seq = max(self._overflowed_seq, dropped_seq + 1)

    def _drop_held(self) -> None:
        self._held.clear()
        self._overflowed_seq = -1
