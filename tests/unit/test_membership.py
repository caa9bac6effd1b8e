# SPDX-License-Identifier: Apache-2.0
"""Membership of routers: which of them count and which reports are believed, whatever stands in the store.

No clock but the reader's is used.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvrouter.router.follow.fleet.heartbeat import MAX_HEARTBEAT_BYTES, VERSION, Heartbeat, Hold, encode_heartbeat
from kvrouter.router.follow.fleet.membership import (
    HEARD_S,
    INTERVAL_S,
    MAX_ROUTERS,
    REMEMBERED_BEATS,
    UNPROVEN_LOOKS,
    Membership,
)
from kvrouter.router.follow.streams.stream_view import Position

TTL_S = 1.5
GONE_LOOKS = round(TTL_S / INTERVAL_S)


class World:
    """Hash of the store and a clock, as one process, `me`, looks at them."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.fields: dict[bytes, bytes] = {}
        self.counts: dict[str, int] = {}
        self.me = Membership("me", ttl_s=TTL_S)
        # Position up to which this process has read the log that the follower of `w` writes.
        self.shown = Position(1, 0)

    def beat(
        self,
        token: str,
        holds: Any = (),
        *,
        lease: int = 1,
        commits: int = 0,
        waits_ms: int = 0,
        refuses: Any = None,
        confirmed: int | None = None,
    ) -> None:
        self.counts[token] = self.counts.get(token, 0) + 1
        worker_holds = dict.fromkeys(holds, Hold(lease, commits, waits_ms))
        heartbeat = Heartbeat(self.counts[token], VERSION, worker_holds, refuses or {}, confirmed=confirmed)
        self.fields[token.encode()] = encode_heartbeat(heartbeat)

    def look(self) -> None:
        self.now_s += INTERVAL_S
        self.me.look(self.fields, self.now_s, self.now_s)

    def rounds(self, count: int, **holds: list[str]) -> None:
        """Let each router send a heartbeat with what it holds, and look at them; repeat that `count` times."""
        for _ in range(count):
            for token, worker_ids in holds.items():
                self.beat(token, worker_ids)
            self.look()

    def problem(self) -> str | None:
        return self.me.follower_problem("w", self.now_s, self.shown)


@pytest.fixture
def world() -> World:
    return World()


def test_a_worker_is_vouched_for_while_its_follower_beats(world: World) -> None:
    world.rounds(50, you=["w"])
    assert world.problem() is None
    assert world.me.routers == {"me", "you"}
    # The other router stops; the store goes on answering.
    silent_s = 0.0
    while world.problem() is None:
        world.look()
        silent_s += INTERVAL_S
    assert silent_s + INTERVAL_S <= 2.0
    assert world.problem() == "router you, which follows this worker, has not been heard for 2 s"


def test_a_store_that_does_not_answer_vouches_for_nothing_and_moves_nobody(world: World) -> None:
    world.rounds(3, you=["w"])
    world.now_s += HEARD_S - INTERVAL_S
    assert world.problem() is None
    world.now_s += 30.0
    assert world.problem() == "router you, which follows this worker, has not been heard for 32 s"
    # The store is back, but no router has had the time to write.
    for _ in range(GONE_LOOKS - 1):
        world.look()
    assert world.me.routers == {"me", "you"}
    # The first heartbeat may have been under way for as long as the store was away.
    world.rounds(1, you=["w"])
    assert world.problem() is not None
    world.rounds(1, you=["w"])
    assert world.problem() is None


@pytest.mark.parametrize("seen", [("first", "second"), ("second",)])
def test_heartbeats_that_were_held_back_on_two_connections_vouch_for_nothing(
    world: World, seen: tuple[str, ...]
) -> None:
    world.rounds(5, you=["w"])
    confirmed = world.counts["you"]
    for _ in range(12):
        world.look()
    # Both were sent soon after the last confirmed one, over connections that the router gave up.
    for which in ("first", "second"):
        world.beat("you", ["w"], confirmed=confirmed)
        if which in seen:
            world.look()
            assert world.problem() is not None
    world.beat("you", ["w"], confirmed=world.counts["you"])
    world.look()
    assert world.problem() is None


def test_a_heartbeat_that_comes_after_the_store_went_back_may_be_older_than_it(world: World) -> None:
    world.rounds(5, you=["w"])
    replicated = dict(world.fields)
    world.rounds(5, you=["w"])
    # A replica that lags is promoted, and the next heartbeat, made 3 s ago, arrives.
    world.fields = replicated
    for _ in range(12):
        world.look()
    for problem in (True, False):
        world.beat("you", ["w"], confirmed=world.counts["you"])
        world.look()
        assert (world.problem() is not None) is problem


