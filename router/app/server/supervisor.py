# SPDX-License-Identifier: Apache-2.0
"""Several router processes behind one port on one host: `kvrouter serve --processes N`.

The supervisor binds the port and runs the private store. All processes accept from the same listening socket, so no
process's end loses a waiting connection. They share the store like routers on several hosts, and one that ends is
started again. A process ends when the supervisor ends, for whatever reason, because its stdin is closed then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from kvrouter.router.app.server.app import serve
from kvrouter.router.app.server.checks import local_tokenizers, log_cautions
from kvrouter.router.app.server.listener import bound_socket, start_line
from kvrouter.router.app.server.private_store import private_store
from kvrouter.router.app.server.process_part import PRIVATE_TOKEN, ProcessPart
from kvrouter.router.app.server.service_manager import announce
from kvrouter.router.app.server.stopping import HURRY, RELOAD, has_terminal
from kvrouter.router.base.common.errors import RouterError, StartError
from kvrouter.router.base.common.task_supervisor import TaskSupervisor
from kvrouter.router.base.redis_client.embedded_valkey import EmbeddedStoreError
from kvrouter.router.base.telemetry.log_format import set_up_logs
from kvrouter.router.model.config.loading import Origin
from kvrouter.router.model.config.settings import Config

log = logging.getLogger(__name__)

# The pause before a process that ended is restarted doubles from the first to the last value, so that a process that
# keeps failing does not load the machine. A process that ran for STEADY_S resets it.
RESTART_FIRST_S = 0.1
RESTART_LAST_S = 5.0
STEADY_S = 30.0

# A process that ends accepts connections for `shutdown_delay_s`, finishes its requests for `drain_s`, then releases its
# leases and closes. It is killed this long after that.
CLOSE_TIMEOUT_S = 10.0


class ChildOrder(msgspec.Struct, frozen=True):
    """The order that a process gets as one line on its stdin."""

    config: Config
    part: ProcessPart
    # The settings file and the flags from which `config` was read, besides the environment.
    origin: Origin


async def supervise(config: Config, origin: Origin) -> None:
    """Run config.processes routers until SIGTERM or SIGINT. `origin` is the source of `config`.

    Raises SettingError and StartError before they serve.
    """
    set_up_logs(config.log_level, config.log_format, sys.stderr)
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    ends_with_terminal = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and has_terminal()
    with contextlib.closing(bound_socket(config.host, config.port)) as listener:
        running: set[Process] = set()

        def hang_up() -> None:
            if ends_with_terminal and not has_terminal():
                stopped.set()
                return
            for process in running:
                if process.stdin is not None:
                    process.stdin.write(RELOAD)

        loop.add_signal_handler(signal.SIGHUP, hang_up)
        work = loop.create_task(_run(config, origin, listener, running))
        while not work.done():
            waiting = loop.create_task(stopped.wait())
            await asyncio.wait({work, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if stopped.is_set():
                stopped.clear()
                if work.cancelling():
                    for process in running:
                        process.send_signal(HURRY)
                # The processes share the socket; the last one to close it has accepted the connections that waited
                # there.
                listener.close()
                work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
    log.info("stopped")


async def _run(config: Config, origin: Origin, listener: socket.socket, running: set[Process]) -> None:
    """Run the processes until cancelled, and keep those that live in `running`."""
    async with AsyncExitStack() as stack:
        log_cautions(config)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvrouter-"))
        url = config.redis
        if url is None:
            # The supervisor has no metrics and no /health, so failures of its tasks are only in the log.
            supervisor = TaskSupervisor(clock=asyncio.get_running_loop().time, rng=random.Random())
            try:
                url = await stack.enter_async_context(private_store(Path(config.data_dir), supervisor))
            except EmbeddedStoreError as error:
                raise StartError(str(error)) from None
        orders = [_order(config, origin, url, number, folder, listener) for number in range(config.processes)]
        children = [_Child(order, running) for order in orders]
        try:
            async with asyncio.TaskGroup() as group:
                # The first process starts alone, because it registers the workers of the sources.
                for child in children:
                    group.create_task(child.keep())
                    if child is children[0]:
                        await child.ready.wait()
                for child in children:
                    await child.ready.wait()
                announce(start_line(config, listener, children[0].workers, config.gateway_port), os.environ)
        except* RouterError as errors:
            raise errors.exceptions[0] from None


def _order(config: Config, origin: Origin, url: str, number: int, folder: str, listener: socket.socket) -> ChildOrder:
    own = msgspec.structs.replace(config, redis=url)
    if number:
        # The first process has the sources of workers; the others follow the registry.
        own = msgspec.structs.replace(own, workers=(), workers_file=None, kubernetes_selector=None)
    # The data directory admits one supervisor, so a name can outlive its process: after a restart, the new process has
    # the leases at once.
    token = f"{PRIVATE_TOKEN}-{number}" if config.redis is None else None
    return ChildOrder(own, ProcessPart(number=number, listener=listener.fileno(), token=token, folder=folder), origin)


class _Child:
    """One process, started again whenever it ends."""

    def __init__(self, order: ChildOrder, running: set[Process]) -> None:
        self._order = order
        self._running = running
        self.ready = asyncio.Event()
        self.workers = 0

    async def keep(self) -> None:
        """Run the process again and again until cancelled. Raises StartError if its first run ends before it serves."""
        loop = asyncio.get_running_loop()
        pause_s = RESTART_FIRST_S
        while True:
            began_s = loop.time()
            code = await self._live()
            number = self._order.part.number
            if not self.ready.is_set():
                raise StartError(f"process {number} of the router did not start; the line before this one says why")
            log.error("a process ended and is restarted", extra={"number": number, "code": code})
            if loop.time() - began_s > STEADY_S:
                pause_s = RESTART_FIRST_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RESTART_LAST_S)

    async def _live(self) -> int:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            __spec__.name,
            stdin=PIPE,
            stdout=PIPE,
            pass_fds=(self._order.part.listener,),
            # Ctrl-C in the terminal must reach only the supervisor.
            start_new_session=True,
        )
        assert process.stdin is not None and process.stdout is not None
        self._running.add(process)
        try:
            process.stdin.write(msgspec.json.encode(self._order) + b"\n")
            line = await process.stdout.readline()
            if line:
                self.workers = int(line)
                self.ready.set()
            return await process.wait()
        finally:
            config = self._order.config
            await _end(process, config.shutdown_delay_s + config.drain_s + CLOSE_TIMEOUT_S)
            self._running.discard(process)


async def _end(process: Process, timeout_s: float) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(timeout_s):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def main() -> int:
    """Run one process, with the order that is on stdin; return the exit code."""
    import uvloop

    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=ChildOrder)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            local = local_tokenizers(order.config)
            runner.run(serve(order.config, order.origin, local, order.part))
    except RouterError as error:
        print(f"kvrouter: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
