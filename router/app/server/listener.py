# SPDX-License-Identifier: Apache-2.0
"""The sockets that a router listens on, and the start line that names them."""

from __future__ import annotations

import socket
from pathlib import Path

from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.base.common.version import VERSION
from kvrouter.router.model.config.settings import Config, without_password


def start_line(config: Config, listener: socket.socket, workers: int, gateway_port: int | None) -> str:
    """Return the line for users when the router is up: its address, the place of its data, and a next step.

    `gateway_port` is the port for gateways; None if there is none.
    """
    host, port = listener.getsockname()[:2]
    shown_host = f"[{host}]" if ":" in host else host
    if config.redis is None:
        data = f"its index is in {Path(config.data_dir).resolve()}"
    else:
        data = f"its index is in {without_password(config.redis)}"
    scheme = "http" if config.tls_certificate is None else "https"
    is_default = (scheme, host, port) == ("http", "127.0.0.1", Config().port)
    at = "" if is_default else f" --url {scheme}://{shown_host}:{port}"
    if workers or config.workers or config.workers_file or config.kubernetes_selector:
        following = f"`kvrouter workers{at}` shows the workers"
    else:
        following = (
            f"no worker yet: `kvrouter add ID=HTTP_URL{at}`, or start with --worker, --workers-file or --kubernetes-selector; "
            f"API: {scheme}://{shown_host}:{port}/docs"
        )
    gateways = "" if gateway_port is None else f" and for gateways on grpc://{shown_host}:{gateway_port}"
    return f"kvrouter {VERSION} listens on {scheme}://{shown_host}:{port}{gateways}; {data}; {following}"


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a TCP socket that is bound to host and port and does not listen yet. Raises SettingError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise SettingError(f"host {host!r} is no address of this machine ({error.strerror}); write one") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise port_taken(host, port, error) from None
    return listener


def port_taken(host: str, port: int, error: OSError) -> SettingError:
    """Return the error for a port that cannot be bound or listened on."""
    why = error.strerror or error
    return SettingError(
        f"cannot listen on {host} port {port} ({why}); stop what listens there, or pass another --host or --port"
    )
