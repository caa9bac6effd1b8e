# SPDX-License-Identifier: Apache-2.0
"""The metrics of several processes behind one port, on one page.

A scrape reaches any one of them. Each serves its own page on a unix socket; the scraped process reads all pages and
labels every sample with `process`, without adding anything up. A process that does not answer is left out, which
`kvrouter_processes_answering` shows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

# A page is some hundred kilobytes at most, and a sibling that is busy for longer than this would hold the scrape up.
ANSWER_TIMEOUT_S = 2.0
LABEL = "process"


def socket_path(folder: Path, number: int) -> Path:
    return folder / f"metrics-{number}.sock"


class SiblingMetrics:
    """This process and the others of one supervisor, by number. `own` is this process's page."""

    def __init__(self, folder: Path, number: int, count: int, own: Callable[[], Awaitable[bytes]]) -> None:
        self._folder = folder
        self._number = number
        self._count = count
        self._own = own
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Sends this process's page to every connection."""
        path = socket_path(self._folder, self._number)
        # Left there by the process that had this number before.
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._tell, path)

    async def _tell(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(await self._own())
            await writer.drain()
        except ConnectionError:
            # The reader is gone, or gave up waiting.
            pass
        finally:
            writer.close()

    async def page(self) -> bytes:
        """The pages of all that answer, as one."""
        numbers = range(self._count)
        pages = await asyncio.gather(*(self._page_of(number) for number in numbers))
        return merged({number: page for number, page in zip(numbers, pages, strict=True) if page is not None})

    async def _page_of(self, number: int) -> bytes | None:
        if number == self._number:
            return await self._own()
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(socket_path(self._folder, number))
                try:
                    return await reader.read(-1)
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return None

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()


class _Merged(Collector):
    def __init__(self, pages: dict[int, bytes]) -> None:
        self._pages = pages

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for number, page in self._pages.items():
            for family in text_string_to_metric_families(page.decode()):
                known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    known.add_sample(sample.name, {**sample.labels, LABEL: str(number)}, sample.value)
        yield from families.values()
        text = "Processes of this router whose metrics are on this page"
        yield GaugeMetricFamily("kvrouter_processes_answering", text, value=len(self._pages))


def merged(pages: dict[int, bytes]) -> bytes:
    """One page of several, every sample labelled with the number of its process."""
    registry = CollectorRegistry()
    registry.register(_Merged(pages))
    return generate_latest(registry)
