# SPDX-License-Identifier: Apache-2.0
"""Where the following of one worker stands, and what comes next. Pure and synchronous.

The shell (`worker_stream.py`, `source_switch.py`) says what happened; `step` says where the following stands from then
on, and what the shell is to do. Whose word is credited follows from the phase: in ELSEWHERE that of the router that
follows the worker, in every other phase what this process knows (`stream_view.py`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

import msgspec

from kvrouter.events.patch.messages import requests_endpoint
from kvrouter.router.model.workers.registration import NO_PATCH, Registration


class Phase(StrEnum):
    """Where the following of one worker stands in this process."""

    # No lease, and nothing in memory that a lease could continue: what was read from Redis is shown.
    WAITING = "waiting"
    # Another process follows it.
    ELSEWHERE = "elsewhere"
    # This process leads. Which of the two streams is followed is not decided yet.
    LOOKING = "looking"
    # This process leads, by the engine's own topic.
    STOCK = "stock"
    # This process leads, by the patch's reports.
    REPORTS = "reports"
    # This process leads a worker that has no stream.
    UNFED = "unfed"
    # The hold ended. The blocks in memory are whole, and are continued if no other router committed meanwhile.
    PAUSED = "paused"


LEADING = frozenset({Phase.LOOKING, Phase.STOCK, Phase.REPORTS, Phase.UNFED})


class Event(StrEnum):
    """What happened to the following."""

    # The lease is another process's, or should be.
    LEASE_ELSEWHERE = "lease_elsewhere"
    # The lease was taken, and nobody else had it since this process did.
    LEASE_REGAINED = "lease_regained"
    # The lease was taken, and others may have committed.
    LEASE_TAKEN = "lease_taken"
    # Mirror and memory stand where the next commit goes on; no batch of the engine's own topic is known.
    LEAD_BEGUN = "lead_begun"
    # The same, and the engine's own topic can be continued after a known batch.
    LEAD_RESUMED = "lead_resumed"
    PATCH_ANSWERED = "patch_answered"
    PATCH_SILENT = "patch_silent"
    # The other of the two streams is the one to follow.
    SOURCE_CHANGED = "source_changed"
    HOLD_ENDED = "hold_ended"
    # A defect of ours: what is in memory may be anything.
    DEFECT = "defect"


class Action(StrEnum):
    """What the shell is to do."""

    NOTHING = "nothing"
    # Forget what was learned here, and show what the router says that follows the worker.
    SHOW_OTHERS = "show_others"
    # Lead with what is in memory.
    CONTINUE = "continue"
    # Lead with what Redis holds.
    REBUILD = "rebuild"
    # Ask whether the engine has the patch.
    GREET = "greet"
    FOLLOW_STOCK = "follow_stock"
    FOLLOW_REPORTS = "follow_reports"
    # Hold the lease; there is nothing to read.
    HOLD = "hold"
    # End the hold, for `Endpoints.silence`.
    GIVE_UP = "give_up"
    # Keep what is held in memory, in doubt.
    PAUSE = "pause"


class Endpoints(msgspec.Struct, frozen=True):
    """Where one worker's streams are. patch: where the engine's patch answers, if it has one; key: what it must
    prove."""

    events: str | None
    patch: str | None
    key: str | None

    @classmethod
    def of(cls, registration: Registration) -> Endpoints:
        patch, events = registration.patch, registration.events
        if patch == NO_PATCH:
            patch = None
        elif not patch and events is not None:
            patch = requests_endpoint(events)
        return cls(events, patch or None, registration.patch_key)

    @property
    def are_none(self) -> bool:
        return self.events is None and self.patch is None

    @property
    def has_stock(self) -> bool:
        """Return whether the engine's own topic may be followed in place of the patch; it may not if a key must be
        proven."""
        return self.events is not None and self.key is None

    @property
    def silence(self) -> str:
        """Why nothing can be followed when the patch does not answer."""
        if self.key is None:
            return f"nothing answers at {self.patch}, and there is no other event endpoint"
        # libzmq does not say which of these it is.
        return (
            f"no engine patch at {self.patch} proves the patch_key of this worker: the key is another engine's, the engine "
            "has no KVROUTER_PATCH_CURVE_KEY, or it does not run"
        )

    def refusal(self, public: str | None) -> str:
        """Why nothing can be followed when the patch does not admit this router. public: the key that it shows; None:
        another one each time."""
        if public is None:
            return (
                f"the engine patch at {self.patch} lists the clients that it admits, and this router has no key of its own: "
                "set curve_client_key, and add its public key to the engine's KVROUTER_PATCH_CURVE_CLIENTS"
            )
        return (
            f"the engine patch at {self.patch} does not admit this router: add its public key {public} to the file of the "
            "engine's KVROUTER_PATCH_CURVE_CLIENTS"
        )


Step: TypeAlias = tuple[Phase, Action]


def step(phase: Phase, event: Event, endpoints: Endpoints) -> Step:
    """The next phase, and what to do. Raises RuntimeError where the event cannot come."""
    found = _step_leading(phase, event, endpoints) if phase in LEADING else _step_idle(phase, event, endpoints)
    if found is None:
        raise RuntimeError(f"{event.value} cannot come while the following is {phase.value}")
    return found


def _step_idle(phase: Phase, event: Event, endpoints: Endpoints) -> Step | None:
    # The blocks in memory are not continued after this; until the lead is taken, the state that others wrote is shown.
    spent = Phase.WAITING if phase is Phase.PAUSED else phase
    match event:
        case Event.LEASE_ELSEWHERE:
            return Phase.ELSEWHERE, Action.SHOW_OTHERS
        case Event.LEASE_REGAINED if phase is Phase.PAUSED:
            return phase, Action.CONTINUE
        case Event.LEASE_REGAINED | Event.LEASE_TAKEN:
            return spent, Action.REBUILD
        case Event.LEAD_RESUMED if endpoints.has_stock:
            # At once: the look for the patch goes on beside.
            return Phase.STOCK, Action.FOLLOW_STOCK
        case Event.LEAD_RESUMED | Event.LEAD_BEGUN:
            return Phase.LOOKING, Action.GREET
        case Event.HOLD_ENDED:
            return phase, Action.NOTHING
        case Event.DEFECT:
            return spent, Action.NOTHING
    return None


def _step_leading(phase: Phase, event: Event, endpoints: Endpoints) -> Step | None:
    match event:
        case Event.HOLD_ENDED:
            return Phase.PAUSED, Action.PAUSE
        case Event.DEFECT:
            return Phase.WAITING, Action.NOTHING
        case Event.SOURCE_CHANGED if phase in (Phase.STOCK, Phase.REPORTS):
            return Phase.LOOKING, Action.GREET
        case Event.PATCH_ANSWERED if phase is Phase.LOOKING:
            return Phase.REPORTS, Action.FOLLOW_REPORTS
        case Event.PATCH_SILENT if phase is Phase.LOOKING:
            # Without the proof of its key not the engine's own topic either, which anybody could send in its place.
            if endpoints.key is not None:
                return phase, Action.GIVE_UP
            if endpoints.events is not None:
                return Phase.STOCK, Action.FOLLOW_STOCK
            return (Phase.UNFED, Action.HOLD) if endpoints.patch is None else (phase, Action.GIVE_UP)
    return None
