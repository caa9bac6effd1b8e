# SPDX-License-Identifier: Apache-2.0
"""The hand-over of a worker's cache to its neighbours: the body and the answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from kvrouter.contract import fields

# An engine refuses more.
MAX_WITHIN_S = 3_600
MAX_RECEIVERS = 256
# More than the memory of one machine.
MAX_BYTES = 1 << 50
DEFAULT_WITHIN_S = 60.0
DEFAULT_MAX_BYTES = 64 << 30

ENDS = (
    "why it ended, empty while it goes on: complete; bytes, time: the bound was reached; room: more would displace what is "
    "worth more there; stopped; closed: the receiver ends; unreachable: it does not answer the router; lost: it no longer "
    "knows the hand-over; or the engine's reason, such as busy, gone, layout, seed, resets, forbidden"
)


class HandOverBody(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A hand-over of what is worth most in a worker's CPU memory. It does not drain the worker."""

    dp_rank: Annotated[int | None, Meta(description="only this data-parallel rank")] = None
    model: Annotated[str | None, Meta(description="only the worker's part of this model")] = None
    to: Annotated[
        Annotated[Sequence[str | int], Meta(min_length=1, max_length=MAX_RECEIVERS)] | None,
        Meta(description="the workers that take over; by default all that can, each a share"),
    ] = None
    max_bytes: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_BYTES)] | None,
        Meta(description=f"bytes to copy, divided among the receivers; default {DEFAULT_MAX_BYTES}"),
    ] = None
    within_s: Annotated[
        Annotated[float, Meta(gt=0, le=MAX_WITHIN_S)] | None,
        Meta(description=f"seconds after which it ends; default {DEFAULT_WITHIN_S:g}"),
    ] = None


class HandOverPart(msgspec.Struct, frozen=True, kw_only=True):
    """The part that one worker takes over. Counts are in chunks unless noted."""

    worker_id: fields.WorkerName
    dp_rank: fields.DpRank
    model: fields.Model
    end: Annotated[str, Meta(description=ENDS)] = ""
    problem: Annotated[str, Meta(description="a sentence about an end that is a failure; empty otherwise")] = ""
    offered: Annotated[int, Meta(description="chunks of its share, 0 while that is not known")] = 0
    fetched: Annotated[int, Meta(description="chunks that have arrived")] = 0
    fetched_bytes: Annotated[int, Meta(description="bytes that have arrived")] = 0
    present: Annotated[int, Meta(description="chunks that were there already")] = 0
    missed: Annotated[
        int, Meta(description="chunks that did not come, because the source evicted them or damaged ones came")
    ] = 0
    evicted: Annotated[int, Meta(description="chunks of the receiver that made room")] = 0


class HandOverReply(msgspec.Struct, frozen=True):
    """A hand-over and its parts."""

    number: Annotated[int, Meta(description="names the hand-over in further requests")]
    parts: Annotated[Sequence[HandOverPart], Meta(description="one for each worker that takes over")]
