# SPDX-License-Identifier: Apache-2.0
"""The router processes on one store, judged by their heartbeats and this process's own clock. Pure.

Two judgements. Who counts as a router, for who follows what: counted in looks that were answered, so that a store that
stood still sets no worker moving. Who is heard, for what is shown of a worker that another process follows: in seconds,
whatever the reason.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

import msgspec

from kvrouter.router.base.common.escaping import printable
from kvrouter.router.follow.fleet.heartbeat import LATE_MS, Heartbeat, Hold, decode_heartbeat
from kvrouter.router.follow.streams.stream_view import Position

# One heartbeat and one look at all others.
INTERVAL_S = 0.25
# How long a heartbeat vouches for the state that is shown of its router's workers, counted from the last look that did
# not show the heartbeat yet. With the time until the next judgement (INTERVAL_S), no answer shows a worker of another
# router as `live` with content older than 2 s, as reference/states.md promises.
HEARD_S = 1.5
# How many heartbeats of one router are remembered: those that can vouch for anything, and one to spare.
REMEMBERED_BEATS = round(HEARD_S / INTERVAL_S) + 2
# For how many looks a router of the first look counts without having been seen to beat: it may live, or be the remains
# of a dead one. A router that appears later counts from its second heartbeat on.
UNPROVEN_LOOKS = 3
# Answered looks without its heartbeat until a router counts no longer: after the store was emptied, all write theirs
# again.
MISSING_LOOKS = 2
# Lives of a lease after which what a dead router left is removed.
FORGOTTEN_TTLS = 20
# After so long, who followed a worker last does not matter to anybody.
CLAIM_KEPT_S = 600.0
# More are not believed to be routers.
MAX_ROUTERS = 1_024


class _Router(msgspec.Struct):
    """One token's heartbeats as they were seen here."""

    token: str
    heartbeat: Heartbeat
    # Whether its heartbeat was there at the first look.
    was_first: bool
    # Whether this process saw its count change.
    beats: bool = False
    unchanged_looks: int = 0
    missing_looks: int = 0
    # The earliest time at which it can have beaten, and its workers in that heartbeat; the newest last.
    heard: deque[tuple[float, dict[str, Hold]]] = msgspec.field(default_factory=lambda: deque(maxlen=REMEMBERED_BEATS))

    @property
    def heard_s(self) -> float:
        """Return the earliest time at which its last heartbeat can have been written."""
        return self.heard[-1][0] if self.heard else -math.inf

    @property
    def holds(self) -> dict[str, Hold]:
        """Return the workers that it followed at its last heartbeat."""
        return self.heard[-1][1] if self.heard else {}


class _Follower(msgspec.Struct, frozen=True):
    """The last router to say that it follows a worker, and its lease."""

    router: _Router
    lease: int
    # When it was first seen to say so.
    said_s: float


