# SPDX-License-Identifier: Apache-2.0
"""A model of one worker whose mirror this process leads: nothing is credited of which the mirror lacks a change.

Random happenings come to the worker's real state. Its mirror is a set of blocks for each place. The law is checked
whenever a view is shown and after each happening.
"""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvrouter.contract.worker_status import EngineCache
from kvrouter.events.transport.progress import CaughtUp, FellBehind
from kvrouter.events.vllm.stream_items import Connected, Disconnected
from kvrouter.router.base.common.ids import Place, WorkerKey
from kvrouter.router.follow.streams.commits import Commits
from kvrouter.router.follow.streams.stream_machine import LEADING, Event
from kvrouter.router.follow.streams.worker_state import INCIDENT_SHOWN_S, WorkerState
from kvrouter.router.index.ingest.engine_liveness import (
    EngineBack,
    EngineLost,
    EnginePresent,
    EngineRestarted,
    VitalSign,
)
from kvrouter.router.index.ingest.net_changes import Hashes, ResidencyDelta
from kvrouter.router.index.store.commit import WorkerImage
from kvrouter.router.model.workers.registration import Registration
from tests.support.bare_services import bare_services
from tests.support.examples import examples
from tests.support.ingest_steps import REPLAY, batch, removed, stored

WORKER = WorkerKey("m", "w")
STEPS = 80
BLOCKS = 40


class Mirror:
    """The blocks of one worker that the matcher would credit."""

    def __init__(self) -> None:
        self.epoch = ""
        self.places: dict[Place, set[int]] = {}

    def begin_epoch(self, worker: WorkerKey, epoch: str) -> None:
        self.epoch, self.places = epoch, {}

    def load(self, worker: WorkerKey, epoch: str, places: Mapping[Place, Hashes]) -> None:
        self.epoch, self.places = epoch, {place: set(hashes.tolist()) for place, hashes in places.items()}

    def rename_epoch(self, worker: WorkerKey, epoch: str) -> None:
        self.epoch = epoch

    def change(self, worker: WorkerKey, changes: Sequence[ResidencyDelta]) -> None:
        for change in changes:
            blocks = self.places.setdefault(change.place, set())
            blocks -= set(change.removed.tolist())
            blocks |= set(change.added.tolist())


