# SPDX-License-Identifier: Apache-2.0
"""The registrations of the former schema, taken over during a rolling upgrade (ADR 42).

While routers of two schemas share a Redis, each worker that is registered under the former schema is registered here
once, and so is each later registration or removal there. Nothing else of the former schema is read: this router learns
the content of the workers again from the engines.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvrouter.router.base.common import ticks
from kvrouter.router.base.common.errors import Conflict, RouterError
from kvrouter.router.base.common.escaping import printable
from kvrouter.router.base.common.version import VERSION
from kvrouter.router.base.redis_client.errors import StoredValueError, StoreError
from kvrouter.router.follow.fleet.fleet import Fleet
from kvrouter.router.follow.fleet.fleet_metrics import FleetMetrics
from kvrouter.router.index.store import keys, registry
from kvrouter.router.index.store.schemas import Schemas

log = logging.getLogger("kvrouter.fleet")

# The seconds between two searches for workers that a router of the former schema registers. A search takes three small
# commands.
LOOK_S = 1.0
# When to retry registrations that could not be taken over: a setting of another router, or the number of workers, may
# have changed.
RETRY_S = 10.0

# Why a worker is not taken over that is registered in the former schema alone, where it is not known what was taken over.
RECORD_LOST = (
    "Redis lost the record of what was taken over, so it was unregistered here, or registered there since: register it "
    "here, or unregister it there"
)

# The code of the error if a source that takes precedence describes the worker differently, or would bring it back.
SETTLED = "kept_by_source"


class Adoption:
    """The takeover of the former schema's registrations."""

    def __init__(self, fleet: Fleet, schemas: Schemas, *, metrics: FleetMetrics, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._schemas = schemas
        self._metrics = metrics
        self._clock = clock
        # The version of the former registry at the last takeover, and when the takeover was tried.
        self._version: int | None = None
        self._tried_s = 0.0
        # Why registrations of the former schema are not taken over, a sentence for each.
        self.problems: list[str] = []
        # Which other schemas Redis holds, a sentence for each.
        self.cautions: list[str] = []

    async def watch(self) -> None:
        """Call `look` once a second, until cancelled.

        Each look also notes this schema's number again in a store that lost everything.
        """
        while True:
            await ticks.sleep(LOOK_S)
            try:
                await self.look()
            except StoreError as error:
                log.debug("schemas not read", extra={"error": str(error)})

    async def look(self) -> None:
        """Take over changes of the former registry, and note which schemas Redis holds. Raises StoreError."""
        seen = await self._schemas.look(VERSION, has_adopted=self._version is not None)
        version = seen.former_version
        self._show(seen.newer, version is not None)
        if version is None:
            self._take_problems([])
        elif version != self._version or (self.problems and self._clock() > self._tried_s + RETRY_S):
            self._tried_s = self._clock()
            self._take_problems(await self._adopt(version, seen.is_adopted))
            self._version = version

    def _show(self, newer: dict[int, str], has_former: bool) -> None:
        cautions = []
        if newer:
            number, software = max(newer.items())
            cautions.append(
                f"Redis also holds schema {number}, which a router of version {printable(software)} began: this router keeps "
                f"to schema {keys.SCHEMA} and touches nothing of it; upgrade this router, or see docs/how-to/upgrade.md if "
                "you went back"
            )
        if has_former:
            cautions.append(
                f"Redis also holds schema {keys.FORMER_SCHEMA} of an earlier version: its registrations are taken over, and "
                "its index is void here; when no router of that version runs, remove it (docs/how-to/upgrade.md)"
            )
        for caution in cautions:
            if caution not in self.cautions:
                log.warning(caution)
        self.cautions = cautions
        self._metrics.schemas_present["newer"].set(bool(newer))
        self._metrics.schemas_present["former"].set(has_former)

    def _take_problems(self, problems: list[str]) -> None:
        for problem in problems:
            if problem not in self.problems:
                log.error("registration not taken over", extra={"reason": problem})
        self.problems = problems
        self._metrics.registrations_left.set(len(problems))

    async def _adopt(self, version: int, before: bool) -> list[str]:
        """Take over the former registry; return why some registrations were not taken over.

        Args:
            version: The version of the former registry.
            before: Whether it was taken over before.
        """
        former, unreadable = await self._schemas.former()
        adopted = await self._schemas.adopted()
        is_lost = before and adopted.version is None
        problems = [_problem(str(error)) for error in unreadable]
        taken = 0
        for worker, raw in former.items():
            if adopted.workers.get(keys.worker_tag(worker)) == raw:
                continue
            if is_lost:
                # Whether the registration here is newer is not known.
                if self._fleet.knows(worker):
                    await self._schemas.adopt(worker, raw)
                else:
                    problems.append(_problem(f"worker {printable(worker.route_name)}: {RECORD_LOST}"))
                continue
            try:
                await self._fleet.register(registry.decode(worker, raw, keys.FORMER_PREFIX))
            except StoredValueError as error:
                problems.append(_problem(str(error)))
                continue
            except RouterError as error:
                if error.code != SETTLED:
                    problems.append(_problem(f"worker {printable(worker.route_name)}: {error.message}"))
                    continue
            await self._schemas.adopt(worker, raw)
            taken += 1
        tags = {keys.worker_tag(worker) for worker in former}
        gone = {tag: raw for tag, raw in adopted.workers.items() if tag not in tags}
        # A worker missing from the former schema's registry was dropped there only if the count of changes rose and
        # every entry can be read. Otherwise it was lost, and stays registered here.
        if adopted.version is not None and version > adopted.version and not unreadable:
            for tag, raw in gone.items():
                await self._drop(tag, raw)
        if not (is_lost and problems):
            await self._schemas.adopt_version(version)
        if taken:
            log.info("registrations taken over", extra={"workers": taken, "schema": keys.FORMER_SCHEMA})
        return problems

    async def _drop(self, tag: str, raw: bytes) -> None:
        """Drop a worker that was taken over, because a router of the former schema dropped it."""
        worker = registry.worker_of(raw)
        if worker is None or keys.worker_tag(worker) != tag:
            log.warning("stored value ignored", extra={"key": keys.ADOPTED, "field": tag})
            return
        try:
            await self._fleet.unregister(worker.worker_id, worker.dp_rank, worker.model)
        except Conflict as error:
            log.info("kept", extra={"worker": worker, "reason": error.message})
        await self._schemas.adopt(worker, None)


def _problem(reason: str) -> str:
    return f"schema {keys.FORMER_SCHEMA} of Redis is not all taken over: {reason}"
