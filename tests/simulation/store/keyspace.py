# SPDX-License-Identifier: Apache-2.0
"""The keys of one server, with their values and deadlines.

A command changes a `Keyspace` and notes in `effects` what changed, in a form that gives the same result whenever it is
executed: with absolute deadlines and whole ids. A replica, and the file that survives a crash, are a second `Keyspace`
that executes these effects later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.simulation.store.stream import NODE_BYTES, NODE_ENTRIES, Stream

Command = Sequence[bytes]


class Members(dict[bytes, None]):
    """A SET, in the order in which its members were added: the order of a Python set differs between processes."""

    def copy(self) -> Members:
        return Members(self)


# A STRING, a HASH, a SET, or a stream.
Value = bytes | dict[bytes, bytes] | Members | Stream


class Expired(tuple[bytes, ...]):
    """The effect of a deadline, which no client caused."""


class ReplyError(Exception):
    """An error reply; its text is what the server sends."""


WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"
NO_INTEGER = "ERR value is not an integer or out of range"


class Keyspace:
    """The keys of a server. `now_ms` is the time of the command that is executed."""

    def __init__(self, *, node_entries: int = NODE_ENTRIES, node_bytes: int = NODE_BYTES) -> None:
        self.values: dict[bytes, Value] = {}
        # Milliseconds since 1970, by key.
        self.deadlines: dict[bytes, int] = {}
        # Keys expire only on a primary, which sends a DEL to its replica: at this time, no key has expired.
        self.now_ms = -1
        self.effects: list[Command] = []
        self.expired = 0
        # A replica hides what has expired, and its primary deletes it.
        self.is_replica = False
        self._limits = {"node_entries": node_entries, "node_bytes": node_bytes}
        # Called with each key that changes.
        self.touched: Callable[[bytes], None] = lambda key: None
        # The streams that got entries, for the reads that wait.
        self.news: dict[bytes, None] = {}

    def copy(self) -> Keyspace:
        """Return the same keys and values, which change on their own."""
        twin = Keyspace(**self._limits)
        for key, value in self.values.items():
            twin.values[key] = value if isinstance(value, bytes) else value.copy()
        twin.deadlines = self.deadlines.copy()
        return twin

    def image(self) -> dict[bytes, object]:
        """Return all values with their deadlines, for comparisons."""
        return {
            key: (value.entries.copy() if isinstance(value, Stream) else value, self.deadlines.get(key))
            for key, value in self.values.items()
        }

    # -- reading

    def find(self, key: bytes) -> Value | None:
        """Return the value of `key`, None if there is none or it has expired."""
        deadline = self.deadlines.get(key)
        if deadline is not None and deadline <= self.now_ms:
            if self.is_replica:
                return None
            self.expired += 1
            self.drop(key, Expired((b"DEL", key)))
            return None
        return self.values.get(key)

    def text(self, key: bytes) -> bytes | None:
        """Return a STRING; raise ReplyError for another type, like the three that follow."""
        value = self.find(key)
        if value is not None and not isinstance(value, bytes):
            raise ReplyError(WRONG_TYPE)
        return value

    def fields(self, key: bytes) -> dict[bytes, bytes]:
        """Return a HASH, an empty one if there is none."""
        value = self.find(key)
        if value is None:
            return {}
        if not isinstance(value, dict) or isinstance(value, Members):
            raise ReplyError(WRONG_TYPE)
        return value

    def members(self, key: bytes) -> Members:
        """Return a SET, an empty one if there is none."""
        value = self.find(key)
        if value is None:
            return Members()
        if not isinstance(value, Members):
            raise ReplyError(WRONG_TYPE)
        return value

    def stream(self, key: bytes) -> Stream | None:
        """Return a stream, None if there is none."""
        value = self.find(key)
        if value is not None and not isinstance(value, Stream):
            raise ReplyError(WRONG_TYPE)
        return value

    # -- writing

    def put(self, key: bytes, value: Value, effect: Command) -> None:
        """Store a changed value. A collection without members is no key."""
        if value or isinstance(value, (bytes, Stream)):
            self.values[key] = value
        else:
            self.values.pop(key, None)
            self.deadlines.pop(key, None)
        self.effects.append(effect)
        self.touched(key)

    def drop(self, key: bytes, effect: Command = ()) -> bool:
        """Delete `key`, and return whether it existed."""
        if self.values.pop(key, None) is None:
            return False
        self.deadlines.pop(key, None)
        self.effects.append(effect or (b"DEL", key))
        self.touched(key)
        return True

    def clear(self) -> None:
        """Delete all keys."""
        gone = list(self.values)
        self.values.clear()
        self.deadlines.clear()
        self.effects.append((b"FLUSHALL",))
        for key in gone:
            self.touched(key)

    def new_stream(self) -> Stream:
        """Return an empty stream with this server's limits of nodes."""
        return Stream(**self._limits)
