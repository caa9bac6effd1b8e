# SPDX-License-Identifier: Apache-2.0
"""A double of the CUDA device for `CudaCopier`, where there is none: memory of the host, one queue of work a stream.

Work runs when somebody waits for it, in the order that streams and events allow; the kernels are memmove. The double
shows that the copier submits the right copies in the right order. Only a device shows that they are fast.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from vllm import _custom_ops


class Stream:
    """A stream: its work in order, run as far as somebody needs it."""

    def __init__(self, device: Any = None) -> None:
        self.work: list[Callable[[], None]] = []
        self.done = 0

    def wait_stream(self, other: Stream) -> None:
        end = len(other.work)
        self.work.append(lambda: other.run(end))

    def run(self, end: int) -> None:
        while self.done < end:
            self.done += 1
            self.work[self.done - 1]()


class Event:
    """An event, which occurs when its stream has come to it."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self._stream, self._end = Stream(), 0

    def record(self, stream: Stream) -> None:
        self._stream, self._end = stream, len(stream.work)

    def query(self) -> bool:
        return self._stream.done >= self._end

    def synchronize(self) -> None:
        self._stream.run(self._end)

    def elapsed_time(self, other: Event) -> float:
        assert self.query() and other.query()
        return 1.0


class CudaDouble:
    """The streams of the device: the one that computes, and the one in whose context the caller is."""

    def __init__(self) -> None:
        self.computing = Stream()
        self._context = self.computing

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._context = self._context, stream
        yield
        self._context = before

    def swap_blocks_batch(
        self, source: torch.Tensor, target: torch.Tensor, sizes: torch.Tensor, *, is_src_access_order_any: bool
    ) -> None:
        copies = list(zip(target.tolist(), source.tolist(), sizes.tolist(), strict=True))

        def copy() -> None:
            for addresses in copies:
                ctypes.memmove(*addresses)

        self._context.work.append(copy)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Replace the parts of torch and vLLM that `CudaCopier` uses."""
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        patch.setattr(torch.cuda, "stream", self.stream)
        patch.setattr(torch.cuda, "current_stream", lambda device: self._context)
        patch.setattr(_custom_ops, "swap_blocks_batch", self.swap_blocks_batch)
