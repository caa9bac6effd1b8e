# SPDX-License-Identifier: Apache-2.0
"""The store, the routers on it, and which router follows which worker, as this process sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvrouter.contract.store import FollowedWorker, RouterView, StoreReply, StoreServer
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.follow.fleet.heartbeat import LATE_MS, Heartbeat
from kvrouter.router.index.store.keys import worker_tag
from kvrouter.router.index.store.server_settings import ServerSettings


def store_reply(
    *,
    workers: Sequence[WorkerKey],
    heartbeats: Mapping[str, Heartbeat],
    token: str,
    servers: Mapping[str, ServerSettings],
    problem: str,
    is_private: bool,
) -> StoreReply:
    """Return the reply about the store. `token` is that of this process among `heartbeats`."""
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
            StoreServer(
                address,
                settings.policy,
                settings.used_bytes,
                settings.limit_bytes,
                settings.appends,
                settings.save,
                settings.failing,
            )
            for address, settings in sorted(servers.items())
        ],
        routers,
        [_followed(worker, False) for tag, worker in sorted(by_tag.items()) if tag not in followed],
    )


def _followed(worker: WorkerKey, is_late: bool) -> FollowedWorker:
    return FollowedWorker(worker.worker_id, worker.dp_rank, worker.model, is_late)
