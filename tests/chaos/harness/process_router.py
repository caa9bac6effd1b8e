# SPDX-License-Identifier: Apache-2.0
"""The router under test as users run it: a `kvrouter serve` process on a shared store.

Schedules kill and stop it by signals.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from tests.chaos.harness.engines import MODEL, Engine

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0
# The shortest lease that a router accepts, so that a stopped router loses its workers within a schedule.
LEASE_S = 1.0
# Timeout of an answer; a stopped router does not answer.
ANSWER_S = 1.0


class ProcessRouter:
    """One router; after `kill`, `open` starts it again on the same port."""

    def __init__(self, name: str, folder: Path, url: str, settings: Mapping[str, str] | None = None) -> None:
        """Choose a port for the router.

        Args:
            name: The router's name, also that of its log.
            folder: The working folder.
            url: The store.
            settings: Further variables of the router's environment.
        """
        self.name = name
        self._settings = dict(settings or {})
        self.stopped = False
        self._folder, self._url = folder, url
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._process: asyncio.subprocess.Process | None = None
        self._client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{self._port}", timeout=ANSWER_S, trust_env=False)

    @property
    def up(self) -> bool:
        return self._process is not None and not self.stopped

    async def open(self) -> None:
        settings = {"KVROUTER_LEASE_TTL_S": str(LEASE_S), "KVROUTER_REPLAY_TIMEOUT_S": "2"}
        with (self._folder / f"{self.name}.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "kvrouter.router.cli", "serve", "--port", str(self._port), "--redis", self._url,
                stdout=log, stderr=log, cwd=self._folder, env=os.environ | settings | self._settings, start_new_session=True,
            )  # fmt: skip
        async with asyncio.timeout(START_TIMEOUT_S):
            while True:
                try:
                    await self._client.get("/health")
                except httpx.TransportError:
                    if self._process.returncode is not None:
                        raise RuntimeError(f"the router ended at its start:\n{self.log_tail()}") from None
                    await asyncio.sleep(0.05)
                else:
                    return

    async def kill(self) -> None:
        """Kill the process with SIGKILL."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    def stop(self) -> None:
        """Stop the process with SIGSTOP."""
        assert self._process is not None
        self.stopped = True
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        if self._process is not None and self.stopped:
            self.stopped = False
            os.kill(self._process.pid, signal.SIGCONT)

    async def close(self) -> None:
        self.go_on()
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                # A router that failed at its start has ended already.
                process.terminate()
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await process.wait()
            except TimeoutError:
                pass
            finally:
                await self.kill()
        await self._client.aclose()

    async def register(self, engine: Engine) -> None:
        answer = await self._client.post("/register", json=engine.registration(), timeout=START_TIMEOUT_S)
        answer.raise_for_status()

    async def rows(self) -> dict[str, dict[str, Any]]:
        """Return the rows of `GET /workers` by worker; raises httpx.TransportError if nobody answers."""
        answer = await self._client.get("/workers")
        answer.raise_for_status()
        return {row["worker_id"]: row for row in answer.json()["workers"]}

    async def gpu_hits(self, tokens: list[int]) -> dict[str, int]:
        """Return how many tokens of a prompt each worker will reuse from its GPU, as the router predicts.

        Raises httpx.TransportError if nobody answers.
        """
        answer = await self._client.post("/query", json={"model": MODEL, "token_ids": tokens})
        answer.raise_for_status()
        return {worker: hit["gpu"] for worker, hit in answer.json()["instances"].items()}

    def log_tail(self) -> str:
        return (self._folder / f"{self.name}.log").read_text(errors="replace")[-2_000:]
