# SPDX-License-Identifier: Apache-2.0
"""The store, the routers on it, and who follows whom, as this process sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.follow.fleet.heartbeat import LATE_MS, Heartbeat
from kvrouter.router.index.store.keys import worker_tag
from kvrouter.router.index.store.server_settings import ServerSettings


class StoreServer(msgspec.Struct, frozen=True):
    """A server of the store. Empty and null: it does not say."""

    address: str
    policy: str
    used_bytes: int | None
    limit_bytes: int | None
    appends: bool | None
    save: str | None
    failing: str


class FollowedWorker(msgspec.Struct, frozen=True):
    """is_late: the store lacks what its follower learned more than a second ago."""

    worker_id: str
    dp_rank: int
    model: str
    is_late: bool


class RouterView(msgspec.Struct, frozen=True):
    """A router process. is_this: it is the one that answers; refuses: workers that it will not follow."""

    token: str
    is_this: bool
    version: str
    follows: list[FollowedWorker]
    refuses: int


class StoreReply(msgspec.Struct, frozen=True):
    """problem: why Redis is not heard; is_private: it is this router's own server; unfollowed: workers that no router
    follows."""

    is_private: bool
    problem: str
    servers: list[StoreServer]
    routers: list[RouterView]
    unfollowed: list[FollowedWorker]


def store_reply(
    *,
    workers: Sequence[WorkerKey],
    heartbeats: Mapping[str, Heartbeat],
    token: str,
    servers: Mapping[str, ServerSettings],
    problem: str,
    is_private: bool,
) -> StoreReply:
    """token: of this process among heartbeats."""
    by_tag = {worker_tag(worker): worker for worker in workers}
    routers, followed = [], set[str]()
    for name, beat in sorted(heartbeats.items()):
        holds = sorted(tag for tag in beat.holds if tag in by_tag)
        followed.update(holds)
        follows = [_followed(by_tag[tag], beat.holds[tag].waits_ms > LATE_MS) for tag in holds]
        routers.append(RouterView(name, name == token, beat.software, follows, len(beat.refuses)))
    return StoreReply(
        is_private,
        problem,
        [
            StoreServer(address, one.policy, one.used_bytes, one.limit_bytes, one.appends, one.save, one.failing)
            for address, one in sorted(servers.items())
        ],
        routers,
        [_followed(worker, False) for tag, worker in sorted(by_tag.items()) if tag not in followed],
    )


def _followed(worker: WorkerKey, is_late: bool) -> FollowedWorker:
    return FollowedWorker(worker.worker_id, worker.dp_rank, worker.model, is_late)