def test_the_heartbeat_of_a_dead_router_vouches_for_nothing(world: World) -> None:
    world.beat("dead", ["w"], refuses={"x": "because"})
    for _ in range(UNPROVEN_LOOKS):
        world.look()
        assert world.problem() == "no router follows this worker"
    world.look()
    assert world.me.routers == {"me"} and world.me.refusals == {} and world.me.is_gone("dead")
    for _ in range(1_000):
        world.look()
    assert world.me.forgotten == ["dead"]
    # The router was stopped, and now goes on. Its next heartbeat may have been under way since then.
    world.rounds(1, dead=["w"])
    assert world.me.routers == {"me", "dead"} and world.problem() is not None
    world.rounds(1, dead=["w"])
    assert world.problem() is None


def test_a_new_router_counts_from_its_second_heartbeat(world: World) -> None:
    world.look()
    world.beat("forged", ["w"], refuses={"x": "because"})
    for _ in range(10):
        world.look()
        assert world.me.routers == {"me"} and world.me.refusals == {}
    world.beat("forged", ["w"])
    world.look()
    assert world.me.routers == {"me", "forged"}


def test_a_worker_that_nobody_follows_is_in_doubt(world: World) -> None:
    for _ in range(10):
        world.beat("you", ["other"], refuses={"w": "host 10.0.0.1 is not among allow_hosts"})
        world.look()
    assert world.problem() == (
        "no router follows this worker (router you refuses it: host 10.0.0.1 is not among allow_hosts)"
    )
    assert world.me.refusals == {"w": {"you": "host 10.0.0.1 is not among allow_hosts"}}


def test_a_worker_that_changes_hands_is_not_in_doubt(world: World) -> None:
    world.rounds(2, one=["w"], two=[])
    world.beat("one", ["w"])
    world.look()
    for _ in range(3):
        world.rounds(1, one=[], two=[])
        assert world.problem() is None
    for _ in range(10):
        world.rounds(1, one=[], two=["w"])
        assert world.problem() is None


def test_a_worker_that_two_say_they_follow_is_not_in_doubt_while_one_continues(world: World) -> None:
    for second in ([], [], ["w"], ["w"], *[[]] * 20):
        world.beat("one", ["w"])
        world.beat("two", second)
        world.look()
        assert world.problem() is None or world.counts["one"] <= 2
    # Router one, the remaining follower, falls silent, and then is gone.
    world.rounds(20, two=[])
    assert world.problem() == "router one, which follows this worker, has not been heard for 5 s"
    del world.fields[b"one"]
    world.rounds(20, two=[])
    assert world.problem() == "no router follows this worker"


def test_a_follower_that_cannot_write_says_so_at_once(world: World) -> None:
    for waits_ms in (0, 0, 0, 1_600):
        world.beat("you", ["w"], waits_ms=waits_ms)
        world.look()
    # The router's former heartbeat is still valid.
    assert world.problem() is None
    for _ in range(6):
        world.beat("you", ["w"], waits_ms=1_600)
        world.look()
    assert world.problem() == "router you, which follows this worker, cannot write to Redis what it learns"


def test_a_change_that_waits_ages_what_a_heartbeat_vouches_for(world: World) -> None:
    for step in range(100):
        waits_s = step * INTERVAL_S
        world.beat("you", ["w"], waits_ms=round(1_000 * waits_s))
        world.look()
        if waits_s > HEARD_S:
            assert world.problem() is not None
    world.beat("you", ["w"])
    world.look()
    assert world.problem() is None


def test_a_new_follower_does_not_vouch_for_the_state_of_the_one_before(world: World) -> None:
    world.rounds(3, one=["w"], two=[])
    assert world.problem() is None
    # Router one dies. Router two takes the lease, and loads the store's data for any length of time.
    for _ in range(100):
        world.beat("two", ["w"], lease=2)
        world.look()
        assert world.problem() == "router two, which follows this worker, has not written yet what it knows of it"
    world.shown = Position(2, 0)
    assert world.problem() is None


