# SPDX-License-Identifier: Apache-2.0
"""The decision which workers to register and to withdraw, for one source at a time. Pure.

Every router process decides alike. The plan compares the workers that the source shows with the registered ones, so it
heals whatever happened in between, and repeating it changes nothing. A source withdraws only workers that are
registered as its own, and only workers that no other living router sees in a source of that name, because routers may
have different lists, and one of the lists may be behind.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TypeAlias

import msgspec

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.source_precedence import wins

# A worker's id and rank, which are unique among all registered workers of all models.
Name: TypeAlias = tuple[str, int]


class ReconcilePlan(msgspec.Struct, frozen=True):
    """The changes that make the registry agree with one source."""

    register: list[Registration] = []
    withdraw: list[WorkerKey] = []
    # The workers that are registered as the source describes them.
    agreed: list[Registration] = []
    # The workers that a source with precedence, or another router, describes differently, with the reasons.
    contested: dict[Name, str] = {}

    @property
    def disputes(self) -> bool:
        """Whether the plan depends on the claims of other routers."""
        return bool(self.withdraw or self.register)


def name_of(registration: Registration) -> Name:
    """Return the worker's id and rank."""
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
    """Return the changes that make the registry agree with one source.

    Args:
        source: The source's name.
        shown: All workers that the source shows now. If two have the same name, the first counts.
        only_known: The names of the shown workers that matter only if they are registered already.
        registered: All registered workers.
        asserted: For each of the source's workers, the registration that this process last made or saw.
        claimed: The names of the workers that other living routers see in a source of this name.
    """
    registered_by_name = {name_of(registration): registration for registration in registered}
    result = ReconcilePlan()
    seen: set[Name] = set()
    for wanted in shown:
        name = name_of(wanted)
        if name in seen:
            result.contested[name] = f"{source} names it twice: the first counts"
            continue
        seen.add(name)
        current = registered_by_name.get(name)
        if name in only_known and (current is None or current.source != source):
            continue
        if current is None:
            result.register.append(wanted)
            continue
        if current.source != source and not wins(source, current.source):
            result.contested[name] = f"{current.source} registers it, too, and takes precedence"
            continue
        if current.url == wanted.url:
            # While the engine is the same, the state that a client set with PATCH and the detected kind of engine stay.
            wanted = msgspec.structs.replace(wanted, draining=current.draining, engine=wanted.engine or current.engine)
        if current == wanted:
            result.agreed.append(wanted)
            continue
        if current.source == source and name in claimed and _same(asserted.get(name), wanted):
            # This process registered the worker so before, and another router changed it since. To register it again
            # would repeat forever.
            if msgspec.structs.replace(current, note=wanted.note) == wanted:
                continue
            result.contested[name] = f"another router's {source} describes it differently: give all routers the same"
            continue
        result.register.append(wanted)
    for name, current in registered_by_name.items():
        if current.source == source and name not in seen and name not in claimed:
            result.withdraw.append(current.worker)
    return result


def _same(asserted: Registration | None, wanted: Registration) -> bool:
    """Return whether both registrations are equal, apart from `draining` and an engine that only one of them names."""
    return (
        asserted is not None
        and msgspec.structs.replace(asserted, draining=wanted.draining, engine=asserted.engine or wanted.engine)
        == wanted
    )
