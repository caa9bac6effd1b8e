# SPDX-License-Identifier: Apache-2.0
"""The two event streams of an engine without the engine: the stock publisher, and the patch's real `Reporter`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from typing import Any

import zmq

from kvrouter.engine_patch.reporter.reporter import Reporter
from kvrouter.engine_patch.setup.client_gate import ClientList
from kvrouter.engine_patch.setup.settings import ReporterSettings
from kvrouter.events.patch.messages import (
    DeclaredCatalog,
    DeclaredGroup,
    HashExample,
    ReportEvent,
    ReportRemoved,
    ReportStored,
    pack_hashes,
    reports_endpoint,
    requests_endpoint,
)
from tests.support.fake_engine import BLOCK, SCHEME, FakeEngine, hashes

# A short interval, as tests wait for the next heartbeat.
HEARTBEAT_S = 0.1

EXAMPLE = list(range(BLOCK))


def catalog(*groups: DeclaredGroup, **given: Any) -> DeclaredCatalog:
    """Return the catalog that a patched engine of these groups declares; without groups, one of full attention."""
    fields: dict[str, Any] = {
        "hash_block_size": BLOCK,
        "scheduler_block_size": BLOCK,
        "align": BLOCK,
        "partial_hits": False,
        "hash_algo": SCHEME.algo,
        "none_hash": SCHEME.none_hash.hex(),
        "hash_example": HashExample(EXAMPLE, hashes(EXAMPLE)[0]),
    }
    return DeclaredCatalog(groups=list(groups) or [DeclaredGroup(0, "full_attention", BLOCK)], **(fields | given))


def stores(chain: list[int], group: int = 0, medium: str = "GPU") -> ReportStored:
    return ReportStored(pack_hashes(chain), group, medium, BLOCK)


def removes(chain: list[int], group: int = 0, medium: str = "GPU") -> ReportRemoved:
    return ReportRemoved(pack_hashes(chain), group, medium)


class PatchedEngine(FakeEngine):
    """A `FakeEngine` with the patch: `report` sends events over the patch's topic, `publish` over the engine's own."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], *, patched: bool = True, **options: Any) -> None:
        super().__init__(context, **options)
        self.reporter: Reporter | None = None
        self.reported = 0
        if patched:
            self.patch()

    def patch(
        self,
        declared: DeclaredCatalog | None = None,
        *,
        curve_secret: bytes | None = None,
        clients: ClientList | None = None,
        **settings: Any,
    ) -> None:
        """Start a `Reporter`, which begins an epoch.

        Args:
            declared: The catalog; None for that of one full-attention group.
            curve_secret: As `Reporter` has it.
            clients: As `Reporter` has it.
            **settings: Further fields of `ReporterSettings`.
        """
        requests, reports = requests_endpoint(self.endpoint), reports_endpoint(self.endpoint)
        assert requests is not None and reports is not None
        self.reported = 0
        self.reporter = Reporter(
            requests=requests,
            reports=reports,
            settings=ReporterSettings(heartbeat_s=HEARTBEAT_S, **settings),
            context=self._context,
            wall_clock=time.time,
            clock=time.monotonic,
            new_epoch=lambda: secrets.token_hex(8),
            patch_version="test",
            curve_secret=curve_secret,
            clients=clients,
        )
        self.reporter.declare(declared or catalog())

    def report(self, *events: ReportEvent) -> int:
        """Send one message and return its seq."""
        assert self.reporter is not None
        report_events: Iterable[ReportEvent] = list(events)
        self.reporter.publish(lambda: report_events, self.reported)
        self.reported += 1
        return self.reported - 1

    def unpatch(self) -> None:
        if self.reporter is not None:
            self.reporter.close()
            self.reporter = None

    def close(self) -> None:
        self.unpatch()
        super().close()
