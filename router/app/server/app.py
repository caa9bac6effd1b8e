# SPDX-License-Identifier: Apache-2.0
"""One router process, from its settings until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack

from kvrouter.router.app.server.assembly import Assembly
from kvrouter.router.app.server.descriptors import allow_descriptors
from kvrouter.router.app.server.listener import bound_socket, port_taken
from kvrouter.router.app.server.process_part import ProcessPart
from kvrouter.router.app.server.stopping import stopping_on_signals
from kvrouter.router.base.common import ticks
from kvrouter.router.base.telemetry.log_format import set_up_logs
from kvrouter.router.model.config.loading import Origin
from kvrouter.router.model.config.settings import Config
from kvrouter.router.observe.quality.access_log import set_up_access_log
from kvrouter.router.route.tokens.engine.verification import LocalMaker

log = logging.getLogger(__name__)


async def serve(
    config: Config, origin: Origin, local: Mapping[str, LocalMaker], part: ProcessPart | None = None
) -> None:
    """Run a router until SIGTERM or SIGINT; a process of a supervisor also ends when its supervisor is gone.

    Raises SettingError and StartError before it serves.

    Args:
        config: The settings.
        origin: The source of `config`.
        local: The tokenizers of the settings, by model.
        part: This process's place under a supervisor; None: it is the only process.
    """
    set_up_logs(config.log_level, config.log_format, sys.stderr)
    set_up_access_log(wanted=config.access_log == "on")
    allow_descriptors()
    ticks.begin(asyncio.get_running_loop())
    with stopping_on_signals(config.shutdown_delay_s, part is not None) as stopping:
        if part is not None:
            asyncio.get_running_loop().add_reader(sys.stdin.fileno(), stopping.on_supervisor)
        async with AsyncExitStack() as stack:
            # The port comes first, because binding it fails most often and fails fast.
            opened = bound_socket(config.host, config.port) if part is None else socket.socket(fileno=part.listener)
            listener = stack.enter_context(contextlib.closing(opened))
            assembly = Assembly(config, origin, part, stopping.shutdown, stack)
            stopping.reload = assembly.reload
            server = await stopping.unless_stopped(assembly.start(local, listener))
            if server is not None:
                stopping.server = server
                try:
                    await server.serve(sockets=[listener])
                except OSError as error:
                    # Two routers that start together can both bind the port; the second one to listen fails here.
                    raise port_taken(config.host, config.port, error) from None
    log.info("stopped")
