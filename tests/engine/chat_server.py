# SPDX-License-Identifier: Apache-2.0
"""A real `vllm serve` on the CPU: OpenAI HTTP, real events, and random weights.

Its model is the tiny one that chats (`chat_model.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tests.engine.engine_forks import ForkedServer
from tests.engine.engine_process import EXECUTOR, MAX_MODEL_LEN
from tests.support.exchange import exchange
from tests.support.ports import free_port, free_ports
from tests.support.router_process import PRELOAD_VARIABLE, end_process

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
# Enough for some prompts of a thousand tokens in six groups. A block is 128 tokens on the CPU, less with --block-size.
NUM_BLOCKS = 400


# The module of vLLM's server. Not `vllm serve`, because it looks up the version of a package that has another name in the
# CPU build.
SERVER = "vllm.entrypoints.openai.api_server"


class ChatServer:
    """A server that starts on entry and stops on exit.

    Like a router of the tests, it is forked from a process that has imported its modules if KVROUTER_TEST_PRELOAD is 1.
    `url` is its HTTP address; `endpoint` and `replay_endpoint` are its event sockets.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        arguments: Sequence[str] = (),
        name: str = "chat-tiny",
        environment: Mapping[str, str] | None = None,
        *,
        python: str = sys.executable,
        ranks: int = 1,
    ) -> None:
        """Prepare the command that starts the server.

        Args:
            folder: Where the server's log is written.
            model: A folder that `write_chat_model` wrote; several servers may share it.
            arguments: Further flags of `vllm serve`.
            name: The name of the served model.
            environment: Variables that are added to those of this process.
            python: The interpreter of an environment that has vLLM.
            ranks: The number of data-parallel ranks, of which each adds its own to the ports of the event sockets.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        events, replay = free_ports(ranks), free_ports(ranks)
        self.endpoint, self.replay_endpoint = f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}"
        self._log = folder / f"serve-{self.port}.log"
        self._process: Any = None
        self._environment = {**os.environ, **(environment or {})}
        stream = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{events}",
            "replay_endpoint": f"tcp://*:{replay}",
        }
        self._python, self._module = python, SERVER
        self._arguments = [
            *("--model", str(model)),
            *("--served-model-name", name, "--host", "127.0.0.1", "--port", str(self.port)),
            *("--load-format", "dummy", "--enforce-eager", "--dtype", "float32"),
            *("--distributed-executor-backend", EXECUTOR),
            *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-batched-tokens", "512", "--max-num-seqs", "16"),
            *("--num-gpu-blocks-override", str(NUM_BLOCKS), "--enable-prefix-caching"),
            *("--enable-prompt-tokens-details", "--kv-events-config", json.dumps(stream)),
            *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
            *arguments,
        ]

    def launch(self) -> None:
        """Start the process without waiting for it, so that several servers can start at the same time."""
        self._process = self._start()

    def __enter__(self) -> Self:
        if self._process is None:
            self.launch()
        try:
            self._wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> Any:
        is_own = (self._python, self._module) == (sys.executable, SERVER)
        if is_own and os.environ.get(PRELOAD_VARIABLE) == "1":
            return ForkedServer(self._arguments, self._environment, self._log)
        command = [self._python, "-m", self._module, *self._arguments]
        with self._log.open("wb") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=self._environment
            )

    def _wait_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise AssertionError(f"vllm serve ended\n{self.log_tail()}")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return
            time.sleep(0.2)
        raise AssertionError(f"vllm serve is not ready after {START_TIMEOUT_S} s\n{self.log_tail()}")

    def __exit__(self, *_: object) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        end_process(process, STOP_TIMEOUT_S)

    def spec(self, worker_id: str) -> str:
        """Return this engine in the form of the router's `--worker` flag."""
        return f"{worker_id}={self.url},events={self.endpoint},replay={self.replay_endpoint},model={self.name}"

    def kill(self) -> None:
        """Send SIGKILL to the server and to its engine core, which would otherwise survive."""
        assert self._process is not None
        for pid in (self._process.pid, *descendants(self._process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def log_tail(self) -> str:
        return self._log.read_text(errors="replace")[-6000:]

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Return the status and the decoded body of the answer."""
        answer = exchange(self.port, "POST", path, body)
        return answer.status, answer.json()


def descendants(pid: int) -> list[int]:
    """Return the ids of all processes below a process. Source: /proc/PID/task/TID/children, proc(5)."""
    pids = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            pids += [child, *descendants(child)]
    return pids


@contextlib.contextmanager
def started_together(servers: Sequence[ChatServer]) -> Iterator[None]:
    """Run servers that start at the same time, because each takes long or because they wait for each other."""
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.push(server)
            server.launch()
        for server in servers:
            server.__enter__()
        yield
