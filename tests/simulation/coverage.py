# SPDX-License-Identifier: Apache-2.0
"""The states and transitions that the worlds of a search met, and those that they cannot meet, with the reasons.

The product does not know that it is observed: `Observer.watching` puts wrappers around functions of the product, by the
function and not by the name of the class that calls it. A wrapper adds no step and draws no random number, so a world
with and without it is the same.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.redis_client.errors import StoreError
from kvrouter.router.follow.streams import stream_machine
from kvrouter.router.follow.streams.stream_machine import Action, Endpoints, Event, Phase
from kvrouter.router.follow.streams.stream_metrics import LEASE_LOSSES
from kvrouter.router.index.store.leases import Leases
from kvrouter.router.model.workers.stream_state import StreamState
from tests.simulation.engine import Engine
from tests.simulation.router import Router
from tests.simulation.virtual_loop import PROCESS, Process

if TYPE_CHECKING:
    from kvrouter.router.model.workers.registration import Registration

# How often the search wants each pair of a fault and a state.
WANTED_PAIRS = 100
# The states of a router that has no phase yet.
NO_PROCESS, STARTING, UNKNOWN_WORKER = "no process", "starting", "worker unknown"
# A transition: the endpoints' shape, the phase and the event.
Transition = tuple[str, str, str]
# A kind of fault, and what it met.
Pair = tuple[str, str]

SHAPES = {
    "events": Endpoints("tcp://a:1", None, None),
    "events+patch": Endpoints("tcp://a:1", "tcp://a:2", None),
    "events+patch+key": Endpoints("tcp://a:1", "tcp://a:2", "key"),
    "patch": Endpoints(None, "tcp://a:2", None),
    "patch+key": Endpoints(None, "tcp://a:2", "key"),
    "none": Endpoints(None, None, None),
}

# The outcomes of a lease, each counted when it happens.
TAKEN = ("taken: free or this router's own", "taken: its router is dead", "taken: its router gave it up")
NOT_TAKEN = "not taken: its router lives"
RETURNED = ("given back", "not given back: another router has it", "not given back: the store does not answer")
NOTES = {
    "lease regained": "regained while following",
    "worker handed over": "handed over",
    "lease not confirmed": "in doubt: the store does not confirm it",
}
LOST = {how: f"lost: {how}" for how in LEASE_LOSSES}
LEASE_OUTCOMES = (*TAKEN, NOT_TAKEN, *RETURNED, *NOTES.values(), *LOST.values())


class Unmet(NamedTuple):
    """Something that no world can meet, and why. An empty field stands for any."""

    shape: str
    phase: str
    event: str
    reason: str

    def covers(self, transition: Transition) -> bool:
        """Return whether this explains that a transition is never met."""
        wanted = (self.shape, self.phase, self.event)
        return all(not want or want == met for want, met in zip(wanted, transition, strict=True))


_NO_STREAM = "every simulated engine has an event endpoint"
_NO_KEY = "no simulated registration has a patch_key"
_NO_PATCH = "the worker has no patch endpoint, so the router does not greet one"
UNMEETABLE = (
    Unmet("none", "", "", _NO_STREAM),
    Unmet("patch", "", "", _NO_STREAM),
    Unmet("patch+key", "", "", _NO_STREAM),
    Unmet("events+patch+key", "", "", _NO_KEY),
    Unmet("", Phase.UNFED, "", "only a worker without any stream is held unfed"),
    Unmet("events", Phase.REPORTS, "", _NO_PATCH),
    Unmet("events", Phase.LOOKING, Event.PATCH_ANSWERED, _NO_PATCH),
    Unmet("events", Phase.STOCK, Event.SOURCE_CHANGED, _NO_PATCH),
    Unmet("", "", Event.DEFECT, "it takes a defect of the router, which breaks the law of errors"),
    Unmet("", Phase.WAITING, Event.HOLD_ENDED, "a lease ends only in a phase that leads"),
    Unmet("", Phase.ELSEWHERE, Event.HOLD_ENDED, "a lease ends only in a phase that leads"),
    Unmet("", Phase.PAUSED, Event.HOLD_ENDED, "a lease ends only in a phase that leads"),
)


@dataclass
class Coverage:
    """The counts of one world, or of all worlds of a search."""

    transitions: Counter[Transition] = field(default_factory=Counter)
    lease: Counter[str] = field(default_factory=Counter)
    pairs: Counter[Pair] = field(default_factory=Counter)

    def add(self, other: Coverage) -> None:
        """Add the counts of a world."""
        self.transitions.update(other.transitions)
        self.lease.update(other.lease)
        self.pairs.update(other.pairs)


class Observer:
    """Counts what one world meets."""

    def __init__(self, engines: Sequence[Engine], routers: Sequence[Router]) -> None:
        self._engines, self._routers = engines, routers
        self.coverage = Coverage()
        # The phase of each worker in each process, by its stream's address.
        self._phases: dict[tuple[Process, str], Phase] = {}
        # Called after each step of a stream machine.
        self.on_step: Callable[[], object] = lambda: None
        # Called when a router goes on from its memory of a worker, with the name of the router and the worker.
        self.on_memory: Callable[[str, WorkerKey], object] = lambda router, worker: None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Count transitions and leases meanwhile."""
        replaced = [*_replace_everywhere(stream_machine.step, self._step), *self._watch_leases()]
        try:
            yield
        finally:
            for owner, name, original in replaced:
                setattr(owner, name, original)

    def _step(self, phase: Phase, event: Event, endpoints: Endpoints) -> tuple[Phase, Action]:
        following, action = _STEP(phase, event, endpoints)
        self.coverage.transitions[shape_of(endpoints), phase, event] += 1
        process = PROCESS.get()
        if process is not None:
            address = endpoints.events or endpoints.patch or ""
            self._phases[process, address] = following
            if action is Action.CONTINUE:
                self._continues(process.name, address)
        self.on_step()
        return following, action

    def _continues(self, router: str, address: str) -> None:
        for engine in self._engines:
            if address in (_address(engine.registration()), _address(engine.registration(is_moved=True))):
                self.on_memory(router, engine.worker)

    def _watch_leases(self) -> Iterable[tuple[object, str, object]]:
        counts, take, give_back = self.coverage.lease, Leases.take, Leases.release

        async def taken(leases: Leases, worker: Any, token: str, **options: Any) -> Any:
            is_given_up = options.get("is_given_up", lambda value: False)
            answers: list[bool] = []

            def ask(value: bytes) -> bool:
                answers.append(is_given_up(value))
                return answers[-1]

            lease = await take(leases, worker, token, **options | {"is_given_up": ask})
            if lease is None:
                counts[NOT_TAKEN] += 1
            else:
                counts[TAKEN[2 if any(answers) else 1 if answers else 0]] += 1
            return lease

        async def given_back(leases: Leases, worker: Any, lease: Any) -> bool:
            try:
                is_ours = await give_back(leases, worker, lease)
            except StoreError:
                counts[RETURNED[2]] += 1
                raise
            counts[RETURNED[0 if is_ours else 1]] += 1
            return is_ours

        Leases.take, Leases.release = taken, given_back  # type: ignore[assignment, method-assign]
        return (Leases, "take", take), (Leases, "release", give_back)

    # -- pairs of a fault and a state

    def fault_begins(self, kind: str, *names: str) -> None:
        """Count a fault of hosts with these names with each phase and state that it meets."""
        self.coverage.pairs.update((kind, state) for state in self.met(*names))

    def met(self, *names: str) -> set[str]:
        """Return the phases and states that a fault of hosts with these names meets now."""
        routers = [router for router in self._routers if router.name in names] or self._routers
        engines = [engine for engine in self._engines if engine.host.name in names or engine.name in names]
        return {
            state for router in routers for engine in engines or self._engines for state in self._states(router, engine)
        }

    def _states(self, router: Router, engine: Engine) -> Iterator[str]:
        process, core = router.process, router.core
        if process is None or core is None:
            yield f"phase {NO_PROCESS if process is None else STARTING}"
            return
        follower = core.registry.followers.get(engine.worker)
        if follower is None:
            yield f"phase {UNKNOWN_WORKER}"
            return
        yield f"phase {self._phases.get((process, _address(follower.state.registration)), Phase.WAITING).value}"
        yield f"shown {follower.state.view.state.value}"

    # -- at the end

    def end(self, history: Iterable[str]) -> Coverage:
        """Count what the history and the metrics of all processes say, and return everything that was met."""
        counts = self.coverage.lease
        for line in history:
            for text, outcome in NOTES.items():
                if text in line:
                    counts[outcome] += 1
        for router in self._routers:
            for registry in router.registries.values():
                for how, outcome in LOST.items():
                    counts[outcome] += int(registry.get_sample_value("kvrouter_leases_lost_total", {"how": how}) or 0)
        return self.coverage


