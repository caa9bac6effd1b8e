# SPDX-License-Identifier: Apache-2.0
"""The state of one worker as the matcher may know it, whether it is credited, and why. Pure.

A worker earns no credit while proof is missing here: its registration may not be followed or is contradicted, its image
is not whole, its log or its follower is not heard, or doubt lasts too long.
"""

from __future__ import annotations

import math

import msgspec

from kvrouter.router.follow.streams.cpu_tier_watch import CpuTierWatch
from kvrouter.router.follow.streams.disk_watch import DiskWatch
from kvrouter.router.follow.streams.lease_holder import ELSEWHERE
from kvrouter.router.follow.streams.stream_machine import Phase
from kvrouter.router.index.ingest.engine_liveness import EngineLiveness
from kvrouter.router.model.workers.engine_cache import EngineCache
from kvrouter.router.model.workers.stream_state import CREDITED, SHOWN, StreamState, credited

NO_FOLLOWER_YET = "no other router has been heard yet that follows this worker"


class Facts(msgspec.Struct):
    """Everything known of a worker except its events. A problem is a sentence; empty or None: there is none."""

    # Why the worker may not be followed.
    refusal: str | None = None
    # Why its events may be another engine's.
    contradiction: str = ""
    # Why the mirror lacks what Redis holds of the worker.
    image_problem: str = ""
    # Whether the image in Redis was read, and the log from there on.
    log_loaded: bool = False
    # Whether the store shows the entries that come after.
    log_heard: bool = True
    # Why the router that follows the worker does not vouch for the state that is shown of it.
    follower_problem: str | None = NO_FOLLOWER_YET
    # Why the last hold of the lease ended.
    hold_problem: str | None = None
    # The missing proof of its engine patch's key; it stays while the patch is greeted again.
    key_problem: str | None = None
    # Why the store takes no commits.
    store_problem: str | None = None
    # Whether doubt has lasted for longer than it is credited.
    overdue: bool = False
    # Whether no other rank is registered beside it.
    alone: bool = True
    # The ranks of its engine's cores.
    engine_ranks: tuple[int, ...] = ()
    # Whether it is no longer to be followed.
    stopping: bool = False
    # The three are read from the metrics page of the engine's present process.
    disk: DiskWatch = msgspec.field(default_factory=DiskWatch)
    cpu_tier: CpuTierWatch = msgspec.field(default_factory=CpuTierWatch)
    cache: EngineCache = EngineCache()
    vitals: EngineLiveness = msgspec.field(default_factory=EngineLiveness)

    def forget_process(self) -> None:
        """Drop the facts from the metrics page of a process that has ended."""
        self.disk, self.cpu_tier, self.cache = DiskWatch(), CpuTierWatch(), EngineCache()


class Position(msgspec.Struct, frozen=True):
    """How far this process has read the entries that a worker's follower writes.

    A heartbeat of the follower vouches only for a position: it says nothing about a state that another router wrote, or
    about entries that were not read."""

    # The number of the lease under which the shown state was written; 0: none was.
    lease: int = 0
    # The number of the last log entry that was applied.
    commits: int = 0
    # When the first log entry of this lease was read, by this process's clock: it shows that its writer lived.
    since_s: float = -math.inf


class Word(msgspec.Struct, frozen=True):
    """The state of a worker as its follower published it."""

    state: StreamState
    reason: str
    credited: bool = True
    # The part of it that cannot be read; empty: all can.
    problem: str = ""


class Credit(msgspec.Struct, frozen=True):
    """What is shown of the worker."""

    state: StreamState
    credited: bool
    reason: str


def shown_state(phase: Phase, facts: Facts, word: Word) -> StreamState:
    """Return the published state as it is shown here, which facts of this process may lower."""
    state = word.state
    if facts.refusal:
        return StreamState.DOWN
    if phase is Phase.ELSEWHERE and state in SHOWN and _hearing_problem(facts) is not None:
        state = StreamState.SUSPECT
    if facts.contradiction and state is not StreamState.DOWN:
        state = StreamState.MISMATCHED
    if (facts.image_problem or word.problem) and state in CREDITED:
        state = StreamState.RESYNCING
    return state


def credit(phase: Phase, facts: Facts, word: Word, state: StreamState, suspect_credit_s: float) -> Credit:
    """Return whether a worker in `shown_state` is credited, and why. suspect_credit_s: for how long a doubtful worker
    keeps its credit."""
    is_credited = credited(state, facts.overdue) and word.credited
    reason = _reason(phase, facts, word, state)
    if state is StreamState.SUSPECT and not is_credited:
        reason += f"; no credit after {suspect_credit_s:g} s without proof"
    elif state in CREDITED and not is_credited:
        reason += "; the router that follows it gives it no credit"
    return Credit(state, is_credited, reason)


def _reason(phase: Phase, facts: Facts, word: Word, state: StreamState) -> str:
    if facts.refusal:
        return facts.refusal
    if state is StreamState.MISMATCHED and facts.contradiction:
        return facts.contradiction
    if problem := facts.image_problem or word.problem:
        return problem
    if phase is Phase.ELSEWHERE:
        return facts.hold_problem or _hearing_problem(facts) or word.reason or ELSEWHERE
    if facts.store_problem is not None:
        unwritten = f"Redis takes no commits ({facts.store_problem}): other routers do not learn what changes here"
        return f"{unwritten}; {word.reason}" if word.reason else unwritten
    return facts.hold_problem or facts.key_problem or word.reason


def _hearing_problem(facts: Facts) -> str | None:
    """Return why the state that others wrote of the worker cannot be shown unchanged, or None if it can."""
    if not facts.log_loaded:
        return "what other router processes learned of this worker is being loaded from Redis"
    if not facts.log_heard:
        return "another router process follows this worker, and the store does not show what it learns"
    return facts.follower_problem
