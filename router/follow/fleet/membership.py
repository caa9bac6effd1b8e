# SPDX-License-Identifier: Apache-2.0
"""The router processes on one store, judged by their heartbeats and this process's own clock. Pure.

There are two judgements. The first decides which processes count as routers, for the assignment of workers. It counts
looks that were answered, so a store that stood still moves no worker. The second decides which routers are heard, for
the state of workers that other processes follow. It counts seconds, whatever the reason of the silence is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

import msgspec

from kvrouter.router.base.common.escaping import printable
from kvrouter.router.follow.fleet.heartbeat import LATE_MS, Heartbeat, Hold, decode_heartbeat
from kvrouter.router.follow.streams.stream_view import Position

# The interval between heartbeats; each heartbeat includes one look at all others.
INTERVAL_S = 0.25
# How long a heartbeat vouches for the state that is shown of its router's workers, counted from the last look that did
# not show the heartbeat yet. With the time until the next judgement (INTERVAL_S), no answer shows a worker of another
# router as `live` with content older than 2 s, as reference/states.md promises.
HEARD_S = 1.5
# The longest pause between two heartbeats of a router after which the later one counts as written when it arrived. With
# HEARD_S it is the 2 s.
LATE_S = 2 * INTERVAL_S
# How many heartbeats of one router are remembered: all that are recent enough to vouch for a state, and one to spare.
REMEMBERED_BEATS = round(HEARD_S / INTERVAL_S) + 2
# For how many looks a router counts whose heartbeat was there at the first look and has not changed yet: it may live, or
# its process may be dead. A router that appears later counts from its second heartbeat on.
UNPROVEN_LOOKS = 3
# How many answered looks without its heartbeat it takes until a router no longer counts. After the store was emptied,
# all routers write their heartbeats again.
MISSING_LOOKS = 2
# After how many lives of a lease the heartbeat of a dead router is removed.
FORGOTTEN_TTLS = 20
# How long the last follower of a worker is remembered after its last heartbeat.
CLAIM_KEPT_S = 600.0
# The most routers that are believed; further heartbeats are ignored.
MAX_ROUTERS = 1_024


class _Router(msgspec.Struct):
    """One router, as this process sees its heartbeats."""

    token: str
    heartbeat: Heartbeat
    # Whether the heartbeat was in the store when this process first looked. If so, the router counts at first even
    # though its heartbeat has not changed yet (UNPROVEN_LOOKS).
    was_first: bool
    # The earliest time at which its last new heartbeat can have reached the store; one that was first may be of any age.
    arrived_s: float
    # Whether this process saw the heartbeat's count change.
    beats: bool = False
    # Whether the last heartbeat had a lower count than the one before it.
    went_back: bool = False
    unchanged_looks: int = 0
    missing_looks: int = 0
    # For each remembered heartbeat, the earliest time at which it can have been written, and its workers; newest last.
    heard: deque[tuple[float, dict[str, Hold]]] = msgspec.field(default_factory=lambda: deque(maxlen=REMEMBERED_BEATS))

    @property
    def heard_s(self) -> float:
        """The earliest time at which the router's last heartbeat can have been written."""
        return self.heard[-1][0] if self.heard else -math.inf

    @property
    def holds(self) -> dict[str, Hold]:
        """The workers that the router followed at its last heartbeat."""
        return self.heard[-1][1] if self.heard else {}


class _Follower(msgspec.Struct, frozen=True):
    """The last router that reported to follow a worker."""

    router: _Router
    # The number of the router's lease on the worker.
    lease: int
    # When this report was first seen.
    said_s: float