class World:
    """One worker's state, with random happenings from a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_s = 100.0
        self.mirror = Mirror()
        self.credited = 0
        services = dataclasses.replace(
            bare_services(lambda: self.now_s, view_changed=self._judge), mirror=cast(Any, self.mirror)
        )
        registration = Registration(WORKER, events="tcp://127.0.0.1:1", patch="tcp://127.0.0.1:3", replay=REPLAY)
        self.state = WorkerState(registration, services)
        self.commits = Commits(self.state, cast(Any, SimpleNamespace(number=1)), services)
        self._lead()
        self.happenings: list[Callable[[], object]] = [
            *[self._stream] * 10,
            *[self._commit] * 3,
            self._live,
            self._engine,
            self._follow,
            self._hold,
            self._others,
            self._judged,
            self._rewrite,
            self._pass_time,
        ]

    def run(self) -> None:
        for _ in range(STEPS):
            self.rng.choice(self.happenings)()
            self._judge(WORKER)
        self.state.on_stopped()

    def _judge(self, worker: WorkerKey) -> None:
        """Raise AssertionError if the worker is credited with anything but what it holds."""
        state = self.state
        if state.lead is None or not state.view.credited:
            return
        held = state.ingest.held
        assert not held.has_news, f"{state.view.state.value} while changes wait"
        blocks = {place: set(held.blocks.hashes(place).tolist()) for place in held.blocks.places}
        mirrored = {place: hashes for place, hashes in self.mirror.places.items() if hashes}
        assert (self.mirror.epoch, mirrored) == (
            held.epoch,
            {place: blocks[place] for place in blocks if blocks[place]},
        )
        self.credited += bool(mirrored)

    def _lead(self) -> None:
        self.state.step(self.rng.choice([Event.LEASE_TAKEN, Event.LEASE_REGAINED]))
        has_log = self.state.on_log_left()
        if self.rng.random() < 0.3:
            self.state.on_prepared(WorkerImage.empty(WORKER), {}, self.rng.choice(["", "it is cut off"]))
        self.state.on_mirror_taken(has_log=has_log)
        self.state.on_lead_begun()

    def _stream(self) -> None:
        """Let some items come, of which an internal error may stop the last ones."""
        items: list[Any] = []
        for _ in range(self.rng.randrange(1, 4)):
            seq, blocks = self.state.ingest.held.seq, self.rng.sample(range(BLOCKS), 3)
            gap = self.rng.random() < 0.1
            change = stored(blocks) if self.rng.random() < 0.6 else removed(blocks)
            items.append(batch((-1 if seq is None else seq) + len(items) + 1 + gap, change))
        if self.rng.random() < 0.2:
            items.insert(0, self.rng.choice([FellBehind(), Connected(), CaughtUp(), Disconnected()]))

        def apply(items: deque[Any], received_s: float) -> None:
            self.state.ingest.apply_next(items, received_s)
            if self.rng.random() < 0.02:
                raise ZeroDivisionError

        # Nothing waits in it: the clock stands, and the backlog has room.
        with pytest.raises((StopIteration, ZeroDivisionError)):
            self.commits.take_in(items, apply).send(None)

    def _live(self) -> None:
        self.state.on_stock_followed()
        for item in (FellBehind(), Connected(), CaughtUp()):
            self.state.ingest.apply(item, self.now_s)
        self.state.on_items(self.now_s)

    def _engine(self) -> None:
        signs: list[VitalSign] = [EngineLost("r"), EngineBack(), EngineRestarted("r"), EnginePresent()]
        self.state.on_life_sign(self.rng.choice(signs))
        self.state.on_metrics_page(self.rng.choice([None, 1.0, 2.0]), None, self.rng.choice([None, EngineCache()]))

    def _follow(self) -> None:
        if self.rng.random() < 0.5:
            self.state.on_reports_followed(self.rng.choice("ab"))
        else:
            self.state.on_stock_followed()

    def _hold(self) -> None:
        """Lose the lease, and take it again; another router may have it meanwhile."""
        assert self.state.phase in LEADING
        self.state.step(Event.HOLD_ENDED)
        self.state.on_paused("the hold ended")
        self._judge(WORKER)
        if self.rng.random() < 0.5:
            self.state.on_not_held("another router has it")
        if self.rng.random() < 0.5:
            self.state.step(Event.LEASE_ELSEWHERE)
            self.state.on_elsewhere()
            self.mirror.begin_epoch(WORKER, "of another")
            self.state.on_image(WorkerImage(WORKER, "of another", 0, {}, "0-0", 1, {}))
        elif self.rng.random() < 0.5:
            self.state.step(Event.LEASE_REGAINED)
            self.state.on_lead_begun()
            return
        self._lead()

    def _others(self) -> None:
        state = self.state
        self.rng.choice(
            [
                lambda: state.on_log_heard(self.rng.random() < 0.5),
                lambda: state.on_follower_heard(self.rng.choice([None, "silent"])),
                lambda: state.on_store_problem(self.rng.choice([None, "away"])),
                lambda: state.on_image_problem(self.rng.choice(["", "lost"])),
            ]
        )()
        state.on_image_problem("")

    def _judged(self) -> None:
        contradiction = self.rng.choice(["", "", "it is another engine"])
        self.state.on_judged(alone=self.rng.random() < 0.5, contradiction=contradiction, note="")
        self.state.on_ranks(self.rng.choice([(), (0,), (0, 1)]))
        self.state.on_judged(alone=True, contradiction="", note="")

    def _rewrite(self) -> None:
        self.commits.rewrite()

    def _commit(self) -> None:
        self.commits._next_commit()

    def _pass_time(self) -> None:
        self.now_s += self.rng.choice([0.1, INCIDENT_SHOWN_S + 1])
        self.state.settle()
        self.state._end_credit()


@pytest.mark.property
async def test_no_view_is_credited_before_the_changes_are_published() -> None:
    credited = 0
    for seed in range(examples(300)):
        world = World(seed)
        try:
            world.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        credited += world.credited
    assert credited > examples(300), "the worlds hardly ever show a credited block"
