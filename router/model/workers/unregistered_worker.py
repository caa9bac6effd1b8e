# SPDX-License-Identifier: Apache-2.0
"""Workers that a source lists but that are not registered yet."""

from __future__ import annotations

import msgspec

from kvrouter.contract.worker_status import Recovery, WorkerStatus
from kvrouter.router.model.workers.engine_name import DEFAULT_ENGINE
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.stream_state import StreamState


class Waiting(msgspec.Struct, frozen=True):
    """The reason why a worker is not registered yet, and the remedy."""

    reason: str
    # The remedy, for the operator.
    fix: str


class UnregisteredWorker(msgspec.Struct, frozen=True):
    """A worker as its source describes it, before its registration."""

    registration: Registration
    waiting: Waiting

    def status(self) -> WorkerStatus:
        """Return the status that clients see; the worker's model may not be known."""
        given, reason = self.registration, f"not registered yet: {self.waiting.reason}"
        return WorkerStatus(
            worker_id=given.worker.worker_id,
            dp_rank=given.worker.dp_rank,
            model=given.worker.model,
            url=given.url,
            state=StreamState.DOWN.value,
            state_age_s=0.0,
            credited=False,
            approximate=False,
            reason=reason,
            epoch=None,
            seq=None,
            catalog=None,
            catalog_source=None,
            hash_scheme="",
            residency={},
            lag_ms=None,
            gaps=0,
            recovery=Recovery(),
            last_event_age_s=None,
            source=given.source,
            draining=given.drains,
            closed=reason,
            role=given.role.value,
            handover=given.handover.value,
            engine=given.engine or DEFAULT_ENGINE,
        )
