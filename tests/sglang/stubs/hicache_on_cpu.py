# SPDX-License-Identifier: Apache-2.0
"""CPU stand-ins for the parts of CUDA that SGLang's HiCache uses.

Host memory is not registered, a stream does its work at once, and a transfer is a copy of rows.

This is an entry point of `sglang.srt.plugins`, so that the scheduler's process loads it too. It does nothing unless
KVROUTER_TEST_HICACHE is set. All code that decides (controller, tree, pools, budgets) is SGLang's own.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SWITCH = "KVROUTER_TEST_HICACHE"
POOLS = ("mha", "mamba")


class IdleEvent:
    """An event of a stream that has done everything."""

    def __init__(self, **_: object) -> None: ...

    def record(self, stream: object = None) -> None: ...

    def wait(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 0.0


class IdleStream:
    def __init__(self, **_: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def synchronize(self) -> None: ...


class Device:
    """A replacement of `torch.cuda` for code that copies between device and host."""

    __name__ = "cpu"
    Event = IdleEvent
    Stream = IdleStream

    @staticmethod
    def current_stream(*_: object) -> IdleStream:
        return IdleStream()

    @staticmethod
    @contextmanager
    def stream(stream: object) -> Iterator[None]:
        yield


def transfer_kv_direct(
    src_layers: list[Any], dst_layers: list[Any], src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """Copy rows of tokens, layer by layer."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices].to(target.dtype)


def register() -> None:
    if os.environ.get(SWITCH):
        install()


def install() -> None:
    cache = "sglang.srt.mem_cache"
    _module(f"{cache}.pool_host.common")._cuda_host_register = lambda *_: None
    _module(f"{cache}.pool_host.base")._cuda_host_unregister = lambda *_: None
    for pool in POOLS:
        module = _module(f"{cache}.pool_host.{pool}")
        module._cuda_host_unregister = lambda *_: None
        module.transfer_kv_direct = transfer_kv_direct
    for name in ("sglang.srt.managers.cache_controller", f"{cache}.l2_transfer"):
        _module(name).device_module = Device()


def _module(name: str) -> Any:
    return importlib.import_module(name)