class Membership:
    """The routers on the store, as this process knows them. `look` is called with the heartbeats read from the store."""

    def __init__(self, token: str, *, ttl_s: float) -> None:
        """Begin with this process alone.

        Args:
            token: Identifies this process.
            ttl_s: The life of a lease. A router whose heartbeat has not changed for this long has no lease.
        """
        self._token = token
        self._gone_looks = max(MISSING_LOOKS, round(ttl_s / INTERVAL_S))
        self._forgotten_looks = FORGOTTEN_TTLS * self._gone_looks
        self._known: dict[str, _Router] = {}
        self._followers: dict[str, _Follower] = {}
        self._garbage: dict[bytes, bytes] = {}
        self._first = True
        # When the last look was requested.
        self._requested_s = -math.inf
        # The tokens of the routers that count, which always include this process's.
        self.routers = frozenset({token})
        # For each worker, the tokens of the routers that refuse it, with the reason of each.
        self.refusals: dict[str, dict[str, str]] = {}
        # The number of values that were no heartbeats, each counted when it appears.
        self.ignored = 0

    def look(self, fields: Mapping[bytes, bytes], requested_s: float, now_s: float) -> bool:
        """Take the heartbeats of one look; return whether the routers that count, or their refusals, changed.

        A heartbeat that is new in this look counts as written when the look before was requested, not later, because a
        store that was away brings back heartbeats that are as old as its absence.

        Args:
            fields: The stored heartbeats by token.
            requested_s: When the look was requested.
            now_s: The current time.
        """
        beaten_s, self._requested_s = self._requested_s, requested_s
        seen = self._decode(fields)
        for token, router in list(self._known.items()):
            if token not in seen:
                router.missing_looks += 1
                if router.missing_looks >= MISSING_LOOKS:
                    del self._known[token]
        for token, heartbeat in seen.items():
            self._take(token, heartbeat, beaten_s, now_s)
        self._first = False
        self._followers = {
            worker: follower
            for worker, follower in self._followers.items()
            if now_s - follower.router.heard_s < CLAIM_KEPT_S
        }
        routers = frozenset(token for token, router in self._known.items() if self._counts(router)) | {self._token}
        refusals: dict[str, dict[str, str]] = {}
        for token in routers & self._known.keys():
            for worker, reason in self._known[token].heartbeat.refuses.items():
                refusals.setdefault(worker, {})[token] = reason
        changed = (routers, refusals) != (self.routers, self.refusals)
        self.routers, self.refusals = routers, refusals
        return changed

    def _decode(self, fields: Mapping[bytes, bytes]) -> dict[str, Heartbeat]:
        """Return the heartbeats by token, and count the values that are no heartbeats."""
        heartbeats: dict[str, Heartbeat] = {}
        garbage: dict[bytes, bytes] = {}
        for field, value in fields.items():
            decoded = decode_heartbeat(field, value)
            if decoded is None or (len(heartbeats) >= MAX_ROUTERS and decoded[0] not in self._known):
                garbage[field] = value
            else:
                heartbeats[decoded[0]] = decoded[1]
        self.ignored += sum(self._garbage.get(field) != value for field, value in garbage.items())
        self._garbage = garbage
        return heartbeats

    def _take(self, token: str, heartbeat: Heartbeat, beaten_s: float, now_s: float) -> None:
        """Take one heartbeat, which reached the store at `beaten_s` or later if it is new."""
        router = self._known.get(token)
        made_s = beaten_s if router is None else _made_s(router, heartbeat, beaten_s)
        if router is None:
            router = self._known[token] = _Router(token, heartbeat, self._first, arrived_s=beaten_s)
        elif router.heartbeat.count == heartbeat.count:
            router.unchanged_looks += 1
        elif heartbeat.count < router.heartbeat.count:
            # Either the store went back, and this heartbeat is older than what is known of its router, or a new process
            # has the token. The next one decides.
            router.heartbeat, router.unchanged_looks, router.went_back = heartbeat, 1, True
        else:
            router.heartbeat, router.beats, router.unchanged_looks, router.went_back = heartbeat, True, 0, False
        router.missing_looks = 0
        # This process's own heartbeat needs no proof that its writer lives.
        if token == self._token or (router.beats and not router.unchanged_looks):
            router.heard.append((made_s, heartbeat.holds))
            router.arrived_s = beaten_s
            for worker, hold in heartbeat.holds.items():
                self._take_hold(worker, hold, router, now_s)

    def _take_hold(self, worker: str, hold: Hold, router: _Router, now_s: float) -> None:
        """Note the router that reports to follow the worker, unless a router with a higher lease still does.

        A store that lost its data begins again with low lease numbers, so a lower lease counts once the router with the
        higher one no longer reports to follow the worker.
        """
        follower = self._followers.get(worker)
        if follower is not None and follower.router is router:
            if follower.lease == hold.lease:
                return
        elif follower is not None and follower.lease >= hold.lease and self._claims(follower.router, worker, now_s):
            return
        self._followers[worker] = _Follower(router, hold.lease, now_s)

    def _claims(self, router: _Router, worker: str, now_s: float) -> bool:
        """Return whether the router was heard lately and its heartbeat says that it follows the worker."""
        is_known = self._known.get(router.token) is router
        return is_known and worker in router.holds and now_s - router.heard_s <= HEARD_S

    def disowns(self, token: str, worker: str, since_s: float, now_s: float) -> bool:
        """Return whether a router is heard, and none of its last heartbeats says that it follows the worker.

        All remembered heartbeats must be from after `since_s`, so a router that has just begun to follow a worker does not
        disown it.
        """
        router = self._known.get(token)
        if router is None or len(router.heard) < REMEMBERED_BEATS or now_s - router.heard_s > HEARD_S:
            return False
        return router.heard[0][0] >= since_s and not any(worker in holds for _, holds in router.heard)

    def _counts(self, router: _Router) -> bool:
        """Return whether the process counts as a router, so that workers are assigned to it."""
        if router.beats:
            return router.unchanged_looks < self._gone_looks
        return router.was_first and router.unchanged_looks < UNPROVEN_LOOKS

    @property
    def forgotten(self) -> list[str]:
        """The tokens whose heartbeats stopped so long ago that they can be removed from the store."""
        return [token for token, router in self._known.items() if router.unchanged_looks >= self._forgotten_looks]

    @property
    def heartbeats(self) -> dict[str, Heartbeat]:
        """The last heartbeat of each router that counts, by token. This process's own is included once it was seen."""
        return {token: router.heartbeat for token, router in self._known.items() if token in self.routers}

    def is_gone(self, token: str) -> bool:
        """Return whether the router with this token no longer counts; False if it does not count yet."""
        router = self._known.get(token)
        return router is not None and token not in self.routers and router.unchanged_looks >= UNPROVEN_LOOKS

    def _is_news(self, worker: str, now_s: float, shown: Position) -> bool:
        """Return whether the log entry with the shown lease is so new that a heartbeat with the lease may be under way.

        The entry may have been under way for long itself, as a link was cut or the store was away. It was made after the
        last heartbeat of its writer that does not name the lease yet.
        """
        follower, writer = self._followers.get(worker), self._known.get(shown.writer)
        if writer is None or now_s - shown.since_s > HEARD_S:
            return False
        if follower is not None and (
            # A heartbeat named a later lease; or this one before the entry was read, which may have been under way then.
            follower.lease > shown.lease or (follower.lease == shown.lease and follower.said_s < shown.since_s)
        ):
            return False
        made_s = max((made_s for made_s, holds in writer.heard if not _names(holds, worker, shown)), default=-math.inf)
        return now_s - made_s <= HEARD_S

    def follower_problem(self, worker: str, now_s: float, shown: Position) -> str | None:
        """Return why the shown state of another process's worker may be old, or None if its follower vouches for it.

        Args:
            worker: The worker's tag.
            now_s: The current time.
            shown: How far this process has read the entries that the follower writes.
        """
        follower = self._followers.get(worker)
        if self._is_news(worker, now_s, shown):
            return None
        if follower is not None:
            if now_s - _vouched_s(follower.router, worker, shown) <= HEARD_S:
                return None
            if self._known.get(follower.router.token) is follower.router and worker in follower.router.holds:
                return _problem_of(follower, worker, now_s, shown)
        refused = "; ".join(
            f"router {printable(token)} refuses it: {printable(reason)}"
            for token, reason in sorted(self.refusals.get(worker, {}).items())
        )
        return "no router follows this worker" + (f" ({refused})" if refused else "")


