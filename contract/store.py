# SPDX-License-Identifier: Apache-2.0
"""The store, the router processes on it, and who follows whom: the answer of `/store`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvrouter.contract import fields


class StoreServer(msgspec.Struct, frozen=True):
    """A server of the store. A field is empty or null if the server does not report it."""

    address: Annotated[str, Meta(description="where the server listens")]
    policy: Annotated[str, Meta(description="its maxmemory-policy")]
    used_bytes: Annotated[int | None, Meta(description="memory that it takes")]
    limit_bytes: Annotated[int | None, Meta(description="memory that it may take")]
    appends: Annotated[bool | None, Meta(description="whether it keeps an append-only file")]
    save: Annotated[str | None, Meta(description="when it writes snapshots; empty: never")]
    failing: Annotated[str, Meta(description="what of its persistence failed last")]


class FollowedWorker(msgspec.Struct, frozen=True):
    """A worker, and whether the store is late with its changes."""

    worker_id: fields.WorkerId
    dp_rank: fields.DpRank
    model: fields.Model
    is_late: Annotated[bool, Meta(description="whether Redis lacks what its follower learned more than a second ago")]


class RouterView(msgspec.Struct, frozen=True):
    """A router process and the workers that it follows."""

    token: Annotated[str, Meta(description="names the process among the routers")]
    is_this: Annotated[bool, Meta(description="whether it is the process that answers")]
    version: Annotated[str, Meta(description="version of the router")]
    follows: Annotated[list[FollowedWorker], Meta(description="the workers whose leases it holds")]
    refuses: Annotated[int, Meta(description="how many workers it will not follow")]


class StoreReply(msgspec.Struct, frozen=True):
    """The store and the router processes on it."""

    is_private: Annotated[bool, Meta(description="whether the store is this router's own server")]
    problem: Annotated[str, Meta(description="why Redis is not heard; empty if it is")]
    servers: Annotated[list[StoreServer], Meta(description="the servers of the store")]
    routers: Annotated[list[RouterView], Meta(description="the router processes that live")]
    unfollowed: Annotated[list[FollowedWorker], Meta(description="workers that no router follows")]
