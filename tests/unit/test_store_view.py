# SPDX-License-Identifier: Apache-2.0
"""Followers by heartbeat: routers with workers that this process does not know, and workers without a follower."""

from __future__ import annotations

from kvrouter.contract.store import FollowedWorker
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.follow.fleet.heartbeat import VERSION, Heartbeat, Hold
from kvrouter.router.index.store.keys import worker_tag
from kvrouter.router.index.store.server_settings import ServerSettings
from kvrouter.router.observe.findings.store_view import store_reply

A, B, C = (WorkerKey("m", "a"), WorkerKey("m", "b", 1), WorkerKey("n/{x}", "c"))


def beat(holds: dict[WorkerKey, int], late: list[WorkerKey], refuses: int = 0) -> Heartbeat:
    holds_by_tag = {
        worker_tag(worker): Hold(lease, 0, 2_000 if worker in late else 0) for worker, lease in holds.items()
    }
    return Heartbeat(1, VERSION, holds_by_tag, {str(i): "why" for i in range(refuses)}, "0.1.0")


def test_each_worker_is_shown_with_the_holder_of_its_lease() -> None:
    unknown = WorkerKey("m", "gone")
    reply = store_reply(
        workers=[A, B, C],
        heartbeats={"second": beat({B: 3, unknown: 4}, [B], refuses=2), "first": beat({}, [])},
        token="first",
        servers={"10.0.0.1:6379": ServerSettings(policy="noeviction", used_bytes=5, limit_bytes=10)},
        problem="",
        is_private=False,
    )
    first, second = reply.routers
    assert (first.token, first.is_this, first.follows) == ("first", True, [])
    assert (second.token, second.is_this, second.refuses) == ("second", False, 2)
    assert second.follows == [FollowedWorker("b", 1, "m", True)]
    assert reply.unfollowed == [FollowedWorker("a", 0, "m", False), FollowedWorker("c", 0, "n/{x}", False)]
    assert [(server.address, server.policy, server.used_bytes) for server in reply.servers] == [
        ("10.0.0.1:6379", "noeviction", 5)
    ]
