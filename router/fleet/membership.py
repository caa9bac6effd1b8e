# SPDX-License-Identifier: Apache-2.0
"""The router processes on one store, judged by their heartbeats and this process's own clock. Pure.

Two judgements. Who counts as a router, for who follows what: counted in looks that were answered, so that a store that
stood still sets no worker moving. Who is heard, for what is shown of a worker that another process follows: in seconds,
whatever the reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec

from kvrouter.router.common.escaping import printable
from kvrouter.router.fleet.heartbeat import Heartbeat, decode_heartbeat

# One heartbeat and one look at all others.
INTERVAL_S = 0.25
# What a worker's follower said last holds for so long. With the age of a heartbeat when it is seen, its workers are in
# doubt within 2 s of it.
HEARD_S = 1.5
# Looks for which what the first look showed counts without having been seen to beat: it may live, or be what a dead
# router left. What comes later counts from its second heartbeat on.
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
    """One token's heartbeats as they were seen here. was_first: it stood there at the first look; beats: it was seen to
    beat, not only to have beaten. heard_s: when it beat last; holds, late: what it said then."""

    heartbeat: Heartbeat
    was_first: bool
    beats: bool = False
    unchanged_looks: int = 0
    missing_looks: int = 0
    heard_s: float = -math.inf
    holds: dict[str, int] = {}
    late: frozenset[str] = frozenset()


class _Claim(msgspec.Struct, frozen=True):
    """What a router that followed a worker said of it last."""

    token: str
    heard_s: float
    late: bool


class Membership:
    """What this process knows of the routers. `look` takes what the store showed."""

    def __init__(self, token: str, *, ttl_s: float) -> None:
        """ttl_s: the life of a lease: a router that did not beat for so long has none."""
        self._token = token
        self._gone_looks = max(MISSING_LOOKS, round(ttl_s / INTERVAL_S))
        self._forgotten_looks = FORGOTTEN_TTLS * self._gone_looks
        self._known: dict[str, _Router] = {}
        # By worker: the router that says that it follows it, and what one said that does so no longer.
        self._followers: dict[str, str] = {}
        self._past: dict[str, _Claim] = {}
        self._garbage: dict[bytes, bytes] = {}
        self._first = True
        # The tokens that count, this process's always; and by worker, why which of them refuse it.
        self.routers = frozenset({token})
        self.refusals: dict[str, dict[str, str]] = {}
        # Values that were no heartbeats, each counted when it appears.
        self.ignored = 0

    def look(self, fields: Mapping[bytes, bytes], now_s: float) -> bool:
        """Take what one look at the store showed; whether who counts, or what they refuse, changed."""
        seen = self._decode(fields)
        for token, router in list(self._known.items()):
            if token not in seen:
                router.missing_looks += 1
                if router.missing_looks >= MISSING_LOOKS:
                    del self._known[token]
                    self._end_claims(token, router, router.holds)
        for token, heartbeat in seen.items():
            self._take(token, heartbeat, now_s)
        self._first = False
        self._past = {worker: one for worker, one in self._past.items() if now_s - one.heard_s < CLAIM_KEPT_S}
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

    def _take(self, token: str, heartbeat: Heartbeat, now_s: float) -> None:
        router = self._known.get(token)
        if router is None:
            router = self._known[token] = _Router(heartbeat, self._first)
        elif router.heartbeat.count == heartbeat.count:
            router.unchanged_looks += 1
        else:
            router.heartbeat, router.beats, router.unchanged_looks = heartbeat, True, 0
        router.missing_looks = 0
        # This process knows of its own heartbeat that it is no dead one's.
        if token == self._token or (router.beats and not router.unchanged_looks):
            self._take_claims(token, router, heartbeat)
            router.heard_s = now_s

    def _take_claims(self, token: str, router: _Router, heartbeat: Heartbeat) -> None:
        """Usually nothing changed, of a thousand workers."""
        before, holds = router.holds, heartbeat.holds
        if holds != before:
            # With its number: a worker that was lost and taken again is followed by whoever took it last.
            for worker, _ in holds.items() - before.items():
                self._followers[worker] = token
                self._past.pop(worker, None)
            self._end_claims(token, router, before.keys() - holds.keys())
            router.holds = holds
        router.late = frozenset(heartbeat.late)

    def _end_claims(self, token: str, router: _Router, workers: Iterable[str]) -> None:
        """It no longer says that it follows these."""
        for worker in workers:
            if self._followers.get(worker) != token:
                continue
            other = next((other for other, one in self._known.items() if other != token and worker in one.holds), None)
            if other is not None:
                self._followers[worker] = other
            else:
                del self._followers[worker]
                self._past[worker] = _Claim(token, router.heard_s, worker in router.late)

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

    def follower_problem(self, worker: str, now_s: float) -> str | None:
        """Why what the store says of a worker that another process follows may be old; None: its follower is heard."""
        follower = self._followers.get(worker)
        claim = self._past.get(worker)
        if follower is not None:
            router = self._known[follower]
            claim = _Claim(follower, router.heard_s, worker in router.late)
        if claim is not None:
            name = f"router {printable(claim.token)}, which follows this worker,"
            if claim.late:
                return f"{name} cannot write to Redis what it learns"
            age_s = now_s - claim.heard_s
            if age_s <= HEARD_S:
                return None
            if follower is not None:
                return f"{name} has not been heard for {age_s:.0f} s"
        refused = "; ".join(
            f"router {printable(token)} refuses it: {printable(reason)}"
            for token, reason in sorted(self.refusals.get(worker, {}).items())
        )
        return "no router follows this worker" + (f" ({refused})" if refused else "")
