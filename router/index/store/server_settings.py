# SPDX-License-Identifier: Apache-2.0
"""The settings and the memory of the store's servers, which show dangers to the index."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from kvrouter.router.base.redis_client.errors import ReplyError, StoreError
from kvrouter.router.base.redis_client.resp import command, info_field
from kvrouter.router.base.redis_client.servers import Servers

# The limit for each of three small queries. If a server takes longer, the tasks that follow its logs report it.
TIMEOUT_S = 2.0


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one server.

    A value is empty or None if the server does not show it, or does not let this router read it.
    """

    # Its maxmemory-policy.
    policy: str = ""
    # Memory in use.
    used_bytes: int | None = None
    # Its maxmemory, or without one the machine's memory.
    limit_bytes: int | None = None
    has_maxmemory: bool = False
    # Whether it keeps an append-only file.
    appends: bool | None = None
    # When it writes snapshots; empty: never.
    save: str | None = None
    # The last failure of its persistence.
    failing: str = ""
    # The folder in which it keeps its data files (`dir`).
    directory: str = ""
    # Its clock, since 1970.
    time_s: float | None = None
    # Commands that the router's user may not use.
    refused: tuple[str, ...] = ()


async def server_settings(servers: Servers) -> dict[str, ServerSettings]:
    """Return the settings of every server, by address. Raises StoreError if a server does not answer."""
    refused: list[str] = []
    replies: dict[str, dict[str, Any]] = {}
    for name, orders in (
        ("INFO", (command("INFO"),)),
        # One name in each command, because servers before Redis 7 accept no more.
        ("CONFIG", (command("CONFIG", "GET", "save"), command("CONFIG", "GET", "dir"))),
        ("TIME", (command("TIME"),)),
    ):
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answers = await servers.each(*orders)
        except TimeoutError:
            raise StoreError(f"{name} was not answered in {TIMEOUT_S:g} s") from None
        except ReplyError:
            # NOPERM, or a server where the command is renamed or forbidden for all.
            refused.append(name)
            continue
        for address, (first, *rest) in answers.items():
            replies.setdefault(address, {})[name] = first
            if rest:
                replies[address]["dir"] = rest[0]
    if not replies:
        return {"": ServerSettings(refused=tuple(refused))}
    return {address: _read(reply, tuple(refused)) for address, reply in replies.items()}


def _read(reply: dict[str, Any], refused: tuple[str, ...]) -> ServerSettings:
    info = reply.get("INFO", b"")
    limit = _number(info_field(info, "maxmemory"))
    appends = info_field(info, "aof_enabled")
    failing = [
        name
        for name in ("rdb_last_bgsave_status", "aof_last_write_status", "aof_last_bgrewrite_status")
        if info_field(info, name) == "err"
    ]
    return ServerSettings(
        policy=info_field(info, "maxmemory_policy"),
        used_bytes=_number(info_field(info, "used_memory")),
        limit_bytes=limit or _number(info_field(info, "total_system_memory")) or None,
        has_maxmemory=bool(limit),
        appends=None if appends not in ("0", "1") else appends == "1",
        save=_configured(reply.get("CONFIG")),
        directory=_configured(reply.get("dir")) or "",
        failing=", ".join(failing),
        time_s=_time(reply.get("TIME")),
        refused=refused,
    )


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None


def _configured(reply: Any) -> str | None:
    """Return the value of an answer to CONFIG, which has names and values in turn."""
    if not isinstance(reply, list) or len(reply) != 2 or not isinstance(reply[1], bytes):
        return None
    return reply[1].decode(errors="replace")


def _time(reply: Any) -> float | None:
    try:
        seconds, micros = reply
        return int(seconds) + int(micros) / 1e6
    except (TypeError, ValueError):
        return None
