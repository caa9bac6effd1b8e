# SPDX-License-Identifier: Apache-2.0
"""Contact with Redis, judged by the looks that it answers and by the logs that can be read."""

from __future__ import annotations

import logging

import pytest

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.redis_client.errors import ReplyError, StoreUnavailable
from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.follow.fleet.fleet_metrics import FleetMetrics
from kvrouter.router.follow.fleet.membership import HEARD_S
from kvrouter.router.follow.fleet.store_contact import StoreContact

ONE, TWO = WorkerKey("m", "one"), WorkerKey("m", "two")


class World:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.registry = MetricRegistry()
        self.contact = StoreContact(metrics=FleetMetrics(self.registry), clock=lambda: self.now_s)

    def up(self) -> float | None:
        return self.registry.get_sample_value("kvrouter_store_up")


@pytest.fixture
def world() -> World:
    return World()


def test_a_store_that_answers_no_look_is_silent_after_a_while(world: World) -> None:
    world.now_s += HEARD_S
    assert (world.contact.problem, world.contact.silence, world.contact.lost_s) == (None, None, 0.0)
    world.now_s += 30.0
    assert world.contact.silence == "Redis has not answered for 32 s"
    assert (world.contact.problem or "").startswith("Redis has not answered for 32 s: what other routers learn")
    assert world.contact.lost_s == HEARD_S + 30.0
    world.contact.answered()
    assert (world.contact.problem, world.contact.silence, world.contact.lost_s) == (None, None, 0.0)


def test_the_store_is_lost_until_every_log_can_be_read(world: World) -> None:
    world.contact.lose_logs([ONE], "refused")
    world.now_s += 1.0
    world.contact.lose_logs([TWO], "reset")
    world.contact.answered()
    assert world.contact.problem == "Redis does not answer (refused): what other routers learn is not known here"
    assert (world.contact.lost_s, world.contact.silence) == (1.0, None)
    world.contact.regain_logs([ONE])
    assert world.contact.problem == "Redis does not answer (reset): what other routers learn is not known here"
    world.contact.regain_logs([ONE, TWO])
    assert (world.contact.problem, world.contact.lost_s) == (None, 0.0)


def test_losing_no_log_is_no_problem(world: World) -> None:
    world.contact.lose_logs([], "refused")
    assert world.contact.problem is None


def test_each_change_is_logged_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvrouter.fleet")
    world.contact.judge()
    assert world.up() == 1
    # Both signs show the same failure.
    world.contact.lose_logs([ONE], "refused")
    world.contact.judge()
    world.now_s += 2 * HEARD_S
    world.contact.judge()
    world.contact.regain_logs([ONE])
    world.contact.judge()
    assert world.up() == 0
    assert [record.message for record in caplog.records] == ["store lost"]
    world.contact.answered()
    world.contact.judge()
    assert world.up() == 1
    assert [record.message for record in caplog.records] == ["store lost", "store back"]


def test_a_store_that_takes_no_commits_is_not_up_and_not_silent(world: World) -> None:
    world.contact.judge(is_refused=True)
    assert (world.up(), world.contact.problem) == (0, None)


def test_a_store_that_refuses_says_why_and_names_the_disk(world: World) -> None:
    world.now_s += 2 * HEARD_S
    world.contact.failed(ReplyError("MISCONF Errors writing to the AOF file: No space left on device"))
    problem = world.contact.problem or ""
    assert problem.startswith(f"Redis has refused for {2 * HEARD_S:.0f} s what routers write (MISCONF ")
    assert "No space left on device" in problem and "free space on its disk" in problem
    # The server is silent now, so its disk may have been repaired since.
    world.contact.failed(StoreUnavailable("refused"))
    assert "not answered" in (world.contact.problem or "")
    world.contact.answered()
    assert world.contact.problem is None
