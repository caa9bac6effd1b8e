# SPDX-License-Identifier: Apache-2.0
"""The blocks that an engine held after each of its messages: the truth against which a router's credit is judged.

It is read from the engine's own pool, never derived from events, so it shares no code with the router's counting. It
does no I/O.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

# (group, medium, owner), as the router names them.
Place: TypeAlias = tuple[int | None, str, str | None]
Held: TypeAlias = Mapping[Place, frozenset[int]]

NOTHING: Held = {}


@dataclass(slots=True)
class Life:
    """One stream of an engine, from one start of the engine to its end."""

    stream: str
    number: int
    # None while the life lasts.
    ended_s: float | None = None
    # The seqs of the messages, in ascending order, with holes at seqs without a message.
    seqs: list[int] = field(default_factory=list)
    # The time of each message, and the blocks held after it.
    said_s: list[float] = field(default_factory=list)
    states: list[Held] = field(default_factory=list)

    @property
    def last_seq(self) -> int | None:
        return self.seqs[-1] if self.seqs else None

    def note(self, seq: int, held: Held, now_s: float) -> None:
        self.seqs.append(seq)
        self.said_s.append(now_s)
        self.states.append(held)

    def at(self, seq: int | None) -> Held | None:
        """Return the blocks held after message `seq`, or None if this life has not sent it."""
        if seq is None:
            return NOTHING
        index = bisect_right(self.seqs, seq) - 1
        if index < 0 or self.seqs[index] != seq:
            return None
        return self.states[index]

    def held_later(self, seq: int | None, place: Place, block: int) -> bool:
        """Return whether a block was held after any message from `seq` on."""
        first = 0 if seq is None else bisect_right(self.seqs, seq) - 1
        return any(block in held.get(place, ()) for held in self.states[max(first, 0) :])

    def behind_s(self, seq: int | None, now_s: float) -> float:
        """Return how long ago the message after `seq` was sent; 0 if there is none."""
        index = 0 if seq is None else bisect_right(self.seqs, seq)
        return now_s - self.said_s[index] if index < len(self.seqs) else 0.0

    def last_change(self, place: Place, block: int) -> str:
        """Return a line for a trace that says when a block was last stored and last removed."""
        stored = removed = None
        before = False
        for seq, held in zip(self.seqs, self.states, strict=True):
            now = block in held.get(place, ())
            if now and not before:
                stored = seq
            elif before and not now:
                removed = seq
            before = now
        return f"life {self.number} of {self.stream}: last stored at seq {stored}, last removed at {removed}"


class History:
    """All lives of one engine, on each of its streams."""

    def __init__(self) -> None:
        self.lives: list[Life] = []

    def begin(self, stream: str) -> Life:
        life = Life(stream, len(self.lives))
        self.lives.append(life)
        return life

    def end(self, now_s: float) -> None:
        for life in self.lives:
            if life.ended_s is None:
                life.ended_s = now_s

    @property
    def current(self) -> list[Life]:
        return [life for life in self.lives if life.ended_s is None]
