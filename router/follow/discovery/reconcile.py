# SPDX-License-Identifier: Apache-2.0
"""What is to be registered and what is to go, for one source at a time. Pure, and the same in every router process.

It compares what the source shows with what is registered, so it heals whatever happened in between, and doing it twice
changes nothing. A source only ever takes away what is registered as its own, and only what no other living router sees
in a source of that name: routers may be given different lists, and one of them may be behind.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TypeAlias

import msgspec

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.source_precedence import wins

# A worker's id and rank: what is unique among all that is registered, of whatever model.
Name: TypeAlias = tuple[str, int]


class ReconcilePlan(msgspec.Struct, frozen=True):
    """What is to be done. agreed: of whom the registry says what the source does. contested: of whom a source that
    wins, or another router, says something else, and why."""

    register: list[Registration] = []
    withdraw: list[WorkerKey] = []
    agreed: list[Registration] = []
    contested: dict[Name, str] = {}

    @property
    def disputes(self) -> bool:
        """Whether the plan depends on what other routers see."""
        return bool(self.withdraw or self.register)


def name_of(registration: Registration) -> Name:
    return registration.worker.worker_id, registration.worker.dp_rank


def plan(
    source: str,
    shown: Iterable[Registration],
    only_known: Collection[Name],
    registered: Iterable[Registration],
    *,
    asserted: Mapping[Name, Registration],
    claimed: Collection[Name],
) -> ReconcilePlan:
    """shown: all that the source shows now; of two with one name the first counts. only_known: those of them that are
    of interest only if they are registered. asserted: what of this source this process last registered, or saw
    registered. claimed: what other living routers see in a source of this name."""
    known = {name_of(one): one for one in registered}
    found = ReconcilePlan()
    seen: set[Name] = set()
    for wanted in shown:
        name = name_of(wanted)
        if name in seen:
            found.contested[name] = f"{source} names it twice: the first counts"
            continue
        seen.add(name)
        now = known.get(name)
        if name in only_known and (now is None or now.source != source):
            continue
        if now is None:
            found.register.append(wanted)
            continue
        if now.source != source and not wins(source, now.source):
            found.contested[name] = f"{now.source} registers it, too, and takes precedence"
            continue
        if now.url == wanted.url:
            # What a client said with PATCH, and what was found out of it, stay while it is the same engine.
            wanted = msgspec.structs.replace(wanted, draining=now.draining, engine=wanted.engine or now.engine)
        if now == wanted:
            found.agreed.append(wanted)
            continue
        if now.source == source and name in claimed and _same(asserted.get(name), wanted):
            # It was said already, and another router said otherwise after that: saying it again would go on for ever.
            if msgspec.structs.replace(now, note=wanted.note) == wanted:
                continue
            found.contested[name] = f"another router's {source} describes it differently: give all routers the same"
            continue
        found.register.append(wanted)
    for name, now in known.items():
        if now.source == source and name not in seen and name not in claimed:
            found.withdraw.append(now.worker)
    return found


def _same(asserted: Registration | None, wanted: Registration) -> bool:
    return (
        asserted is not None
        and msgspec.structs.replace(asserted, draining=wanted.draining, engine=asserted.engine or wanted.engine)
        == wanted
    )