class Membership:
    """What this process knows of the routers. `look` takes what the store showed."""

    def __init__(self, token: str, *, ttl_s: float) -> None:
        """ttl_s: the life of a lease: a router that did not beat for so long has none."""
        self._token = token
        self._gone_looks = max(MISSING_LOOKS, round(ttl_s / INTERVAL_S))
        self._forgotten_looks = FORGOTTEN_TTLS * self._gone_looks
        self._known: dict[str, _Router] = {}
        self._followers: dict[str, _Follower] = {}
        self._garbage: dict[bytes, bytes] = {}
        self._first = True
        # When the last look was requested.
        self._asked_s = -math.inf
        # The last look with which a longer absence of the store ended: what is read soon after it may be as old.
        self._back_s = -math.inf
        # The tokens that count, this process's always; and by worker, why which of them refuse it.
        self.routers = frozenset({token})
        self.refusals: dict[str, dict[str, str]] = {}
        # Values that were no heartbeats, each counted when it appears.
        self.ignored = 0

    def look(self, fields: Mapping[bytes, bytes], asked_s: float, now_s: float) -> bool:
        """Take the heartbeats that one look at the store showed. Return whether the routers that count, or their
        refusals, changed.

        asked_s: when the look was requested. A heartbeat that is new in this look counts as written when the look
        before was requested, not later: a store that was away brings back heartbeats that are as old as its absence."""
        beaten_s, self._asked_s = self._asked_s, asked_s
        if asked_s - beaten_s > HEARD_S and not self._first:
            self._back_s = now_s
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
        found: dict[str, Heartbeat] = {}
        garbage: dict[bytes, bytes] = {}
        for field, value in fields.items():
            decoded = decode_heartbeat(field, value)
            if decoded is None or (len(found) >= MAX_ROUTERS and decoded[0] not in self._known):
                garbage[field] = value
            else:
                found[decoded[0]] = decoded[1]
        self.ignored += sum(self._garbage.get(field) != value for field, value in garbage.items())
        self._garbage = garbage
        return found

    def _take(self, token: str, heartbeat: Heartbeat, beaten_s: float, now_s: float) -> None:
        router = self._known.get(token)
        if router is None:
            router = self._known[token] = _Router(token, heartbeat, self._first)
        elif router.heartbeat.count == heartbeat.count:
            router.unchanged_looks += 1
        else:
            router.heartbeat, router.beats, router.unchanged_looks = heartbeat, True, 0
        router.missing_looks = 0
        # This process knows of its own heartbeat that it is no dead one's.
        if token == self._token or (router.beats and not router.unchanged_looks):
            router.heard.append((beaten_s, heartbeat.holds))
            for worker, hold in heartbeat.holds.items():
                self._take_hold(worker, hold, router, now_s)

    def _take_hold(self, worker: str, hold: Hold, router: _Router, now_s: float) -> None:
        """Note which router follows the worker: the one with the highest lease, or another one if that one no longer
        says so.

        The second rule is for a store that lost its data, which begins again with low numbers."""
        known = self._followers.get(worker)
        if known is not None and known.router is router:
            if known.lease == hold.lease:
                return
        elif known is not None and known.lease >= hold.lease and self._claims(known.router, worker, now_s):
            return
        self._followers[worker] = _Follower(router, hold.lease, now_s)

    def _claims(self, router: _Router, worker: str, now_s: float) -> bool:
        """Return whether a router is heard and says that it follows the worker."""
        is_known = self._known.get(router.token) is router
        return is_known and worker in router.holds and now_s - router.heard_s <= HEARD_S

    def _counts(self, router: _Router) -> bool:
        if router.beats:
            return router.unchanged_looks < self._gone_looks
        return router.was_first and router.unchanged_looks < UNPROVEN_LOOKS

    @property
    def forgotten(self) -> list[str]:
        """Tokens whose heartbeats stopped so long ago that what they left can be removed."""
        return [token for token, router in self._known.items() if router.unchanged_looks >= self._forgotten_looks]

    @property
    def heartbeats(self) -> dict[str, Heartbeat]:
        """The last heartbeat of each router that counts, by token; this process's own once it is seen."""
        return {token: router.heartbeat for token, router in self._known.items() if token in self.routers}

    def is_gone(self, token: str) -> bool:
        """Whether a token is known to count no longer, not only not yet."""
        router = self._known.get(token)
        return router is not None and token not in self.routers and router.unchanged_looks >= UNPROVEN_LOOKS

    def _is_news(self, follower: _Follower | None, now_s: float, shown: Position) -> bool:
        """Return whether the entry that brought the shown lease was read soon after it was written, and the first
        heartbeat with this lease may still be on its way."""
        if now_s - self._asked_s > HEARD_S or shown.since_s - self._back_s <= HEARD_S:
            return False
        if follower is None or follower.lease < shown.lease:
            return True
        return follower.lease == shown.lease and follower.said_s >= shown.since_s

    def follower_problem(self, worker: str, now_s: float, shown: Position) -> str | None:
        """Return why the state that is shown of another process's worker may be old, or None if its follower vouches
        for it.

        shown: how far this process has read the entries that the follower writes."""
        follower = self._followers.get(worker)
        if now_s - shown.since_s <= HEARD_S and self._is_news(follower, now_s, shown):
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


def _vouched_s(router: _Router, worker: str, shown: Position) -> float:
    """Return the moment up to which the shown state contains everything that the router knew, by its heartbeats."""
    vouched_s = -math.inf
    for heard_s, holds in router.heard:
        hold = holds.get(worker)
        if hold is not None and hold.lease == shown.lease and hold.commits <= shown.commits:
            vouched_s = max(vouched_s, heard_s - hold.waits_ms / 1_000)
    return vouched_s


def _problem_of(follower: _Follower, worker: str, now_s: float, shown: Position) -> str:
    """Return why a router that says it follows the worker does not vouch for the state that is shown of it."""
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
