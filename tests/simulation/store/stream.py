# SPDX-License-Identifier: Apache-2.0
"""A Redis stream, with the nodes that an approximate trim drops whole.

The sizes of nodes are those of Valkey's listpacks, so that `MAXLEN ~` keeps as many entries as a real server keeps.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from operator import itemgetter

EntryId = tuple[int, int]
Entry = tuple[EntryId, Sequence[bytes]]

MAX_ID: EntryId = (2**64 - 1, 2**64 - 1)
# Valkey's defaults of stream-node-max-entries and stream-node-max-bytes.
NODE_ENTRIES = 100
NODE_BYTES = 4_096
# How many entries one approximate trim drops at most, in nodes: Valkey's default of its LIMIT.
TRIM_NODES = 100
# A listpack's header and its last byte.
_EMPTY_BYTES = 7
_ID_OF = itemgetter(0)


class _Node:
    """A node: the id and field names of its first entry, the number of its entries, and its size."""

    __slots__ = ("bytes", "entries", "first", "names")

    def __init__(self, first: EntryId, names: Sequence[bytes]) -> None:
        self.first = first
        self.names = names
        self.entries = 0
        # Counts of entries and deleted entries, the number of names, the names, and a zero.
        self.bytes = _EMPTY_BYTES + 2 + 2 + _number_bytes(len(names)) + sum(map(_text_bytes, names)) + 2

    def add(self, entry_id: EntryId, fields: Sequence[bytes]) -> None:
        names = fields[::2]
        self.entries += 1
        self.bytes += 2 + sum(map(_number_bytes, (entry_id[0] - self.first[0], entry_id[1] - self.first[1])))
        parts = len(names) + 3
        if names == self.names:
            self.bytes += sum(map(_text_bytes, fields[1::2]))
        else:
            self.bytes += _number_bytes(len(names)) + sum(map(_text_bytes, fields))
            parts += len(names) + 1
        self.bytes += _number_bytes(parts)


class Stream:
    """The entries of one stream, in order."""

    def __init__(self, node_entries: int = NODE_ENTRIES, node_bytes: int = NODE_BYTES) -> None:
        self.entries: list[Entry] = []
        self.last_id: EntryId = (0, 0)
        self._nodes: deque[_Node] = deque()
        self._node_entries = node_entries
        self._node_bytes = node_bytes

    def copy(self) -> Stream:
        """Return a stream that changes on its own."""
        twin = Stream(self._node_entries, self._node_bytes)
        twin.entries, twin.last_id = self.entries.copy(), self.last_id
        for node in self._nodes:
            same = _Node(node.first, node.names)
            same.entries, same.bytes = node.entries, node.bytes
            twin._nodes.append(same)
        return twin

    def next_id(self, now_ms: int) -> EntryId:
        """Return the id of an entry that is added now; ids rise even if the clock falls back."""
        milliseconds, number = self.last_id
        return (now_ms, 0) if now_ms > milliseconds else (milliseconds, number + 1)

    def add(self, entry_id: EntryId, fields: Sequence[bytes]) -> None:
        """Append an entry, whose id is above the last one."""
        node = self._nodes[-1] if self._nodes else None
        if (
            node is None
            or (self._node_bytes and node.bytes + sum(map(len, fields)) >= self._node_bytes)
            or node.entries >= self._node_entries
        ):
            node = _Node(entry_id, fields[::2])
            self._nodes.append(node)
        node.add(entry_id, fields)
        self.entries.append((entry_id, fields))
        self.last_id = entry_id

    def trim_length(self, length: int) -> int:
        """Drop the oldest nodes as long as `length` entries stay, and return how many entries were dropped."""
        return self._trim(lambda dropped, node: len(self.entries) - dropped - node.entries >= length)

    def trim_older(self, oldest: EntryId) -> int:
        """Drop the oldest nodes whose entries are all older than `oldest`, and return how many entries were dropped."""
        return self._trim(lambda dropped, node: self.entries[dropped + node.entries - 1][0] < oldest)

    def _trim(self, drops: Callable[[int, _Node], bool]) -> int:
        dropped = 0
        while self._nodes:
            node = self._nodes[0]
            if dropped + node.entries > TRIM_NODES * self._node_entries or not drops(dropped, node):
                break
            dropped += node.entries
            self._nodes.popleft()
        del self.entries[:dropped]
        return dropped

    def after(self, entry_id: EntryId, count: int | None) -> list[Entry]:
        """Return the oldest `count` entries after `entry_id`."""
        first = bisect_right(self.entries, entry_id, key=_ID_OF)
        return self.entries[first:] if count is None else self.entries[first : first + count]

    def between(self, first: EntryId, last: EntryId) -> list[Entry]:
        """Return the entries from `first` to `last`, both included."""
        low = bisect_left(self.entries, first, key=_ID_OF)
        return self.entries[low : bisect_right(self.entries, last, key=_ID_OF)]


def _number_bytes(number: int) -> int:
    """Return the size of a number in a listpack."""
    if 0 <= number < 128:
        return 2
    for bits, size in ((13, 3), (16, 4), (24, 5), (32, 6)):
        if -(1 << bits - 1) <= number < 1 << bits - 1:
            return size
    return 10


def _text_bytes(text: bytes) -> int:
    """Return the size of a text in a listpack, which stores the text of a number as the number."""
    size = len(text)
    if size <= 20 and (number := _number(text)) is not None:
        return _number_bytes(number)
    size += 1 if size < 64 else 2 if size < 4_096 else 5
    # Each entry is followed by its own size, of 7 bits a byte.
    return size + (1 if size < 128 else 2 if size < 16_384 else 3 if size < 2_097_152 else 4)


def _number(text: bytes) -> int | None:
    if not text.removeprefix(b"-").isdigit():
        return None
    number = int(text)
    return number if b"%d" % number == text and -(2**63) <= number < 2**63 else None
