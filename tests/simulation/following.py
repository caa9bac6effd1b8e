# SPDX-License-Identifier: Apache-2.0
"""Two laws of who follows a worker and who hears of it, for routers that reach the store while faults go on.

- *Followers.* A worker does not stay without a follower while a router that should follow it reaches the store.
- *News.* What its follower shows as `live`, no other router shows as uncertain for long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.follow.streams.follower import Follower
from kvrouter.router.model.workers.stream_state import StreamState
from tests.simulation.router import Router
from tests.simulation.written import Written

# A dead router's lease ends within `lease_ttl_s` (4 s at most), and another router follows at its next reads. Twice that,
# as a router that was restarted meanwhile may begin again.
FOLLOWED_S = 10.0
# The states that another router shows until it is sure.
UNSURE = (StreamState.SUSPECT, StreamState.RESYNCING, StreamState.CATCHING_UP, StreamState.CONNECTING)
# The law, a worker, and the processes.
Case = tuple[str, WorkerKey, str, str]


class Following:
    """The looks at one world's followers, once a second."""

    def __init__(
        self, workers: Iterable[WorkerKey], routers: Sequence[Router], written: Written, now_s: Callable[[], float]
    ) -> None:
        self._workers, self._routers, self._written, self._now_s = list(workers), routers, written, now_s
        # Since when each case has been the same at all looks.
        self._since_s: dict[Case, float] = {}

    def problem(self) -> str:
        """Return which case has lasted for too long, or ""."""
        now_s = self._now_s()
        before, self._since_s = self._since_s, {}
        for case, text in self._cases():
            since_s = self._since_s[case] = before.get(case, now_s)
            if now_s - since_s > FOLLOWED_S:
                return f"{case[0]}: {text} for {now_s - since_s:.0f} s"
        return ""

    def _cases(self) -> Iterable[tuple[Case, str]]:
        able = [router for router in self._routers if router.answers and self._written.has_published(router.token)]
        for worker in self._workers:
            followers = [
                (router, follower)
                for router in self._routers
                if router.core is not None and (follower := router.core.registry.followers.get(worker)) is not None
            ]
            holders = [(router, follower) for router, follower in followers if follower.lease.held]
            for router, follower in followers:
                if router not in able:
                    continue
                if not holders and follower.lease.wanted:
                    case = ("followers", worker, router.token, "")
                    yield case, f"{worker.worker_id} has no follower, and {router.name} should be that"
                elif len(holders) == 1 and holders[0][0] in able and self._is_unsure(follower, holders[0][1]):
                    case = ("news", worker, router.token, holders[0][0].token)
                    yield (
                        case,
                        (
                            f"{router.name} shows {worker.worker_id} {follower.state.view.state.value} "
                            f"({follower.state.view.reason}), and {holders[0][0].name} live"
                        ),
                    )

    def _is_unsure(self, follower: Follower, holder: Follower) -> bool:
        is_other = follower is not holder and holder.state.view.state is StreamState.LIVE
        return is_other and follower.state.view.state in UNSURE
