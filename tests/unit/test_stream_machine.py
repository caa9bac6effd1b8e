# SPDX-License-Identifier: Apache-2.0
"""Rules for following one worker, as tables.

The first table gives phase and action by phase and event; the second gives state, credit and reason by phase, facts and
word.
"""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.follow.streams.lease import ELSEWHERE
from kvrouter.router.follow.streams.stream_machine import Action, Endpoints, Event, Phase, step
from kvrouter.router.follow.streams.stream_view import NO_FOLLOWER_YET, Facts, Word, credit, shown_state
from kvrouter.router.model.workers.registration import NO_PATCH, Registration
from kvrouter.router.model.workers.stream_state import CREDITED, StreamState

BOTH = Endpoints("tcp://e:1", "tcp://e:2", None)
STOCK_ONLY = Endpoints("tcp://e:1", None, None)
PATCH_ONLY = Endpoints(None, "tcp://e:2", None)
PROVEN = Endpoints("tcp://e:1", "tcp://e:2", "key")
NONE = Endpoints(None, None, None)

IDLE = (Phase.WAITING, Phase.ELSEWHERE, Phase.PAUSED)
LEADING = (Phase.LOOKING, Phase.STOCK, Phase.REPORTS, Phase.UNFED)

# Phase x event -> phase, action, with both endpoints and no key. An event that is missing here cannot come in that
# phase.
STEPS = {
    **{(phase, Event.LEASE_ELSEWHERE): (Phase.ELSEWHERE, Action.SHOW_OTHERS) for phase in IDLE},
    (Phase.WAITING, Event.LEASE_REGAINED): (Phase.WAITING, Action.REBUILD),
    (Phase.ELSEWHERE, Event.LEASE_REGAINED): (Phase.ELSEWHERE, Action.REBUILD),
    (Phase.PAUSED, Event.LEASE_REGAINED): (Phase.PAUSED, Action.CONTINUE),
    (Phase.WAITING, Event.LEASE_TAKEN): (Phase.WAITING, Action.REBUILD),
    (Phase.ELSEWHERE, Event.LEASE_TAKEN): (Phase.ELSEWHERE, Action.REBUILD),
    (Phase.PAUSED, Event.LEASE_TAKEN): (Phase.WAITING, Action.REBUILD),
    **{(phase, Event.LEAD_BEGUN): (Phase.LOOKING, Action.GREET) for phase in IDLE},
    **{(phase, Event.LEAD_RESUMED): (Phase.STOCK, Action.FOLLOW_STOCK) for phase in IDLE},
    (Phase.LOOKING, Event.PATCH_ANSWERED): (Phase.REPORTS, Action.FOLLOW_REPORTS),
    (Phase.LOOKING, Event.PATCH_SILENT): (Phase.STOCK, Action.FOLLOW_STOCK),
    (Phase.STOCK, Event.SOURCE_CHANGED): (Phase.LOOKING, Action.GREET),
    (Phase.REPORTS, Event.SOURCE_CHANGED): (Phase.LOOKING, Action.GREET),
    **{(phase, Event.HOLD_ENDED): (Phase.PAUSED, Action.PAUSE) for phase in LEADING},
    **{(phase, Event.HOLD_ENDED): (phase, Action.NOTHING) for phase in IDLE},
    **{(phase, Event.DEFECT): (Phase.WAITING, Action.NOTHING) for phase in (*LEADING, Phase.WAITING, Phase.PAUSED)},
    (Phase.ELSEWHERE, Event.DEFECT): (Phase.ELSEWHERE, Action.NOTHING),
}


@pytest.mark.parametrize(("phase", "event"), list(itertools.product(Phase, Event)))
def test_each_event_leads_to_the_phase_of_the_table(phase: Phase, event: Event) -> None:
    if (phase, event) in STEPS:
        assert step(phase, event, BOTH) == STEPS[phase, event]
    else:
        with pytest.raises(RuntimeError, match="cannot come"):
            step(phase, event, BOTH)


