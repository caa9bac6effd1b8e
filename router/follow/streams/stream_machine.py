# SPDX-License-Identifier: Apache-2.0
"""The state machine of following one worker. Pure and synchronous.

The shell (`follower.py`, `event_source.py`) reports each event, and `step` returns the next phase and the action
that the shell must take. The phase also decides which knowledge is shown: in ELSEWHERE the state that the worker's
follower published, in every other phase what this process knows (`stream_view.py`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

import msgspec

from kvrouter.events.patch.messages import requests_endpoint
from kvrouter.router.model.workers.registration import NO_PATCH, Registration


class Phase(StrEnum):
    """The phase of following one worker in this process."""

    # This process has no lease, and nothing in memory that a lease could continue. It shows the state from Redis.
    WAITING = "waiting"
    # Another process follows the worker.
    ELSEWHERE = "elsewhere"
    # This process leads. It is not decided yet which of the two streams is followed.
    LOOKING = "looking"
    # This process leads, and reads the engine's built-in event topic, not the reports of the engine patch.
    STOCK = "stock"
    # This process leads, and reads the patch's reports.
    REPORTS = "reports"
    # This process leads a worker that has no stream.
    UNFED = "unfed"
    # The lease ended. The blocks in memory are whole, and are continued if no other router committed meanwhile.
    PAUSED = "paused"


LEADING = frozenset({Phase.LOOKING, Phase.STOCK, Phase.REPORTS, Phase.UNFED})


class Event(StrEnum):
    """An event that moves the following of one worker."""

    # Another process has the lease, or should have it.
    LEASE_ELSEWHERE = "lease_elsewhere"
    # This process took the lease, and no other process had it since this one did.
    LEASE_REGAINED = "lease_regained"
    # This process took the lease, and others may have committed meanwhile.
    LEASE_TAKEN = "lease_taken"
    # Mirror and memory are ready for the next commit, and no batch of the engine's own topic is known.
    LEAD_BEGUN = "lead_begun"
    # The same, and the engine's own topic can be continued after a known batch.
    LEAD_RESUMED = "lead_resumed"
    PATCH_ANSWERED = "patch_answered"
    PATCH_SILENT = "patch_silent"
    # The other of the two streams should be followed.
    SOURCE_CHANGED = "source_changed"
    # This process no longer has the lease.
    HOLD_ENDED = "hold_ended"
    # A bug in the router: the data in memory may be anything.
    DEFECT = "defect"


class Action(StrEnum):
    """An action that the shell must take."""

    NOTHING = "nothing"
    # Forget what this process learned, and show the state that the process that follows the worker publishes.
    SHOW_OTHERS = "show_others"
    # Lead with the blocks in memory.
    CONTINUE = "continue"
    # Lead with the blocks in Redis.
    REBUILD = "rebuild"
    # Find out whether the engine has the patch.
    GREET = "greet"
    FOLLOW_STOCK = "follow_stock"
    FOLLOW_REPORTS = "follow_reports"
    # Keep the lease without reading a stream, because there is none.
    HOLD = "hold"
    # Give the lease up, for the reason in `Endpoints.silence`.
    GIVE_UP = "give_up"
    # Keep the blocks in memory, as doubtful.
    PAUSE = "pause"


class Endpoints(msgspec.Struct, frozen=True):
    """The addresses of one worker's streams."""

    # The engine's own topic, None if it has none.
    events: str | None
    # The endpoint at which the engine's patch answers if there is one, None if no patch is possible.
    patch: str | None
    # The public key that the patch must prove, None if it need not.
    key: str | None

    @classmethod
    def of(cls, registration: Registration) -> Endpoints:
        """Return the endpoints of a registration; an unnamed patch endpoint is derived from that of the events."""
        patch, events = registration.patch, registration.events
        if patch == NO_PATCH:
            patch = None
        elif not patch and events is not None:
            patch = requests_endpoint(events)
        return cls(events, patch or None, registration.patch_key)

    @property
    def are_none(self) -> bool:
        """Whether the worker has no stream at all."""
        return self.events is None and self.patch is None

    @property
    def has_stock(self) -> bool:
        """Whether the engine's own topic may be followed in place of the patch.

        It may not if a key must be proven.
        """
        return self.events is not None and self.key is None

    @property
    def silence(self) -> str:
        """Why no stream can be followed if the patch does not answer."""
        if self.key is None:
            return f"nothing answers at {self.patch}, and there is no other event endpoint"
        # libzmq does not report which of these causes it is.
        return (
            f"no engine patch at {self.patch} proves the patch_key of this worker: the key is another engine's, the engine "
            "has no KVROUTER_PATCH_CURVE_KEY, or it does not run"
        )

    def refusal(self, public: str | None) -> str:
        """Return why no stream can be followed if the patch does not admit this router.

        Args:
            public: The public key that this router shows, or None if it shows another one at each connection.
        """
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
    """Return the next phase and the shell's action. Raises RuntimeError if the event is impossible in this phase."""
    next_step = _step_leading(phase, event, endpoints) if phase in LEADING else _step_idle(phase, event, endpoints)
    if next_step is None:
        raise RuntimeError(f"{event.value} cannot come while the following is {phase.value}")
    return next_step


def _step_idle(phase: Phase, event: Event, endpoints: Endpoints) -> Step | None:
    # The phase in which the blocks in memory can no longer be continued. Until the lead begins, the state that others
    # wrote is shown.
    spent = Phase.WAITING if phase is Phase.PAUSED else phase
    match event:
        case Event.LEASE_ELSEWHERE:
            return Phase.ELSEWHERE, Action.SHOW_OTHERS
        case Event.LEASE_REGAINED if phase is Phase.PAUSED:
            return phase, Action.CONTINUE
        case Event.LEASE_REGAINED | Event.LEASE_TAKEN:
            return spent, Action.REBUILD
        case Event.LEAD_RESUMED if endpoints.has_stock:
            # Follow the topic at once, because the look for the patch runs beside it.
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
            # Without the proof of the key, the engine's own topic is not followed either, as anybody could send it in
            # the engine's place.
            if endpoints.key is not None:
                return phase, Action.GIVE_UP
            if endpoints.events is not None:
                return Phase.STOCK, Action.FOLLOW_STOCK
            return (Phase.UNFED, Action.HOLD) if endpoints.patch is None else (phase, Action.GIVE_UP)
    return None
