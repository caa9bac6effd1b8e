# SPDX-License-Identifier: Apache-2.0
"""The I/O threads: bounded, reads first, and never in the middle of work when `close` returns."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import time
from collections.abc import Callable

import pytest

from kvrouter.engine_patch.offload.disk.format.io_threads import IoThreads

# Only a hang takes this long; nothing is measured against it.
LONG_S = 60.0
HANG_LOOKS = 1_000


def named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


class Gate:
    """Work that waits until the test lets it go."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go = threading.Event()
        self.ended = threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.go.wait(LONG_S)
        self.ended.set()


def say(order: list[str], text: str) -> Callable[[], None]:
    return lambda: order.append(text)


def test_work_is_done_and_reads_go_first() -> None:
    threads = IoThreads(1, 3, "t-order")
    gate, last, order = Gate(), Gate(), list[str]()
    last.go.set()
    assert threads.submit(gate, False)
    assert gate.begun.wait(LONG_S)
    for text, urgent in [("w1", False), ("w2", False), ("r1", True), ("r2", True)]:
        assert threads.submit(say(order, text), urgent)
    assert threads.submit(last, False)
    gate.go.set()
    assert last.ended.wait(LONG_S)
    assert order == ["r1", "r2", "w1", "w2"]
    threads.close()


def test_each_queue_is_bounded() -> None:
    threads = IoThreads(1, 2, "t-bound")
    gate = Gate()
    threads.submit(gate, True)
    assert gate.begun.wait(LONG_S)
    order: list[str] = []
    assert [threads.submit(say(order, "w"), False) for _ in range(3)] == [True, True, False]
    assert (threads.has_room(False), threads.has_room(True)) == (False, True)
    assert [threads.submit(say(order, "r"), True) for _ in range(3)] == [True, True, False]
    assert not threads.has_room(True)
    gate.go.set()
    threads.close()


def test_as_many_run_at_once_as_there_are_threads() -> None:
    threads = IoThreads(2, 8, "t-many")
    gates = [Gate() for _ in range(3)]
    for gate in gates:
        threads.submit(gate, False)
    assert gates[0].begun.wait(LONG_S) and gates[1].begun.wait(LONG_S)
    assert not gates[2].begun.is_set()
    gates[1].go.set()
    assert gates[2].begun.wait(LONG_S)
    gates[0].go.set()
    gates[2].go.set()
    threads.close()


def test_close_waits_for_what_runs_and_drops_the_rest() -> None:
    threads = IoThreads(1, 8, "t-close")
    gate, order = Gate(), list[memoryview]()
    threads.submit(gate, False)
    assert gate.begun.wait(LONG_S)
    memory = bytearray(10)
    threads.submit(functools.partial(order.append, memoryview(memory)), False)
    closing = threading.Thread(target=threads.close)
    closing.start()
    while threads.has_room(False):
        pass
    # No more work is taken, and `close` has not returned: the gate is still shut.
    assert not threads.submit(order.clear, True)
    assert closing.is_alive() and not gate.ended.is_set()
    gate.go.set()
    closing.join(LONG_S)
    assert gate.ended.is_set() and order == [] and not named("t-close")
    # No work looks at the memory now, so it can grow.
    memory.extend(b"more")
    threads.close()


def test_threads_end_without_their_owner() -> None:
    threads = IoThreads(2, 8, "t-owner")
    assert len(named("t-owner")) == 2
    del threads
    gc.collect()
    assert not named("t-owner")


def test_memory_of_work_is_let_go_when_it_is_done() -> None:
    threads = IoThreads(1, 8, "t-memory")
    memory = bytearray(10)
    threads.submit(functools.partial(fill, memoryview(memory)), False)
    for _ in range(HANG_LOOKS):
        # Growing the memory raises BufferError while any work still looks at it.
        with contextlib.suppress(BufferError):
            memory.extend(b"more")
            break
        time.sleep(0.01)
    assert len(memory) == 14
    threads.close()


def fill(view: memoryview) -> None:
    view[0] = 1


@pytest.mark.parametrize(("threads", "queued"), [(0, 1), (1, 0), (-1, 1)])
def test_numbers_below_one_are_refused(threads: int, queued: int) -> None:
    with pytest.raises(ValueError, match="at least 1 thread"):
        IoThreads(threads, queued, "t-none")
