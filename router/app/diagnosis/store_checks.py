# SPDX-License-Identifier: Apache-2.0
"""Checks of Redis: whether it answers, and whether it will keep its data. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from kvrouter.contract.diagnosis import Finding
from kvrouter.router.app.diagnosis.clocks import SET_CLOCKS, clock_difference
from kvrouter.router.app.diagnosis.snapshot import Snapshot, StoreFacts
from kvrouter.router.index.store.server_settings import ServerSettings
from kvrouter.router.model.config.cautions import evicting
from kvrouter.router.observe.findings.finding import argument, found

# The share of the limit from which memory counts as short. A fleet's index grows with the blocks of its engines, and a
# server at its limit refuses commits.
NEAR_SHARE = 0.9
MIB = 1024**2


def store_findings(snapshot: Snapshot) -> Iterator[Finding]:
    """Yield the findings about the store and its servers."""
    store = snapshot.store
    # A store that answers nothing takes no commit either.
    for problem in (store.problem,) if store.problem else store.unwritten:
        yield found("KV501", "Redis", problem)
    for problem in store.unreadable:
        yield found("KV506", "Redis", problem)
    for problem in store.schemas:
        yield found("KV507", "Redis", problem)
    if store.lost:
        yield found("KV508", "fleet", store.lost)
    for address, server in store.servers.items():
        yield from _of_server(f"Redis at {address}" if address else "Redis", address, server, store, snapshot.time_s)


def _of_server(
    subject: str, address: str, server: ServerSettings, store: StoreFacts, time_s: float
) -> Iterator[Finding]:
    cli = _client(address)
    if (caution := evicting(address, server.policy)) is not None:
        yield found(
            "KV502", subject, caution, f"{cli} CONFIG SET maxmemory-policy noeviction, and the same in redis.conf"
        )
    if server.failing:
        yield found(
            "KV503",
            subject,
            f"it could not write its data to disk ({server.failing}: err)",
            f"free space on its disk{_df(server.directory)}, and look into its log",
        )
    elif server.appends is False and server.save == "":
        yield found(
            "KV503",
            subject,
            "it neither appends (appendonly no) nor saves (save is empty): after its restart the workers that registered "
            "themselves are gone, and all is learned again",
            f"{cli} CONFIG SET appendonly yes, and the same in redis.conf",
        )
    used, limit = server.used_bytes, server.limit_bytes
    if used is not None and limit is not None and used > NEAR_SHARE * limit:
        whose = "its maxmemory" if server.has_maxmemory else "the machine's memory (it has no maxmemory)"
        yield found(
            "KV504",
            subject,
            f"it uses {used / MIB:.0f} MiB of {limit / MIB:.0f} MiB, {whose}: at the limit it takes no commits, and other routers "
            "learn nothing",
            f"{cli} CONFIG SET maxmemory BYTES with more, or move it to a larger machine",
        )
    if server.time_s is not None and (differs := clock_difference(server.time_s - time_s)) is not None:
        yield found("KV603", subject, f"its clock is {differs} this router's", SET_CLOCKS)
    # INFO is enough to know of an append-only file, so a refused CONFIG matters only without one.
    hidden = [name for name in server.refused if name != "CONFIG" or not server.appends]
    if hidden and not store.is_private:
        yield found(
            "KV505",
            subject,
            f"the router's user may not use {', '.join(hidden)}, so eviction, persistence, memory or clock are not known here",
            f"{cli} ACL SETUSER NAME +info +config|get +time, or check these settings by hand",
        )


def _df(directory: str) -> str:
    return f" (there: df -h {argument(directory)})" if directory else ""


def _client(address: str) -> str:
    host, _, port = address.rpartition(":")
    if host:
        return f"redis-cli -h {argument(host)} -p {argument(port)}"
    return f"redis-cli -s {argument(address)}" if address else "redis-cli"