_STEP = stream_machine.step


def _replace_everywhere(original: Callable[..., Any], wrapper: Callable[..., Any]) -> list[tuple[object, str, object]]:
    """Replace a function in each module of the product that has it; return what to set back."""
    replaced: list[tuple[object, str, object]] = []
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith("kvrouter."):
            continue
        for name, value in list(vars(module).items()):
            if value is original:
                setattr(module, name, wrapper)
                replaced.append((module, name, original))
    return replaced


def shape_of(endpoints: Endpoints) -> str:
    """Return the name of the shape of a worker's endpoints."""
    parts = {"events": endpoints.events, "patch": endpoints.patch, "key": endpoints.key}
    return "+".join(name for name, value in parts.items() if value is not None) or "none"


def _address(registration: Registration) -> str:
    endpoints = Endpoints.of(registration)
    return endpoints.events or endpoints.patch or ""


def all_transitions() -> dict[Transition, tuple[Phase, Action]]:
    """Return each transition that the machine allows, with the phase and the action that it leads to."""
    transitions: dict[Transition, tuple[Phase, Action]] = {}
    for shape, endpoints in SHAPES.items():
        for phase in Phase:
            for event in Event:
                with contextlib.suppress(RuntimeError):
                    transitions[shape, phase, event] = _STEP(phase, event, endpoints)
    return transitions


