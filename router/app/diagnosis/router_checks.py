# SPDX-License-Identifier: Apache-2.0
"""Checks of this router and of the other routers on the same Redis. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from kvrouter.contract.diagnosis import Finding, Severity
from kvrouter.router.app.diagnosis.snapshot import Snapshot
from kvrouter.router.base.common.escaping import printable
from kvrouter.router.observe.findings.finding import found
from kvrouter.router.observe.findings.subject import Subject

# How many characters of differing values, and how many values, are shown: enough to see the difference. Any program may
# have written a heartbeat in Redis.
SHOWN_CHARS = 60
MAX_SHOWN = 8


def router_findings(snapshot: Snapshot) -> Iterator[Finding]:
    """Yield the findings about this router, its sources of workers and the other routers."""
    if snapshot.is_open is not None:
        yield found("KV006", "router", snapshot.is_open)
    if snapshot.uncompiled is not None:
        yield found("KV007", "router", snapshot.uncompiled)
    for problem in snapshot.task_problems:
        yield found("KV008", "router", problem)
    for problem in snapshot.unused_files:
        yield found("KV010", "router", problem)
    for caution in snapshot.unapplied:
        yield found("KV012", "router", caution)
    for expiry, severity in ((snapshot.expiry_problem, Severity.ERROR), (snapshot.expiry_caution, Severity.WARNING)):
        if expiry is not None:
            yield found("KV011", "router", expiry, severity=severity)
    # Routers share their load through the store. While the store is away, KV501 reports that, and a single router has
    # no load to share.
    is_away = bool(snapshot.store.problem or snapshot.store.unwritten)
    if len(snapshot.routers) > 1 and not is_away:
        for problem in snapshot.load_problems:
            yield found("KV604", "router", problem)
    for source, problem in snapshot.source_problems:
        yield found("KV605", f"source {source}", problem)
    for source, (worker_id, dp_rank), reason in snapshot.contested:
        yield found("KV606", Subject.of_listed(worker_id, dp_rank, source), reason)
    yield from _of_peers(snapshot)


def _of_peers(snapshot: Snapshot) -> Iterator[Finding]:
    versions = {token: word.version for token, word in snapshot.routers.items()}
    if len(set(versions.values())) > 1:
        yield found("KV601", "routers", _listed(versions, snapshot.token))
    own = snapshot.routers.get(snapshot.token)
    # Settings that only a heartbeat in Redis names belong to another version.
    for name in sorted(own.settings if own is not None else ()):
        values = {token: word.settings[name] for token, word in snapshot.routers.items() if name in word.settings}
        if len(set(values.values())) > 1:
            yield found(
                "KV602",
                f"setting {name}",
                _listed(values, snapshot.token),
                f"start all routers on this Redis with the same {name}",
            )


def _listed(values: dict[str, str], own: str) -> str:
    """Return which router has which value: this router first, and one router for each of the other values."""
    parts = []
    for value in dict.fromkeys([values[own], *sorted(values.values())]):
        tokens = sorted((token for token in values if values[token] == value), key=lambda token: (token != own, token))
        name = "this router" if tokens[0] == own else f"router {printable(tokens[0])}"
        more = f" (and {len(tokens) - 1} more)" if len(tokens) > 1 else ""
        parts.append(f"{name}{more} has {_shown(value)}")
    return "; ".join(parts[:MAX_SHOWN]) + ("; and others" if len(parts) > MAX_SHOWN else "")


def _shown(value: str) -> str:
    """Return a text from Redis, which may have any length, as it can be shown."""
    cut = value if len(value) <= SHOWN_CHARS else f"{value[:SHOWN_CHARS]}..."
    return printable(cut) or "none that it names"
