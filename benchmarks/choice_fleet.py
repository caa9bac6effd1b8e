# SPDX-License-Identifier: Apache-2.0
"""Engines that can be killed and started again at the same addresses, with a router before them or without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from tests.support.fleet import until
from tests.support.ports import free_port
from tests.support.replica_process import ReplicaProcess
from tests.support.router_process import RouterProcess

MODEL = "choice"
# This is no policy of the router: the client itself sends each session to the engine that a hash of its name picks.
SESSION = "session"
# A vLLM on the CPU loads its libraries for half a minute, and its peers do so on the same cores.
LIVE_TIMEOUT_S = 120.0


class LiveEngine(Protocol):
    """An engine in a process of its own. Entered again after its end, it serves at the same address."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *_: object) -> None: ...

    def kill(self) -> None: ...

    def spec(self, worker_id: str) -> str: ...


# Creates an engine in a folder, with further flags of its command.
MakeEngine = Callable[[Path, Sequence[str]], LiveEngine]


def simulated(folder: Path, flags: Sequence[str]) -> LiveEngine:
    """Create a replica of `kvrouter sim` with ports of its own."""
    port, events, replay = (free_port() for _ in range(3))
    addresses = ["--port", str(port), "--events", f"tcp://127.0.0.1:{events}", "--replay", f"tcp://127.0.0.1:{replay}"]
    return ReplicaProcess(folder, ["--model", MODEL, *addresses, *flags])


class LiveFleet:
    """Running engines and the URL that clients send to; all processes end with the stack.

    Invariant: the worker `w0` is `engines[0]`, and so on.
    """

    def __init__(
        self, folder: Path, stack: ExitStack, make: MakeEngine, flags: Sequence[Sequence[str]], policy: str
    ) -> None:
        """Start one engine for each entry of `flags`, and the router, unless the policy is the client's own."""
        self.engines = [make(folder / f"engine{number}", engine_flags) for number, engine_flags in enumerate(flags)]
        for engine in self.engines:
            stack.callback(engine.__exit__)
        # All engines start at the same time, as a vLLM spends most of its start on imports.
        with ThreadPoolExecutor(len(self.engines)) as threads:
            list(threads.map(lambda engine: engine.__enter__(), self.engines))
        specs = [engine.spec(f"w{number}") for number, engine in enumerate(self.engines)]
        self.engine_urls = [spec.partition("=")[2].partition(",")[0] for spec in specs]
        self.router: RouterProcess | None = None
        if policy != SESSION:
            workers = [part for spec in specs for part in ("--worker", spec)]
            self.router = stack.enter_context(RouterProcess(folder / "router", ["--policy", policy, *workers]))
        self.wait_connected()

    @property
    def router_url(self) -> str | None:
        """The address of the router; None where clients send straight to the engines."""
        return None if self.router is None else f"http://127.0.0.1:{self.router.port}"

    def wait_connected(self) -> None:
        """Wait until the router follows every engine's events."""
        if (router := self.router) is None:
            return

        def follows_all() -> bool:
            rows = router.request("GET", "/workers")["workers"]
            disconnected = ("connecting", "down")
            return len(rows) == len(self.engines) and not any(
                row["state"] in disconnected or row["closed"] for row in rows
            )

        until(follows_all, "the router follows all engines", LIVE_TIMEOUT_S)

    def kill(self, number: int) -> None:
        """End an engine as a crash does."""
        self.engines[number].kill()
        self.engines[number].__exit__()

    def start(self, number: int) -> None:
        """Start a killed engine again and wait until it serves."""
        self.engines[number].__enter__()


def real(patched: bool) -> MakeEngine:
    """Return a function that creates a vLLM on the CPU, with the engine patch or without it."""
    # Only vLLM's environment has the dependencies of these modules.
    from kvrouter.engine_patch.setup.settings import SWITCH
    from tests.engine.chat_model import write_chat_model
    from tests.engine.chat_server import ChatServer

    def make(folder: Path, flags: Sequence[str]) -> LiveEngine:
        model = write_chat_model(folder / "model")
        return ChatServer(folder, model, flags, MODEL, {SWITCH: "1" if patched else "0"})

    return make
