# SPDX-License-Identifier: Apache-2.0
"""A whole vLLM engine on the CPU, with the engine patch or without it, which gets short requests in batches."""

from __future__ import annotations

import time
from pathlib import Path
from random import Random
from typing import Self

from benchmarks.patch_engines import VOCAB_SIZE
from kvrouter.engine_patch.setup.settings import SWITCH
from tests.engine.engine_process import EngineProcess
from tests.support.ports import free_port

# Half of a prompt is one of a few beginnings, so that blocks are reused, stored and evicted.
BEGINNINGS = 12
HALF_TOKENS = 48


def children(pid: int) -> list[int]:
    """Return the processes that a process started, through all of its threads. Source: /proc/PID/task/TID/children."""
    return [
        int(child_pid)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child_pid in (task / "children").read_text().split()
    ]


class RealEngine(EngineProcess):
    """A vLLM engine whose core is a process of its own, which loads the patch as a plugin."""

    def __init__(self, folder: Path, patch: bool) -> None:
        folder.mkdir()
        super().__init__(folder, free_port(), free_port(), {SWITCH: "1" if patch else "0"})
        self._rng = Random(1)
        self._beginnings = [self._tokens() for _ in range(BEGINNINGS)]

    def __enter__(self) -> Self:
        super().__enter__()
        assert self._process is not None
        # The core is the largest child; other children belong to Python's multiprocessing and are small.
        self._core = max(children(self._process.pid), key=lambda pid: self._memory(pid))
        return self

    def _tokens(self) -> list[int]:
        return [self._rng.randrange(3, VOCAB_SIZE) for _ in range(HALF_TOKENS)]

    def batch(self, requests: int) -> float:
        """Generate answers to this many prompts, and return the requests per second."""
        prompts = [{"prompt_token_ids": self._rng.choice(self._beginnings) + self._tokens()} for _ in range(requests)]
        started_s = time.monotonic()
        # vLLM's default sampling parameters generate 16 tokens.
        self.call("generate", prompts)
        return requests / (time.monotonic() - started_s)

    @staticmethod
    def _memory(pid: int) -> int:
        """Return the resident bytes of a process without pages that come from files."""
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        return 0

    def core_bytes(self) -> int:
        return self._memory(self._core)

    def core_thread_s(self) -> float:
        """Return the CPU time of the engine's thread, in which the patch's hooks run.

        Source: /proc/PID/task/TID/schedstat (ns).
        """
        return int(Path(f"/proc/{self._core}/task/{self._core}/schedstat").read_text().split()[0]) / 1e9