def test_a_follower_that_takes_the_lease_again_and_again_never_vouches_for_what_it_did_not_write(world: World) -> None:
    for step in range(200):
        world.beat("you", ["w"] if step % 4 < 2 else [], lease=2 + step // 4)
        world.look()
        assert world.problem() is not None


def test_a_heartbeat_vouches_only_for_entries_that_were_read(world: World) -> None:
    for _ in range(3):
        world.beat("you", ["w"], commits=7)
        world.look()
        world.shown = Position(1, 7)
    assert world.problem() is None
    # The store was away, and the heartbeat is heard again before the log is read.
    world.now_s += 4.0
    world.beat("you", ["w"], commits=9)
    world.look()
    # Heartbeats that the store brings back may be as old as its absence.
    assert world.problem() == "router you, which follows this worker, has not been heard for 4 s"
    # The next one may have been made as long ago as the first reached the store.
    for _ in range(2):
        world.beat("you", ["w"], commits=9)
        world.look()
    assert world.problem() == (
        "router you, which follows this worker, has written more than was read here (entry 9, read up to 7)"
    )
    world.shown = Position(1, 8)
    assert world.problem() is not None
    world.shown = Position(1, 9)
    assert world.problem() is None


def test_a_heartbeat_that_a_store_brings_back_vouches_for_nothing(world: World) -> None:
    world.rounds(3, you=["w"])
    # The router wrote this heartbeat just before the store went away, and it is seen when the store is back.
    world.beat("you", ["w"])
    world.now_s += 4.0
    world.look()
    assert world.problem() is not None


def test_a_heartbeat_that_an_older_replica_brings_back_vouches_for_nothing(world: World) -> None:
    world.rounds(3, you=["w"])
    replica = dict(world.fields)
    for commits in range(1, 20):
        world.beat("you", ["w"], commits=commits)
        world.look()
    # The replica lacks the last entries and heartbeats, and the log was loaded again from it.
    world.fields = replica
    world.look()
    assert world.problem() is not None
    world.beat("you", ["w"], commits=20)
    world.look()
    assert world.problem() is not None
    assert world.me.routers == {"me", "you"}


def test_a_router_that_begins_again_under_its_token_is_heard_from_its_second_heartbeat(world: World) -> None:
    world.rounds(20, you=["w"])
    world.counts.clear()
    world.shown = Position(2, 0)
    for is_vouched in (False, True):
        world.beat("you", ["w"], lease=2)
        world.look()
        assert (world.problem() is None) is is_vouched


def test_a_reader_that_is_always_a_heartbeat_behind_is_vouched_for(world: World) -> None:
    for commits in range(0, 400, 10):
        world.beat("you", ["w"], commits=commits)
        world.look()
        world.shown = Position(1, max(0, commits - 20))
        assert world.problem() is None or commits < 40


def test_an_entry_of_a_new_lease_vouches_for_itself_until_a_heartbeat_is_due(world: World) -> None:
    world.rounds(3, you=[])
    world.shown = Position(5, 1, since_s=world.now_s, writer="you")
    assert world.problem() is None
    world.now_s += HEARD_S + 0.1
    assert world.problem() == "no router follows this worker"


def test_an_entry_does_not_vouch_for_itself_if_its_writer_is_not_heard(world: World) -> None:
    world.rounds(10, one=["w"], two=[])
    # Router two takes the worker, and its link to the store is cut as it writes the first entry, which arrives later.
    for _ in range(round(HEARD_S / INTERVAL_S) + 1):
        world.rounds(1, one=["w"])
    for writer in ("two", "unknown", ""):
        world.shown = Position(2, 1, world.now_s, writer)
        assert world.problem() == "router one, which follows this worker, has not written yet what it knows of it"
    # Router one would have named this lease in its next heartbeat, which may be under way.
    world.shown = Position(2, 1, world.now_s, "one")
    assert world.problem() is None


def test_an_entry_that_was_under_way_does_not_vouch_for_itself_although_its_writer_is_heard(world: World) -> None:
    world.rounds(10, one=["w"], two=[])
    # The connection that brings the entry hangs; the one of heartbeats does not.
    for _ in range(10):
        world.beat("two", ["w"], lease=2, waits_ms=1_600)
        world.look()
    world.shown = Position(2, 1, world.now_s, "two")
    assert world.problem() == "router two, which follows this worker, cannot write to Redis what it learns"


def test_an_entry_that_is_read_late_does_not_vouch_for_itself(world: World) -> None:
    world.rounds(10, one=["w"], two=[])
    # Router two took the worker, wrote its state, and died; for a while, nothing of that arrived here.
    world.now_s += 10.0
    world.shown = Position(2, 1, world.now_s, "two")
    assert world.problem() is not None
    world.look()
    assert world.problem() is not None
    # The log may be read after the heartbeats.
    world.shown = Position(2, 1, world.now_s, "two")
    assert world.problem() is not None


def test_an_entry_that_is_read_just_after_a_start_does_not_vouch_for_itself(world: World) -> None:
    # The store may have been away until a moment before the start, and a write that waited for it is as old as that.
    for _ in range(3):
        world.shown = Position(2, 1, world.now_s, "you")
        assert world.problem() == "no router follows this worker"
        world.rounds(1, you=[])
    # The third heartbeat was made after the second had been seen; the first may be of any age.
    world.shown = Position(3, 1, world.now_s, "you")
    assert world.problem() is None


def test_an_entry_does_not_vouch_for_itself_where_more_is_known_to_be_written(world: World) -> None:
    world.rounds(10, one=["w"], two=[])
    for _ in range(10):
        world.beat("one")
        world.beat("two", ["w"], lease=2, commits=9)
        world.look()
    # The log is late: this is the first of nine entries.
    world.shown = Position(2, 1, world.now_s, "two")
    assert world.problem() == (
        "router two, which follows this worker, has written more than was read here (entry 9, read up to 1)"
    )


def test_a_store_that_lost_its_data_begins_with_low_numbers_again(world: World) -> None:
    for _ in range(3):
        world.beat("one", ["w"], lease=7)
        world.beat("two")
        world.look()
    for _ in range(3):
        world.beat("one")
        world.beat("two", ["w"], lease=1)
        world.look()
    world.shown = Position(1, 0)
    assert world.problem() is None


def test_a_heartbeat_that_was_under_way_for_long_does_not_vouch(world: World) -> None:
    world.rounds(20, you=["w"])
    assert world.problem() is None
    for _ in range(10):
        world.look()
    # It was made before the silence, and reaches the store only now.
    world.rounds(1, you=["w"])
    assert world.problem() is not None
    world.rounds(1, you=["w"])
    assert world.problem() is None


def test_a_router_disowns_a_worker_that_none_of_its_later_heartbeats_names(world: World) -> None:
    def disowns(since_s: float) -> bool:
        return world.me.disowns("you", "w", since_s, world.now_s)

    world.rounds(20, you=["w"])
    seen_s = world.now_s
    assert not disowns(0.0)
    # Heartbeats from before the lease was seen say nothing about it.
    world.rounds(REMEMBERED_BEATS - 1, you=[])
    assert not disowns(seen_s)
    world.rounds(1, you=[])
    assert disowns(seen_s)
    # A router that is not heard may hold anything.
    world.now_s += HEARD_S
    assert not disowns(seen_s)
    world.rounds(REMEMBERED_BEATS + 1, you=["w"])
    assert not disowns(seen_s)
    assert not world.me.disowns("unknown", "w", seen_s, world.now_s)


def test_a_router_that_left_is_forgotten(world: World) -> None:
    world.rounds(2, you=[])
    world.fields.clear()
    world.look()
    assert world.me.routers == {"me", "you"}
    world.look()
    assert world.me.routers == {"me"}


GARBAGE = {
    b"": b"",
    b"text": b"live for ever",
    b"number": b"99999999999999999999999999",
    b"future": msgspec.msgpack.encode(9e15),
    b"wrong": msgspec.msgpack.encode({"count": -1, "version": VERSION, "holds": {"w": [1, 1]}, "refuses": {}}),
    b"types": msgspec.msgpack.encode({"count": 1, "version": VERSION, "holds": ["w"], "refuses": {}}),
    b"missing": msgspec.msgpack.encode({"count": 1}),
    b"huge": b"\xcf" + b"\xff" * 8,
    b"other version": msgspec.msgpack.encode({"count": 1, "version": VERSION + 1, "holds": {}, "refuses": {}}),
    b"\xff\xfe": encode_heartbeat(Heartbeat(1, VERSION, {"w": Hold(1, 0)}, {})),
    b"line\n": encode_heartbeat(Heartbeat(1, VERSION, {"w": Hold(1, 0)}, {})),
    b"x" * 200: encode_heartbeat(Heartbeat(1, VERSION, {"w": Hold(1, 0)}, {})),
    b"large": b"\x00" * (MAX_HEARTBEAT_BYTES + 1),
}


@pytest.mark.parametrize("field", GARBAGE)
def test_garbage_is_counted_and_not_believed(world: World, field: bytes) -> None:
    world.fields[field] = GARBAGE[field]
    world.rounds(3, you=["other"])
    assert world.me.routers == {"me", "you"} and world.me.ignored == 1
    assert world.problem() == "no router follows this worker"
    # Garbage that changes is no heartbeat either.
    world.fields[field] = GARBAGE[field] + b"!"
    world.look()
    assert world.me.routers == {"me", "you"} and world.me.ignored == 2


def test_more_routers_than_there_can_be_are_not_believed(world: World) -> None:
    for number in range(MAX_ROUTERS + 10):
        world.beat(f"r{number:05}")
    world.look()
    assert len(world.me.routers) == MAX_ROUTERS + 1 and world.me.ignored == 10