def _made_s(router: _Router, heartbeat: Heartbeat, beaten_s: float) -> float:
    """Return the earliest time at which a router can have made a heartbeat that is new in this look.

    A heartbeat that comes after a silence may have been under way meanwhile, even several of them on several connections.
    It was made after the one that it names as confirmed had reached the store.

    Args:
        router: The router before it.
        heartbeat: The heartbeat.
        beaten_s: The earliest time at which it can have reached the store.
    """
    if router.went_back or heartbeat.after < router.heartbeat.count:
        # The confirmed one is older than the last one, or nothing is known of it.
        return router.heard_s
    if heartbeat.after == router.heartbeat.count and beaten_s - router.arrived_s > LATE_S:
        return router.arrived_s
    return beaten_s


def _names(holds: Mapping[str, Hold], worker: str, shown: Position) -> bool:
    """Return whether a heartbeat with these holds names the lease of the shown state."""
    hold = holds.get(worker)
    return hold is not None and hold.lease == shown.lease


def _vouched_s(router: _Router, worker: str, shown: Position) -> float:
    """Return the moment up to which the shown state contains everything that the router knew, by its heartbeats."""
    vouched_s = -math.inf
    for heard_s, holds in router.heard:
        hold = holds.get(worker)
        if hold is not None and hold.lease == shown.lease and hold.commits <= shown.commits:
            vouched_s = max(vouched_s, heard_s - hold.waits_ms / 1_000)
    return vouched_s


def _problem_of(follower: _Follower, worker: str, now_s: float, shown: Position) -> str:
    """Return why a router that reports to follow the worker does not vouch for the state that is shown here."""
    name = f"router {printable(follower.router.token)}, which follows this worker,"
    silent_s = now_s - follower.router.heard_s
    if silent_s > HEARD_S:
        return f"{name} has not been heard for {silent_s:.0f} s"
    hold = follower.router.holds[worker]
    if hold.lease != shown.lease:
        return f"{name} has not written yet what it knows of it"
    if hold.waits_ms > LATE_MS:
        return f"{name} cannot write to Redis what it learns"
    return f"{name} has written more than was read here (entry {hold.commits}, read up to {shown.commits})"
