# SPDX-License-Identifier: Apache-2.0
"""The greeting of a publisher on its requests socket, whenever a cursor wants one. The time is an argument."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from kvrouter.events.patch.cursor import ReportCursor
from kvrouter.events.patch.decode import Unreadable, read_answer
from kvrouter.events.patch.messages import Hello, HelloRequest
from kvrouter.events.patch.settings import ReportSettings
from kvrouter.events.transport.link import Link


class Greeter:
    """The requests socket, and the greeting whose answer counts."""

    def __init__(
        self, cursor: ReportCursor, link: Link, settings: ReportSettings, on_hello: Callable[[Hello], None]
    ) -> None:
        """Create a greeter that has sent nothing; `on_hello` is called with each answer that counts."""
        self.link = link
        self._cursor = cursor
        self._settings = settings
        self._on_hello = on_hello
        self._connected = False
        # The id of the greeting that counts, when it was sent, and when it is sent again without a request by the
        # cursor.
        self._id = 0
        self._sent_s = -math.inf
        self._due_s = math.inf

    def read(self) -> bool:
        """Read until no message is left (returns False) or the turn's budget is spent (returns True)."""
        return self.link.read(self._handle, self._settings.turn_messages, self._settings.turn_bytes)

    def read_news(self) -> None:
        """Read connection news. A new connection wants a greeting, as it may lead to another publisher."""
        for is_connected in self.link.take_news():
            self._connected = is_connected
            self._cursor.greeting_wanted |= is_connected

    def greet(self, now_s: float) -> float:
        """Greet the publisher if it is time. Returns the time of the next greeting."""
        if not self._connected:
            return math.inf
        due_s = self._due_s
        if self._cursor.greeting_wanted:
            due_s = min(due_s, self._sent_s + self._settings.greeting_pause_s)
        if now_s < due_s:
            return due_s
        self._cursor.greeting_wanted = False
        self._id += 1
        self._sent_s = now_s
        self._due_s = now_s + self._settings.answer_timeout_s
        self.link.send(b"", msgspec.msgpack.encode(HelloRequest(self._id)))
        return self._due_s

    def _handle(self, frames: list[bytes]) -> None:
        reply = read_answer(frames)
        if isinstance(reply, Unreadable):
            self._cursor.malformed(f"an answer: {reply.reason}")
        # Once a greeting is wanted again, an answer under way may be of an earlier life.
        if isinstance(reply, Hello) and reply.id == self._id and not self._cursor.greeting_wanted:
            silent = self._cursor.is_silent
            self._due_s = self._sent_s + self._settings.silent_greeting_s if silent else math.inf
            self._on_hello(reply)
