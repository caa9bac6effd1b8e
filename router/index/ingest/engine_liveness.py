# SPDX-License-Identifier: Apache-2.0
"""Whether an engine lives, and whether it is still the same process, judged by what its HTTP answers. Pure.

Its event stream shows less: ZMQ reconnects to whoever listens there next, whose seq may happen to continue the old one.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

# A slow answer is a busy engine; three in a row with nothing between, at one a second, are one that hangs.
LOST_AFTER = 3


class Pulse(msgspec.Struct, frozen=True):
    """It answered. start_s: when its process started, seconds since 1970, or another number that no other process of
    it has (`Engine.gauges.life`); None: it did not say, or /metrics was not requested."""

    start_s: float | None = None


class NoPulse(msgspec.Struct, frozen=True):
    """It did not. gone: nobody listens there, so there is nothing to wait for."""

    reason: str
    gone: bool = False


class EngineLost(msgspec.Struct, frozen=True):
    """It lived, and no longer answers."""

    reason: str


class EngineAbsent(msgspec.Struct, frozen=True):
    """Nobody listens there, and it has not answered yet: it is not up, or its URL is another."""

    reason: str


class EnginePresent(msgspec.Struct, frozen=True):
    """The absent engine answers for the first time."""


class EngineBack(msgspec.Struct, frozen=True):
    """It answers again; whether it is the same life is not known."""


class EngineRestarted(msgspec.Struct, frozen=True):
    """It is another process than before."""

    reason: str


class EngineSame(msgspec.Struct, frozen=True):
    """It is the same process as before. asked_s: when the request was sent, on the clock of the stream. start_s: when
    its process started, on its own clock."""

    asked_s: float
    start_s: float


VitalSign: TypeAlias = EngineAbsent | EnginePresent | EngineLost | EngineBack | EngineRestarted | EngineSame


class EngineLiveness:
    """One engine's. Silence before the first answer says nothing: where there never was one, there may be none to be
    had. A refused connection does: nobody is there."""

    def __init__(self, start_s: float | None = None, *, absent: bool = False, lost: bool = False) -> None:
        """start_s: when its process started, as an earlier poller learned. absent, lost: it was so when that one ended:
        its return is to be said."""
        self.start_s = start_s
        self._answered = lost
        self._absent = absent
        self._lost = lost
        self._misses = 0

    def observe(self, sign: Pulse | NoPulse, asked_s: float) -> list[VitalSign]:
        """What the next answer, or its absence, says."""
        if isinstance(sign, NoPulse):
            return self._missed(sign)
        self._answered = True
        self._misses = 0
        found: list[VitalSign] = []
        if self._absent:
            self._absent = False
            found.append(EnginePresent())
        if self._lost:
            self._lost = False
            found.append(EngineBack())
        if sign.start_s is not None:
            before, self.start_s = self.start_s, sign.start_s
            if before == sign.start_s:
                found.append(EngineSame(asked_s, sign.start_s))
            elif before is not None:
                found.append(
                    EngineRestarted(f"its start is {sign.start_s:.2f}, that of the process before {before:.2f}")
                )
        return found

    def _missed(self, sign: NoPulse) -> list[VitalSign]:
        self._misses += 1
        if sign.gone and not self._answered and not self._absent:
            self._absent = True
            return [EngineAbsent(sign.reason)]
        if self._lost or not self._answered or not (sign.gone or self._misses >= LOST_AFTER):
            return []
        self._lost = True
        times = "" if sign.gone else f" {self._misses} times in a row"
        return [EngineLost(f"{sign.reason}{times}")]
