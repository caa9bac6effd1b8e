# SPDX-License-Identifier: Apache-2.0
"""An event of the fleet, as `GET /events` sends it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType


class EventType(StrEnum):
    """The type of an event."""

    # Blocks became resident at one place; a block that came and went in between is not reported.
    STORED = "stored"
    # Blocks stopped being resident at one place; net, as for STORED.
    REMOVED = "removed"
    # The engine dropped a whole cache; a REMOVED event with the blocks follows.
    CLEARED = "cleared"
    # The index of a worker is void, and an empty epoch begins.
    EPOCH = "epoch"
    # Batches of a worker's event stream are missing.
    GAP = "gap"
    # The index agrees with the engine again: by a replay, a snapshot, or because everything is learned again.
    RESYNC = "resync"
    # A worker's state or credit changed.
    STATE = "state"
    # A request was placed. Only a sample of the decisions is sent.
    DECISION = "decision"
    # The outcome of a request, or of an attempt, whose decision was sent as an event and is still kept.
    OUTCOME = "outcome"
    # Events that the client missed are no longer kept.
    LOST = "lost"


class FleetEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event. A field that the event does not have is absent."""

    type: Annotated[EventType, Meta(description="the type of the event")]
    time_s: Annotated[float, Meta(description="seconds since 1970")]
    model: Annotated[str | UnsetType, Meta(description="the model's name")] = UNSET
    worker_id: Annotated[str | UnsetType, Meta(description="the worker's id as text")] = UNSET
    dp_rank: Annotated[int | UnsetType, Meta(description="data-parallel rank")] = UNSET
    epoch: Annotated[str | UnsetType, Meta(description="one run of the publisher")] = UNSET
    seq: Annotated[int | UnsetType, Meta(description="the worker's last batch that is part of the event")] = UNSET
    group_idx: Annotated[
        int | UnsetType | None, Meta(description="number of the KV cache group; null: the engine names none")
    ] = UNSET
    medium: Annotated[str | UnsetType, Meta(description="GPU, CPU, STORAGE or another")] = UNSET
    owner: Annotated[str | UnsetType, Meta(description="who holds the blocks of a secondary tier")] = UNSET
    blocks: Annotated[int | UnsetType, Meta(description="how many blocks, net of what came and went in between")] = (
        UNSET
    )
    count: Annotated[
        int | UnsetType,
        Meta(description="how often it happened since the event before; of lost: how many events are gone"),
    ] = UNSET
    state: Annotated[
        str | UnsetType, Meta(description="state of the worker's event stream; unregistered: it was dropped")
    ] = UNSET
    credited: Annotated[bool | UnsetType, Meta(description="whether the worker's residency earns credit")] = UNSET
    reason: Annotated[str | UnsetType, Meta(description="why, as a sentence")] = UNSET
    selection_id: Annotated[str | UnsetType, Meta(description="names the choice")] = UNSET
    num_tokens: Annotated[int | UnsetType, Meta(description="length of the prompt in tokens")] = UNSET
    predicted_tokens: Annotated[int | UnsetType, Meta(description="the predicted hit at the chosen worker")] = UNSET
    best_tokens: Annotated[int | UnsetType, Meta(description="the longest predicted hit of all workers")] = UNSET
    lost_by: Annotated[str | UnsetType, Meta(description="why the worker with the longest hit was not chosen")] = UNSET
    skipped: Annotated[int | UnsetType, Meta(description="decisions before this one that were not sent")] = UNSET
    delivered_tokens: Annotated[int | UnsetType, Meta(description="tokens that the engine reported as reused")] = UNSET
    outcome: Annotated[str | UnsetType, Meta(description="how the request ended, as /decisions has it")] = UNSET
    status: Annotated[int | UnsetType, Meta(description="HTTP status of the answer")] = UNSET
    failed: Annotated[bool | UnsetType, Meta(description="whether the request failed, as /decisions has it")] = UNSET
    e2e_s: Annotated[float | UnsetType, Meta(description="seconds from the whole request to the end of its answer")] = (
        UNSET
    )
