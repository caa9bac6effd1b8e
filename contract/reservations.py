# SPDX-License-Identifier: Apache-2.0
"""Reservations that a client makes and ends: the body and the answers of `/reservations`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvrouter.contract import fields
from kvrouter.contract.choices import SelectBody


class ReservationBody(SelectBody, kw_only=True):
    """Load to count at a worker that the client has chosen.

    isl_tokens alone gives a prompt's load; with its tokens or hashes, the worker's hit is subtracted. Without
    worker_id, the body claims the worker that an earlier `/select` chose under this selection_id.
    """

    worker_id: Annotated[str | int | None, Meta(description="the worker; absent: the one chosen as selection_id")] = (
        None
    )
    effective_prefill_tokens: Annotated[
        Annotated[int, Meta(ge=0, le=fields.MAX_NUM_TOKENS)] | None,
        Meta(description="tokens of the prompt that are to be computed, in place of the estimate"),
    ] = None
    track_prefill_tokens: Annotated[
        bool | None, Meta(description="whether the tokens to compute count as load; by default they do")
    ] = None


class ReservedReply(msgspec.Struct, frozen=True):
    """The reserved worker."""

    selection_id: Annotated[str, Meta(description="names the reservation")]
    model_name: fields.Model
    routing_group: fields.RoutingGroup
    worker_id: fields.WorkerName
    dp_rank: fields.DpRank
    endpoint: fields.Endpoint


class EndedReply(msgspec.Struct, frozen=True):
    """The answer to a request that ends a reservation, or a part of it."""

    status: Annotated[str, Meta(description="always ok")]
