# SPDX-License-Identifier: Apache-2.0
"""Messages read with libzmq's own functions are those that pyzmq reads, within the same budgets."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.events.transport import libzmq
from kvrouter.events.transport.link import _read
from kvrouter.router.base.common.compiled import wanted
from tests.support.examples import examples

MAX_FRAMES = 4
MAX_MESSAGE_BYTES = 300
FRAMES = st.binary(max_size=8) | st.integers(0, 301).map(bytes)
MESSAGES = st.lists(st.lists(FRAMES, min_size=1, max_size=5), max_size=12)
NUMBERS = itertools.count()
Read = Callable[..., tuple[list[list[bytes]], int, int] | None]

pytestmark = pytest.mark.skipif(not wanted(), reason="uncompiled, it leaves all to pyzmq")


@pytest.fixture(scope="module")
def context() -> Iterator[zmq.Context[Any]]:
    with zmq.Context[Any]() as made:
        yield made


def readings(
    context: zmq.Context[Any], read: Read, messages: list[list[bytes]], budgets: list[tuple[int, int]]
) -> list[Any]:
    """Send the messages, and return what the reader makes of them until it ends."""
    with context.socket(zmq.PUSH) as sender, context.socket(zmq.PULL) as receiver:
        # ZMQ frees a name some time after its socket is closed.
        name = f"inproc://messages-{next(NUMBERS)}"
        receiver.bind(name)
        sender.connect(name)
        for message in messages:
            sender.send_multipart(message)
        found = []
        for most, most_bytes in [*budgets, (100, 1 << 20)]:
            found.append(read(receiver, most, most_bytes, MAX_FRAMES, MAX_MESSAGE_BYTES))
            if found[-1] is None or found[-1][1] not in (libzmq.SPENT, libzmq.EMPTY):
                break
        return found


@settings(max_examples=examples(300))
@given(MESSAGES, st.lists(st.tuples(st.integers(1, 5), st.integers(1, 400)), max_size=5))
def test_both_read_the_same(
    context: zmq.Context[Any], messages: list[list[bytes]], budgets: list[tuple[int, int]]
) -> None:
    assert readings(context, libzmq.read, messages, budgets) == readings(context, _read, messages, budgets)


def test_a_socket_that_cannot_be_read_is_left_to_pyzmq(context: zmq.Context[Any]) -> None:
    socket = context.socket(zmq.PULL)
    socket.close()
    for unreadable in (socket, object(), None):
        assert libzmq.read(unreadable, 1, 1, 1, 1) is None
    with context.socket(zmq.PUSH) as sender:
        # A socket that only sends has no messages, and says so with another error than an empty one.
        assert libzmq.read(sender, 1, 1, 1, 1) == ([], libzmq.FAILED, 0)
        with pytest.raises(zmq.ZMQError):
            _read(sender, 1, 1, 1, 1)
