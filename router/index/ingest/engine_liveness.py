# SPDX-License-Identifier: Apache-2.0
"""Whether an engine lives, and whether it is still the same process, judged by its answers over HTTP. Pure.

The event stream shows less: ZMQ reconnects to any publisher that listens at the endpoint next, and the seq of that
publisher may happen to continue the old one.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

# One missing answer means a busy engine; three in a row, at one request a second, mean an engine that hangs.
LOST_AFTER = 3


class Pulse(msgspec.Struct, frozen=True):
    """An answer of the engine."""

    # When the engine's process started, in seconds since 1970, or another number that no other process of it has
    # (`EngineGauges.life`). None: the answer did not say, or /metrics was not requested.
    start_s: float | None = None


class NoPulse(msgspec.Struct, frozen=True):
    """A poll of the engine's HTTP address that the engine did not answer."""

    reason: str
    # Whether nobody listens at the address, so that there is nothing to wait for.
    gone: bool = False


class EngineLost(msgspec.Struct, frozen=True):
    """An engine that answered before and no longer does."""

    reason: str


class EngineAbsent(msgspec.Struct, frozen=True):
    """An engine that has not answered yet and at whose address nobody listens: it is not up, or its URL is wrong."""

    reason: str


class EnginePresent(msgspec.Struct, frozen=True):
    """The first answer of an engine that was absent."""


class EngineBack(msgspec.Struct, frozen=True):
    """The first answer of an engine that was lost; whether it is the same life is not known."""


class EngineRestarted(msgspec.Struct, frozen=True):
    """An answer from another process than before."""

    reason: str


class EngineSame(msgspec.Struct, frozen=True):
    """An answer from the same process as before."""

    # When the request was sent, on the clock of the stream.
    requested_s: float
    # When the engine's process started, on the engine's own clock.
    start_s: float


VitalSign: TypeAlias = EngineAbsent | EnginePresent | EngineLost | EngineBack | EngineRestarted | EngineSame


class EngineLiveness:
    """The liveness of one engine.

    Silence before the first answer proves nothing, because an engine that never answered may have no HTTP to answer
    with. A refused connection proves that nobody listens there.
    """

    def __init__(self, start_s: float | None = None, *, absent: bool = False, lost: bool = False) -> None:
        """Continue from the state in which an earlier poller ended.

        Args:
            start_s: When the engine's process started, None if not known.
            absent: Whether the engine was absent, so that its first answer is reported.
            lost: Whether the engine was lost, so that its return is reported.
        """
        self.start_s = start_s
        self._answered = lost
        self._absent = absent
        self._lost = lost
        self._misses = 0

    def observe(self, sign: Pulse | NoPulse, requested_s: float) -> list[VitalSign]:
        """Return the signs of life or death that the next answer, or its absence, gives.

        Args:
            sign: The answer, or its absence.
            requested_s: When the request was sent, on the clock of the stream.
        """
        if isinstance(sign, NoPulse):
            return self._missed(sign)
        self._answered = True
        self._misses = 0
        signs: list[VitalSign] = []
        if self._absent:
            self._absent = False
            signs.append(EnginePresent())
        if self._lost:
            self._lost = False
            signs.append(EngineBack())
        if sign.start_s is not None:
            before, self.start_s = self.start_s, sign.start_s
            if before == sign.start_s:
                signs.append(EngineSame(requested_s, sign.start_s))
            elif before is not None:
                signs.append(EngineRestarted(f"its process started {sign.start_s - before:.1f} s after the one before"))
        return signs

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