@pytest.mark.parametrize(
    ("event", "endpoints", "phase", "action"),
    [
        (Event.PATCH_SILENT, STOCK_ONLY, Phase.STOCK, Action.FOLLOW_STOCK),
        (Event.PATCH_SILENT, PATCH_ONLY, Phase.LOOKING, Action.GIVE_UP),
        (Event.PATCH_SILENT, PROVEN, Phase.LOOKING, Action.GIVE_UP),
        (Event.PATCH_SILENT, NONE, Phase.UNFED, Action.HOLD),
        (Event.LEAD_RESUMED, STOCK_ONLY, Phase.STOCK, Action.FOLLOW_STOCK),
        (Event.LEAD_RESUMED, PATCH_ONLY, Phase.LOOKING, Action.GREET),
        (Event.LEAD_RESUMED, PROVEN, Phase.LOOKING, Action.GREET),
        (Event.LEAD_RESUMED, NONE, Phase.LOOKING, Action.GREET),
    ],
)
def test_endpoints_decide_what_is_followed(event: Event, endpoints: Endpoints, phase: Phase, action: Action) -> None:
    from_phase = Phase.LOOKING if event is Event.PATCH_SILENT else Phase.WAITING
    assert step(from_phase, event, endpoints) == (phase, action)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, NONE),
        ({"events": "tcp://e:1", "patch": NO_PATCH}, STOCK_ONLY),
        ({"patch": "tcp://e:2"}, PATCH_ONLY),
        ({"events": "tcp://e:1", "patch": "tcp://e:2", "patch_key": "key"}, PROVEN),
    ],
)
def test_endpoints_come_from_the_registration(fields: dict[str, Any], expected: Endpoints) -> None:
    assert Endpoints.of(Registration(WorkerKey("m", "w"), **fields)) == expected


def test_the_patch_of_an_engine_is_looked_for_beside_its_events() -> None:
    endpoints = Endpoints.of(Registration(WorkerKey("m", "w"), events="tcp://e:5557"))
    assert (
        endpoints.patch is not None and endpoints.patch.startswith("tcp://e:") and endpoints.patch != endpoints.events
    )


LIVE, SUSPECT, DOWN = StreamState.LIVE, StreamState.SUSPECT, StreamState.DOWN
RESYNCING, MISMATCHED = StreamState.RESYNCING, StreamState.MISMATCHED
CONNECTING, UNHASHABLE = StreamState.CONNECTING, StreamState.UNHASHABLE
ELSE, OWN = Phase.ELSEWHERE, Phase.STOCK
# Another router follows the worker, and is heard.
HEARD = {"log_loaded": True, "follower_problem": None}
OVERDUE = "; no credit after 3 s without proof"

