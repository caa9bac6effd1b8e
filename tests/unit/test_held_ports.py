# SPDX-License-Identifier: Apache-2.0
"""The ports of a replica that is down stay reserved for it."""

from __future__ import annotations

import asyncio
import socket

import pytest
import zmq

from kvrouter.events.vllm.publisher import EventPublisher
from kvrouter.simulator.http.held_ports import held_ports
from tests.support.ports import free_port


def is_free(port: int) -> bool:
    with socket.socket() as other:
        try:
            other.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def test_nobody_answers_at_a_held_port_and_nobody_gets_it() -> None:
    port = free_port()

    async def hold() -> None:
        async with held_ports(f"tcp://127.0.0.1:{port}", "ipc:///nowhere", None):
            assert not is_free(port)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port))

    asyncio.run(hold())
    assert is_free(port)


def test_a_publisher_comes_back_to_its_ports() -> None:
    with zmq.Context[zmq.Socket[bytes]]() as context:
        endpoint = f"tcp://127.0.0.1:{free_port()}"
        EventPublisher(endpoint, context=context).close()

        async def hold() -> None:
            async with held_ports(endpoint):
                assert not is_free(int(endpoint.rpartition(":")[2]))

        asyncio.run(hold())
        with EventPublisher(endpoint, context=context) as again:
            assert again.endpoint == endpoint


def test_a_port_of_somebody_else_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrouter.simulator.http.held_ports.TRIES", 2)
    with socket.create_server(("127.0.0.1", 0)) as other:

        async def hold() -> None:
            async with held_ports(f"tcp://127.0.0.1:{other.getsockname()[1]}"):
                pass

        asyncio.run(hold())
