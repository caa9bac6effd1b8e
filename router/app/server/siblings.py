# SPDX-License-Identifier: Apache-2.0
"""The exchange between several processes behind one port: metrics for a common page, and decisions of other processes.

A request reaches any one of the processes. Each listens on a unix socket: a connection sends one line, the name of a
decision, the filter of a list of them, or nothing for the page of metrics, and gets the answer. The scraped process reads
all pages and labels every sample with `process`; it adds nothing up. A process that does not answer is left out, which
`kvrouter_processes_answering` shows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from kvrouter.contract.decisions import DecisionsReply
from kvrouter.router.base.telemetry.metric_registry import page_of
from kvrouter.router.observe.decisions.decision_log import DecisionFilter

# A page is some hundred kilobytes at most. A process that is busy for longer than this would delay the scrape.
ANSWER_TIMEOUT_S = 2.0
LABEL = "process"

# The id of a decision, "" for the page of metrics, or the limit and the filter of a list of decisions.
SiblingRequest = str | tuple[int, DecisionFilter]
_decode_request = msgspec.json.Decoder(SiblingRequest).decode


def socket_path(folder: Path, number: int) -> Path:
    """Return the path of the unix socket of the process with this number."""
    return folder / f"sibling-{number}.sock"


class Siblings:
    """This process and the others of one supervisor, by number.

    `own_page` returns this process's metrics, `own_decision` the reply about one decision of this process, or None, and
    `own_decisions` the reply with its last decisions.
    """

    def __init__(self, folder: Path, number: int, count: int, own_page: Callable[[], Awaitable[bytes]]) -> None:
        self._folder = folder
        self._number = number
        self._count = count
        self._own_page = own_page
        self.own_decision: Callable[[str], Any] = lambda name: None
        self.own_decisions: Callable[[int, DecisionFilter], Any] = lambda most, wanted: DecisionsReply([])
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen on this process's socket."""
        path = socket_path(self._folder, self._number)
        # A previous process with this number may have left its socket there.
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._answer, path)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                request = _decode_request(await reader.readline())
                if not request:
                    writer.write(await self._own_page())
                elif isinstance(request, str):
                    writer.write(self._decision(request))
                else:
                    writer.write(msgspec.json.encode(self.own_decisions(*request)))
                await writer.drain()
        except (ConnectionError, TimeoutError, ValueError, msgspec.MsgspecError):
            # The reader is gone, or gave up waiting.
            pass
        finally:
            writer.close()

    def _decision(self, name: str) -> bytes:
        reply = self.own_decision(name)
        return b"" if reply is None else msgspec.json.encode(reply)

    async def page(self) -> bytes:
        """Return one page with the metrics of all processes that answer."""
        pages = {self._number: await self._own_page(), **await self._ask_others("")}
        return merged({number: page for number, page in sorted(pages.items()) if page})

    async def decision(self, name: str) -> bytes | None:
        """Return, as JSON, the reply of the other process that made the decision; None if none of them did."""
        if not name:
            return None
        return next((reply for reply in (await self._ask_others(name)).values() if reply), None)

    async def decisions(self, most: int, wanted: DecisionFilter) -> list[bytes]:
        """Return the other processes' replies with their last decisions, each as JSON."""
        return [reply for reply in (await self._ask_others((most, wanted))).values() if reply]

    async def _ask_others(self, request: SiblingRequest) -> dict[int, bytes]:
        others = [number for number in range(self._count) if number != self._number]
        answers = await asyncio.gather(*(self._ask(number, request) for number in others))
        return dict(zip(others, answers, strict=True))

    async def _ask(self, number: int, request: SiblingRequest) -> bytes:
        """Return the answer of one process; empty if it has none or does not answer in time."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(socket_path(self._folder, number))
                try:
                    writer.write(msgspec.json.encode(request) + b"\n")
                    return await reader.read(-1)
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return b""

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()


def merged(pages: dict[int, bytes]) -> bytes:
    """Return one page made of several, with every sample labelled with the number of its process."""
    families: dict[str, Metric] = {}
    for number, page in pages.items():
        for family in text_string_to_metric_families(page.decode()):
            metric = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                metric.add_sample(sample.name, {**sample.labels, LABEL: str(number)}, sample.value)
    text = "Processes of this router whose metrics are on this page"
    return page_of([*families.values(), GaugeMetricFamily("kvrouter_processes_answering", text, value=len(pages))])