CREDITS = {
    "our own word": (OWN, {}, Word(LIVE, ""), LIVE, True, ""),
    "nothing heard of others matters while we lead": (OWN, {"log_heard": False}, Word(LIVE, ""), LIVE, True, ""),
    "our own doubt": (OWN, {}, Word(SUSPECT, "cut"), SUSPECT, True, "cut"),
    "our own doubt, too long": (OWN, {"overdue": True}, Word(SUSPECT, "cut"), SUSPECT, False, "cut" + OVERDUE),
    "batches are missing": (OWN, {}, Word(RESYNCING, "gap"), RESYNCING, False, "gap"),
    "no scheme": (OWN, {}, Word(UNHASHABLE, "odd"), UNHASHABLE, False, "odd"),
    "refused": (OWN, {"refusal": "host", "contradiction": "x"}, Word(LIVE, ""), DOWN, False, "host"),
    "contradicted": (OWN, {"contradiction": "its events are another's"}, Word(LIVE, "r"), MISMATCHED, False,
                     "its events are another's"),
    "contradicted, and gone": (OWN, {"contradiction": "x"}, Word(DOWN, "gone"), DOWN, False, "gone"),
    "image lost": (OWN, {"image_problem": "not loaded"}, Word(LIVE, "r"), RESYNCING, False, "not loaded"),
    "image lost, not credited anyway": (OWN, {"image_problem": "not loaded"}, Word(DOWN, "gone"), DOWN, False,
                                        "not loaded"),
    "store away": (OWN, {"store_problem": "refused"}, Word(LIVE, "r"), LIVE, True,
                   "Redis takes no commits (refused): other routers do not learn what changes here; r"),
    "hold ended": (Phase.PAUSED, {"hold_problem": "lost", "key_problem": "key"}, Word(SUSPECT, "r"), SUSPECT, True,
                   "lost"),
    "key owed": (Phase.LOOKING, {"key_problem": "key"}, Word(SUSPECT, "r"), SUSPECT, True, "key"),
    "before the first lease": (Phase.WAITING, {}, Word(SUSPECT, "restored"), SUSPECT, True, "restored"),
    "others, heard": (ELSE, HEARD, Word(LIVE, ""), LIVE, True, ELSEWHERE),
    "others, with a reason": (ELSE, HEARD, Word(LIVE, "r"), LIVE, True, "r"),
    "others, not loaded": (ELSE, HEARD | {"log_loaded": False}, Word(LIVE, ""), SUSPECT, True,
                           "what other router processes learned of this worker is being loaded from Redis"),
    "others, log not heard": (ELSE, HEARD | {"log_heard": False}, Word(LIVE, ""), SUSPECT, True,
                              "another router process follows this worker, and the store does not show what it learns"),
    "others, none heard yet": (ELSE, {"log_loaded": True}, Word(LIVE, ""), SUSPECT, True, NO_FOLLOWER_YET),
    "others, silent": (ELSE, HEARD | {"follower_problem": "silent"}, Word(LIVE, ""), SUSPECT, True, "silent"),
    "others, silent, answered by hash": (ELSE, HEARD | {"follower_problem": "silent"},
                                         Word(UNHASHABLE, "", credited=False), SUSPECT, False, "silent" + OVERDUE),
    "others, silent too long": (ELSE, HEARD | {"follower_problem": "silent", "overdue": True}, Word(LIVE, ""), SUSPECT,
                                False, "silent" + OVERDUE),
    "others, silent, not credited anyway": (ELSE, HEARD | {"follower_problem": "silent"}, Word(RESYNCING, ""),
                                            RESYNCING, False, "silent"),
    "others give no credit": (ELSE, HEARD, Word(LIVE, "r", credited=False), LIVE, False,
                              "r; the router that follows it gives it no credit"),
    "others, unreadable": (ELSE, HEARD, Word(LIVE, "r", problem="no such state"), RESYNCING, False, "no such state"),
    "others, never connected": (ELSE, HEARD, Word(CONNECTING, "c"), CONNECTING, False, "c"),
}  # fmt: skip


@pytest.mark.parametrize(("phase", "facts", "word", "state", "credited", "reason"), CREDITS.values(), ids=list(CREDITS))
def test_each_phase_has_its_state_credit_and_reason(
    phase: Phase, facts: dict[str, Any], word: Word, state: StreamState, credited: bool, reason: str
) -> None:
    all_facts = Facts(**facts)
    shown = shown_state(phase, all_facts, word)
    shown_credit = credit(phase, all_facts, word, shown, 3.0)
    assert (shown, shown_credit.credited, shown_credit.reason) == (state, credited, reason)


@pytest.mark.parametrize(("phase", "state"), list(itertools.product(Phase, StreamState)))
def test_no_problem_earns_credit(phase: Phase, state: StreamState) -> None:
    """Credit a worker with a problem only if the same worker without the problem is credited."""
    word = Word(state, "", credited=state in CREDITED)
    base = Facts(log_loaded=True, follower_problem=None)
    best = credit(phase, base, word, shown_state(phase, base, word), 3.0).credited
    wrong = {"refusal": "x", "contradiction": "x", "image_problem": "x", "log_loaded": False, "log_heard": False}
    wrong |= {"follower_problem": "x", "hold_problem": "x", "key_problem": "x", "store_problem": "x", "overdue": True}
    for name, value in wrong.items():
        facts = msgspec.structs.replace(base, **{name: value})
        assert credit(phase, facts, word, shown_state(phase, facts, word), 3.0).credited <= best
