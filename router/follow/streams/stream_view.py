# SPDX-License-Identifier: Apache-2.0
"""The state of one worker as the matcher sees it, whether the worker is credited, and why. Pure.

A worker earns no credit while proof is missing in this process: its registration may not be followed or is
contradicted, its image is not whole, its log or its follower is not heard, or doubt lasts too long.
"""

from __future__ import annotations

import math

import msgspec

from kvrouter.contract.worker_status import EngineCache
from kvrouter.router.follow.streams.lease import ELSEWHERE
from kvrouter.router.follow.streams.offload_watch import OffloadWatch
from kvrouter.router.follow.streams.stream_machine import Phase
from kvrouter.router.model.workers.stream_state import CREDITED, SHOWN, StreamState, credited

NO_FOLLOWER_YET = "no other router has been heard yet that follows this worker"
IMAGE_UNCONFIRMED = "the router that follows this worker has not confirmed yet what was loaded from Redis"


class Facts(msgspec.Struct):
    """Everything that is known of a worker except its events; `WorkerState` owns and changes it.

    A problem is a sentence. Empty or None means that there is none.
    """

    # Why the worker may not be followed.
    refusal: str | None = None
    # Why the worker's events may come from another engine.
    contradiction: str = ""
    # Why the mirror lacks the worker's blocks that Redis holds.
    image_problem: str = ""
    # Whether the worker's image was loaded from Redis, and its log is read from there on.
    log_loaded: bool = False
    # Whether the store answers when the log is read further.
    log_heard: bool = True
    # Why the router that follows the worker does not vouch for the state that is shown here.
    follower_problem: str | None = NO_FOLLOWER_YET
    # Why this process last lost the lease.
    hold_problem: str | None = None
    # Why the engine's patch has not proven its key. It stays while the patch is greeted again.
    key_problem: str | None = None
    # Why the store takes no commits.
    store_problem: str | None = None
    # Whether doubt has lasted for longer than it is credited.
    overdue: bool = False
    # Whether no other rank of the worker id is registered.
    alone: bool = True
    # The ranks of the engine's cores.
    engine_ranks: tuple[int, ...] = ()
    # When the engine's process started, None if it is unknown.
    engine_start_s: float | None = None
    # The next two fields are read from the metrics page of the engine's present process.
    offload: OffloadWatch = msgspec.field(default_factory=OffloadWatch)
    cache: EngineCache = EngineCache()

    def forget_process(self) -> None:
        """Drop the facts from the metrics page of a process that has ended."""
        self.offload, self.cache = OffloadWatch(), EngineCache()


class Position(msgspec.Struct, frozen=True):
    """The position up to which this process has read the log entries of a worker's follower.

    A heartbeat of the follower vouches only for a position. It proves nothing about a state that another router wrote,
    or about entries that were not read.
    """

    # The number of the lease under which the shown state was written; 0 if none was written.
    lease: int = 0
    # The number of the last log entry that was applied.
    commits: int = 0
    # When the first log entry of this lease was read, by this process's clock, unless it was in a backlog.
    since_s: float = -math.inf
    # The token of the router that wrote it, "" if it is not known.
    writer: str = ""


class Word(msgspec.Struct, frozen=True):
    """The state of a worker as its follower published it."""

    state: StreamState
    reason: str
    credited: bool = True
    # Why the published values cannot be interpreted, or "" if they can.
    problem: str = ""


class Credit(msgspec.Struct, frozen=True):
    """Whether a worker is credited, and the reason that is shown with its state."""

    credited: bool
    reason: str


def shown_state(phase: Phase, facts: Facts, word: Word) -> StreamState:
    """Return the state to show, which is the published state unless facts of this process lower it."""
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
    """Return whether a worker is credited, and why.

    Args:
        phase: The phase of following the worker.
        facts: Everything that is known of the worker except its events.
        word: The state that the worker's follower published.
        state: The result of `shown_state`.
        suspect_credit_s: How long a doubtful worker keeps its credit.
    """
    is_credited = credited(state, facts.overdue) and word.credited
    reason = _reason(phase, facts, word, state)
    if state is StreamState.SUSPECT and not is_credited:
        reason += f"; no credit after {suspect_credit_s:g} s without proof"
    elif state in CREDITED and not is_credited:
        reason += "; the router that follows it gives it no credit"
    return Credit(is_credited, reason)


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
    """Return why the state that the worker's follower wrote cannot be shown unchanged, or None if it can."""
    if not facts.log_loaded:
        return "what other router processes learned of this worker is being loaded from Redis"
    if not facts.log_heard:
        return "another router process follows this worker, and the store does not show what it learns"
    return facts.follower_problem
