# SPDX-License-Identifier: Apache-2.0
"""The workers that may take a prompt, and the reasons why the others may not. Pure."""

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
# The reason why a draining worker takes no requests. It still lends blocks.
DRAINING = "it is draining and takes no new requests until its state is set to active"
# The number of refusals that one error names; a fleet has hundreds of workers.
REFUSALS_SHOWN = 8


class Pin(NamedTuple):
    """The only worker that a request may use."""

    worker_id: str
    # The only rank allowed, or None for any of the worker's ranks.
    dp_rank: int | None = None


class Candidates(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The workers of a model, sorted by whether they may take a prompt."""

    # Hits of the workers that may take it.
    hits: list[Hit]
    # Hits of the workers that the client did not exclude, in any state.
    wanted: Sequence[Hit]
    # For each wanted worker that may not take it, its name and the reason.
    refusals: list[str]


def candidates(
    everybody: Sequence[Hit], question: Question, pin: Pin | str | None, unavailable: Callable[[WorkerKey], str | None]
) -> Candidates:
    """Return the workers that may take a prompt.

    Args:
        everybody: The hits of all workers of the model.
        question: The prompt, with the client's own restrictions.
        pin: The only worker allowed, as `Pin` or by its name; None for any.
        unavailable: Returns why a worker takes no requests now, or None if it does.

    Raises:
        UnknownWorker: The question or the pin names a worker that does not exist.
    """
    wanted = filter_hits(everybody, question)
    if pin is not None:
        wanted = _pinned(everybody, pin, question.model)
    hits, refusals = [], []
    for hit in wanted:
        problem = unavailable(hit.worker)
        if problem is None and hit.state != DOWN:
            hits.append(hit)
        else:
            refusals.append(f"{printable(hit.worker.route_name)}: {problem or f'down ({hit.reason})'}")
    return Candidates(hits, wanted, refusals)


def no_worker_error(
    model: str, found: Candidates, retry_after_s: float, prefillers: Iterable[WorkerKey] = ()
) -> NoWorker:
    """Return the error for a prompt that no worker may take.

    Args:
        model: The model of the prompt.
        found: The candidates, among which there are no hits.
        retry_after_s: When the client should try again.
        prefillers: Workers that the client did not exclude, but that only compute prompts and never decode.
    """
    reasons = "; ".join(found.refusals[:REFUSALS_SHOWN])
    names = ", ".join(sorted(printable(worker.route_name) for worker in prefillers)[:REFUSALS_SHOWN])
    if names:
        reasons = "; ".join(
            filter(None, (reasons, f"{names}: role prefill; register a worker that decodes (role decode or both)"))
        )
    return NoWorker(
        f"no worker of model {model!r} can take it: {reasons or 'all are excluded'}", retry_after_s=retry_after_s
    )


def split_by_role(hits: Sequence[Hit], prefillers: Collection[WorkerKey]) -> tuple[list[Hit], list[Hit]]:
    """Split the hits into those of workers that decode, and those of workers that only compute prompts."""
    decoders: list[Hit] = []
    prefill_hits: list[Hit] = []
    for hit in hits:
        (prefill_hits if hit.worker in prefillers else decoders).append(hit)
    return decoders, prefill_hits


def _pinned(hits: Sequence[Hit], pin: Pin | str, model: str) -> Sequence[Hit]:
    """Return the hits of the pinned workers.

    A text is a worker's id, or an id with a rank: `w0`, `w0@1`, and `w0@0` for rank 0 alone.

    Raises:
        UnknownWorker: No hit is of such a worker.
    """
    if isinstance(pin, Pin):
        pinned = [
            hit for hit in hits if hit.worker.worker_id == pin.worker_id and pin.dp_rank in (None, hit.worker.dp_rank)
        ]
        name = pin.worker_id if pin.dp_rank is None else f"{pin.worker_id}@{pin.dp_rank}"
    else:
        worker_id, at, rank = pin.rpartition("@")
        pinned = [hit for hit in hits if hit.worker.worker_id == pin]
        if not pinned and at and rank.isdecimal():
            pinned = [hit for hit in hits if hit.worker.worker_id == worker_id and hit.worker.dp_rank == int(rank)]
        name = pin
    if not pinned:
        raise UnknownWorker(
            f"no worker {printable(name)!r} is registered for model {model!r}; GET /workers lists those that are"
        )
    return pinned
