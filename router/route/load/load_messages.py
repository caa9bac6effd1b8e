# SPDX-License-Identifier: Apache-2.0
"""The messages about load between router processes, on the stream `kvr:3:loads` in Redis. Pure.

A message has totals, never differences; older messages are useless, so nothing is kept.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.model.engines.engine_metrics import EngineLoad
from kvrouter.router.route.load.load_table import Totals

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]

RELEASE = "release"
PREFILL_COMPLETE = "prefill_complete"


class WorkerTotals(msgspec.Struct, frozen=True, array_like=True):
    """What the sender has in flight at one worker."""

    model: str
    worker_id: str
    dp_rank: int
    prefill_tokens: Count
    decode_tokens: Count
    requests: Count

    @classmethod
    def of(cls, worker: WorkerKey, totals: Totals) -> WorkerTotals:
        return cls(*worker, totals.prefill_tokens, totals.decode_tokens, totals.requests)

    @property
    def worker(self) -> WorkerKey:
        return WorkerKey(self.model, self.worker_id, self.dp_rank)

    @property
    def totals(self) -> Totals:
        return Totals(self.prefill_tokens, self.decode_tokens, self.requests)


class WorkerGauge(msgspec.Struct, frozen=True, array_like=True):
    """The latest report of an engine that the sender follows."""

    model: str
    worker_id: str
    dp_rank: int
    said: EngineLoad

    @property
    def worker(self) -> WorkerKey:
        return WorkerKey(self.model, self.worker_id, self.dp_rank)


class ReservationEnd(msgspec.Struct, frozen=True, array_like=True):
    """A reservation of another process is over, or its prefill is. number: identifies the answer."""

    number: int
    selection_id: str
    how: str


class LoadMessage(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """whole: `totals` are all that the sender has. answers: to endings of others, (process, number, whether it was the
    sender's to end). leaves: it ends. notices: for those who watch the others, opaque here."""

    process: str
    whole: bool
    totals: list[WorkerTotals] = []
    gauges: list[WorkerGauge] = []
    endings: list[ReservationEnd] = []
    answers: list[tuple[str, int, bool]] = []
    leaves: bool = False
    notices: list[bytes] = []


encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(LoadMessage)


def decode(raw: bytes) -> LoadMessage | None:
    """None: another version or another program wrote it."""
    try:
        return _decoder.decode(raw)
    except (msgspec.MsgspecError, ValueError):
        return None
