# SPDX-License-Identifier: Apache-2.0
"""Floods on each socket of a patched engine: the reports, and the greetings before and after it is followed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from kvrouter.events.patch.hello import greet
from kvrouter.events.patch.subscriber import ReportSubscriber
from kvrouter.events.vllm.stream_items import Connected, Disconnected, Flooded
from tests.support.fake_reporter import FakeReporter
from tests.support.flooding import flooding

TIMEOUT_S = 60.0


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context[zmq.Socket[bytes]]() as instance:
        yield instance


async def until(subscriber: ReportSubscriber, *kinds: type) -> list[Any]:
    """Return the items up to the one with which each of these kinds has come."""
    items: list[Any] = []
    async with asyncio.timeout(TIMEOUT_S):
        while not all(any(isinstance(item, kind) for item in items) for kind in kinds):
            items += await subscriber.next()
    return items


@pytest.mark.parametrize("mode", ["many_frames", "large_frames"])
async def test_reports_that_are_a_flood_are_cut_off_and_named(
    context: zmq.Context[zmq.Socket[bytes]], mode: str
) -> None:
    with flooding("zmtp_flooder.py", mode, "PUB") as (port, _):
        async with FakeReporter(context) as reporter:
            reporter.reports_said = f"tcp://127.0.0.1:{port}"
            subscriber = ReportSubscriber(reporter.requests_endpoint, context=context)
            await subscriber.start()
            try:
                items = await until(subscriber, Connected, Flooded, Disconnected)
                (flood,) = (item for item in items if isinstance(item, Flooded))
                assert flood.is_live and f"127.0.0.1:{port}" in flood.reason
                # The next flood is cut off too, once the connection is back.
                await until(subscriber, Connected, Flooded)
            finally:
                await subscriber.close()


async def test_answers_that_are_a_flood_are_cut_off_and_named(
    context: zmq.Context[zmq.Socket[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    with flooding("zmtp_flooder.py", "many_frames", "ROUTER") as (port, _):
        endpoint = f"tcp://127.0.0.1:{port}"
        with caplog.at_level(logging.WARNING):
            assert await greet(endpoint, context=context, timeout_s=1.0) is None
        assert any(endpoint in str(record.__dict__.get("reason")) for record in caplog.records)
        subscriber = ReportSubscriber(endpoint, context=context)
        await subscriber.start()
        try:
            items = await until(subscriber, Flooded)
            assert all(not item.is_live for item in items if isinstance(item, Flooded))
        finally:
            await subscriber.close()
