# SPDX-License-Identifier: Apache-2.0
"""The messages about load between router processes, on the stream `kvr:3:loads` in Redis. Pure.

A message has totals, never differences, so an old message is useless and need not be kept.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.model.engines.engine_metrics import EngineLoad
from kvrouter.router.route.load.load_table import Totals

# A reader drops a message with a larger number, and with it all other totals.
MAX_COUNT = 2**53
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]

RELEASE = "release"
PREFILL_COMPLETE = "prefill_complete"


class WorkerTotals(msgspec.Struct, frozen=True, array_like=True):
    """The sender's load at one worker."""

    model: str
    worker_id: str
    dp_rank: int
    prefill_tokens: Count
    decode_tokens: Count
    requests: Count
    # Processes of older versions leave it out, and ignore it.
    lent_tokens: Count = 0

    @classmethod
    def of(cls, worker: WorkerKey, totals: Totals) -> WorkerTotals:
        """Return the totals in the form of a message."""
        counts = (totals.prefill_tokens, totals.decode_tokens, totals.requests, totals.lent_tokens)
        return cls(*worker, *(min(count, MAX_COUNT) for count in counts))

    @property
    def worker(self) -> WorkerKey:
        """The worker's key."""
        return WorkerKey(self.model, self.worker_id, self.dp_rank)

    @property
    def totals(self) -> Totals:
        """The load as the table holds it."""
        return Totals(self.prefill_tokens, self.decode_tokens, self.requests, self.lent_tokens)


class WorkerGauge(msgspec.Struct, frozen=True, array_like=True):
    """The latest report of an engine that the sender polls."""

    model: str
    worker_id: str
    dp_rank: int
    report: EngineLoad

    @property
    def worker(self) -> WorkerKey:
        """Return the key of the worker whose engine made the report."""
        return WorkerKey(self.model, self.worker_id, self.dp_rank)


class ReservationEnd(msgspec.Struct, frozen=True, array_like=True):
    """A request to end a reservation, or its prefill, that another process owns."""

    # Identifies the answer.
    number: int
    selection_id: str
    # RELEASE or PREFILL_COMPLETE.
    how: str


class LoadMessage(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One message of a process."""

    # The name of the router process that sent the message.
    process: str
    # Whether `totals` are all that the sender has; otherwise only those that changed.
    whole: bool
    totals: list[WorkerTotals] = []
    gauges: list[WorkerGauge] = []
    # Requests to end reservations of other processes.
    endings: list[ReservationEnd] = []
    # Answers to the endings of others: (process that sent the ending, its number, whether the reservation was the
    # sender's).
    answers: list[tuple[str, int, bool]] = []
    # Whether the sender stops.
    leaves: bool = False
    # For other parts of the router; opaque here.
    notices: list[bytes] = []


encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(LoadMessage)


def decode(raw: bytes) -> LoadMessage | None:
    """Return the message, or None if another version or another program wrote it."""
    try:
        return _decoder.decode(raw)
    except (msgspec.MsgspecError, ValueError):
        return None
