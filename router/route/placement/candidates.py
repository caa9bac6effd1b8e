# SPDX-License-Identifier: Apache-2.0
"""Which workers may take a prompt, and why the others may not. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import msgspec

from kvrouter.router.base.common.errors import NoWorker, UnknownWorker
from kvrouter.router.base.common.escaping import printable
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.question import Hit, Question, filter_hits
from kvrouter.router.model.workers.stream_state import StreamState

DOWN = StreamState.DOWN.value
# Reasons that one answer names; a fleet has hundreds of workers.
REFUSALS_SHOWN = 8


class Pin(NamedTuple):
    """The only worker allowed; dp_rank None: any of its ranks."""

    worker_id: str
    dp_rank: int | None = None


class Candidates(msgspec.Struct, frozen=True, eq=False, gc=False):
    """hits: of the workers that may take it. wanted: of those that the client did not exclude, in any state."""

    hits: list[Hit]
    wanted: Sequence[Hit]
    refusals: list[str]


def candidates(
    everybody: Sequence[Hit], question: Question, pin: Pin | str | None, unavailable: Callable[[WorkerKey], str | None]
) -> Candidates:
    """Those of `everybody` that may take it. unavailable: why a worker takes no requests now. Raises UnknownWorker."""
    wanted = filter_hits(everybody, question)
    if pin is not None:
        wanted = _pinned(everybody, pin, question.model)
    hits, refusals = [], []
    for hit in wanted:
        why = unavailable(hit.worker)
        if why is None and hit.state != DOWN:
            hits.append(hit)
        else:
            refusals.append(f"{printable(hit.worker.route_name)}: {why or f'down ({hit.reason})'}")
    return Candidates(hits, wanted, refusals)


def no_worker_error(
    model: str, found: Candidates, retry_after_s: float, prefillers: Iterable[WorkerKey] = ()
) -> NoWorker:
    """The error where `found` has no hits. prefillers: of those, the workers that would compute a prompt and not decode
    it."""
    reasons = "; ".join(found.refusals[:REFUSALS_SHOWN])
    only = ", ".join(sorted(printable(worker.route_name) for worker in prefillers)[:REFUSALS_SHOWN])
    if only:
        reasons = "; ".join(
            filter(None, (reasons, f"{only}: role prefill; register a worker that decodes (role decode or both)"))
        )
    return NoWorker(
        f"no worker of model {model!r} can take it: {reasons or 'all are excluded'}", retry_after_s=retry_after_s
    )


def split_by_role(hits: Sequence[Hit], prefillers: Collection[WorkerKey]) -> tuple[list[Hit], list[Hit]]:
    """Splits into workers that decode, and workers that compute prompts for them."""
    decoders: list[Hit] = []
    others: list[Hit] = []
    for hit in hits:
        (others if hit.worker in prefillers else decoders).append(hit)
    return decoders, others


def _pinned(hits: Sequence[Hit], pin: Pin | str, model: str) -> Sequence[Hit]:
    """The workers that are meant. A text is a worker's id, or one with a rank: `w0`, `w0@1`, and `w0@0` for rank 0
    alone."""
    if isinstance(pin, Pin):
        found = [
            hit for hit in hits if hit.worker.worker_id == pin.worker_id and pin.dp_rank in (None, hit.worker.dp_rank)
        ]
        name = pin.worker_id if pin.dp_rank is None else f"{pin.worker_id}@{pin.dp_rank}"
    else:
        worker_id, at, rank = pin.rpartition("@")
        found = [hit for hit in hits if hit.worker.worker_id == pin]
        if not found and at and rank.isdecimal():
            found = [hit for hit in hits if hit.worker.worker_id == worker_id and hit.worker.dp_rank == int(rank)]
        name = pin
    if not found:
        raise UnknownWorker(
            f"no worker {printable(name)!r} is registered for model {model!r}; GET /workers lists those that are"
        )
    return found