def unmet_reason(transition: Transition) -> str:
    """Return why no world meets a transition, or "" if one should."""
    return next((unmet.reason for unmet in UNMEETABLE if unmet.covers(transition)), "")


# The states of a pair that no world can meet, and why.
UNMEETABLE_STATES = {
    f"phase {Phase.UNFED.value}": "only a worker without any stream is held unfed",
    f"shown {StreamState.MISMATCHED.value}": "no simulated registration contradicts its engine",
}
PAIRED_STATES = (
    *(f"phase {name}" for name in (NO_PROCESS, STARTING, UNKNOWN_WORKER, *Phase)),
    *(f"shown {state.value}" for state in StreamState),
)


def report(coverage: Coverage, kinds: Iterable[str]) -> Iterator[str]:
    """Yield the lines of the table of what was met and what was not."""
    transitions = all_transitions()
    yield f"transitions of the stream machine: {len(coverage.transitions)} met of {len(transitions)}"
    for transition, (phase, action) in transitions.items():
        count, reason = coverage.transitions[transition], unmet_reason(transition)
        shape, before, event = transition
        line = f"  {shape:17} {before:9} {event:15} -> {phase.value:9} {action.value:14}"
        if count or not reason:
            yield f"{line} {count or 'NEVER'}{' although: ' + reason if count and reason else ''}"
    reasons = Counter(
        reason
        for transition in transitions
        if not coverage.transitions[transition] and (reason := unmet_reason(transition))
    )
    for reason, number in reasons.items():
        yield f"  {number} cannot be met: {reason}"
    yield "outcomes of leases:"
    for outcome in LEASE_OUTCOMES:
        yield f"  {outcome:45} {coverage.lease[outcome] or 'NEVER'}"
    yield f"pairs of a fault and a state that were met less than {WANTED_PAIRS} times:"
    total = 0
    for kind in kinds:
        few = {
            state: coverage.pairs[kind, state]
            for state in PAIRED_STATES
            if state not in UNMEETABLE_STATES and coverage.pairs[kind, state] < WANTED_PAIRS
        }
        total += len(few)
        if few:
            yield f"  {kind}: {', '.join(f'{state} {count}' for state, count in few.items())}"
    yield f"  {total} in all"
    for state, reason in UNMEETABLE_STATES.items():
        yield f"  with {state}: cannot be met, as {reason}"


def as_json(coverage: Coverage, kinds: Iterable[str]) -> dict[str, Any]:
    """Return the same as values for JSON."""
    return {
        "transitions": [
            {"endpoints": shape, "phase": phase, "event": event, "count": coverage.transitions[shape, phase, event],
             "cannot": unmet_reason((shape, phase, event))}
            for shape, phase, event in all_transitions()
        ],
        "leases": {outcome: coverage.lease[outcome] for outcome in LEASE_OUTCOMES},
        "pairs": [
            {"fault": kind, "state": state, "count": coverage.pairs[kind, state],
             "cannot": UNMEETABLE_STATES.get(state, "")}
            for kind in kinds
            for state in PAIRED_STATES
        ],
    }  # fmt: skip
