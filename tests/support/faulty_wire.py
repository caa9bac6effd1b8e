# SPDX-License-Identifier: Apache-2.0
"""The wire between the model engine and the router of a `World`, which loses, delays and reorders messages."""

from __future__ import annotations

from collections import deque

from kvrouter.events.patch.cursor import ReportCursor
from kvrouter.events.patch.messages import Events, Heartbeat
from kvrouter.events.vllm.batch_cursor import Cursor
from tests.support.router_end import RouterEnd


class FaultyWire(RouterEnd):
    """The delivery of both streams' messages and of the answers to requests, with faults if the world is `faulty`."""

    def connect(self) -> None:
        if self.wired or self.life is None:
            return
        if isinstance(self.cursor, ReportCursor) and not self.life.patched:
            return
        while self.news:
            self.deliver_news()
        self.wired = True
        self.joined = not self.faulty or self.rng.random() < 0.7
        self.news.append("up")

    def cut(self) -> None:
        """Break the connection; the messages under way are either read before the router learns of it, or lost."""
        self.answers.clear()
        self.parts.clear()
        self.hellos.clear()
        if self.wired:
            while self.news:
                self.deliver_news()
            if self.rng.random() < 0.5:
                while self.live:
                    self.deliver()
            self.news.append("down")
        self.live.clear()
        self.swapped = None
        self.wired = self.joined = False

    def deliver_news(self) -> None:
        if not self.news:
            return
        if self.news.popleft() == "up":
            self.joined = True
            self.cursor.connected()
            if isinstance(self.cursor, ReportCursor):
                self.cursor.greeting_wanted = True
        else:
            before = len(self.cursor.items)
            self.cursor.disconnected()
            if len(self.cursor.items) > before:
                self.ends.append([life for life in self.lives if life.ended])
        self._collect()

    def deliver(self) -> None:
        if not self.live:
            return
        seq, message = self.live.popleft()
        cursor = self.cursor
        if isinstance(cursor, Cursor):
            assert isinstance(message, bytes)
            cursor.live(seq, message)
        elif isinstance(message, Events):
            if self.faulty and self.rng.random() < 0.02:
                cursor.unreadable(seq, message.epoch, 10)
            else:
                cursor.events(seq, message, 10)
        else:
            assert isinstance(message, Heartbeat)
            cursor.heartbeat(seq, message, 10)
        self._collect()

    def toggle_replay(self) -> None:
        self.replay_up = not self.replay_up

    def serve(self) -> None:
        """Let the engine answer the router's replay request with the batches in its ring, or a part of them."""
        cursor, life = self.cursor, self.life
        if not isinstance(cursor, Cursor):
            return
        # Both sockets lose an engine that dies at the same time, and its successor needs time to start; so the router
        # knows of the end before it can get an answer.
        while "down" in self.news:
            self.deliver_news()
        if cursor.request is None or cursor.request.number == self.served:
            return
        self.served = cursor.request.number
        self.answers.clear()
        if life is None or not self.replay_up:
            return
        replies: list[tuple[int, bytes] | None] = [batch for batch in life.ring if batch[0] >= cursor.request.start]
        replies.append(None)
        if self.faulty and self.rng.random() < 0.3:
            # The first batch always arrives; some of the batches queued behind it, or the end, are dropped.
            lost = {self.rng.randrange(1, len(replies) + 1) for _ in range(2)}
            replies = [batch for at, batch in enumerate(replies) if at not in lost]
        self.answers = deque(replies)

    def answer(self) -> None:
        if isinstance(self.cursor, ReportCursor):
            if self.parts:
                self.cursor.part(self.parts.popleft())
                self._collect()
            return
        for _ in range(self.rng.randrange(1, 6)):
            request = self.cursor.request
            if request is None or request.number != self.served:
                self.answers.clear()
            if not self.answers:
                return
            batch = self.answers.popleft()
            if batch is None:
                self.cursor.replay_ended()
            else:
                self.cursor.replayed(*batch)
            self._collect()

    def overdue(self) -> None:
        cursor = self.cursor
        if isinstance(cursor, Cursor):
            if cursor.request is not None and not self.answers:
                cursor.replay_overdue()
        elif self.asked is not None and self.asked == cursor.request:
            cursor.snapshot_overdue()
        self._collect()

    def check(self) -> None:
        if isinstance(self.cursor, Cursor) and not self.news:
            self.cursor.check()
            self._collect()

    def greet(self) -> None:
        cursor, life = self.cursor, self.life
        if isinstance(cursor, ReportCursor) and life is not None and life.patched and cursor.greeting_wanted:
            cursor.greeting_wanted = False
            self.hellos = deque([life.hello()])

    def hear_hello(self) -> None:
        cursor = self.cursor
        if isinstance(cursor, ReportCursor) and self.hellos:
            hello = self.hellos.popleft()
            if not cursor.greeting_wanted:
                cursor.hello(hello)
                self._collect()

    def beat(self) -> None:
        life = self.life
        heard = self.joined and (not self.faulty or self.rng.random() < 0.8)
        if isinstance(self.cursor, ReportCursor) and life is not None and life.patched and heard:
            self.live.append((life.next_seq, life.heartbeat()))

    def ask_snapshot(self) -> None:
        cursor, life = self.cursor, self.life
        if not isinstance(cursor, ReportCursor) or cursor.request is None:
            return
        if cursor.request != self.asked:
            self.asked = cursor.request
            self.parts.clear()
            cursor.on_request_sent()
            if life is not None and life.patched:
                parts = life.parts(self.asked)
                if self.faulty and self.rng.random() < 0.2:
                    del parts[self.rng.randrange(len(parts))]
                self.parts = deque(parts)
        elif not self.parts:
            cursor.snapshot_overdue()
        self._collect()

    def silence(self) -> None:
        if isinstance(self.cursor, ReportCursor):
            self.cursor.silent(3.0)
            self._collect()
