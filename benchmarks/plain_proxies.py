# SPDX-License-Identifier: Apache-2.0
"""nginx and HAProxy in front of the engines, which have no choice to make: the least that a hop costs on this machine.

Both are Debian's, with one worker process or thread, requests in turns, connections to the engines kept alive, and no log.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

NGINX, HAPROXY = "nginx", "haproxy"
PLAIN = (NGINX, HAPROXY)
# Debian's programs for administrators are not on every PATH.
PLACES = "/usr/sbin:/usr/bin"
NGINX_FILE = """
worker_processes 1;
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/nginx.log error;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_max_body_size 64m;
    client_body_buffer_size 1m;
    client_body_temp_path {folder}/nginx-bodies;
    proxy_temp_path {folder}/nginx-answers;
    fastcgi_temp_path {folder}/nginx-unused;
    uwsgi_temp_path {folder}/nginx-unused;
    scgi_temp_path {folder}/nginx-unused;
    keepalive_requests 1000000;
    upstream engines {{
        {servers}
        keepalive 64;
        keepalive_requests 1000000;
    }}
    server {{
        listen 127.0.0.1:{port};
        location = /health {{ return 200; }}
        location / {{
            proxy_pass http://engines;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
        }}
    }}
}}
"""
HAPROXY_FILE = """
global
    nbthread 1
    tune.bufsize 1048576
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
    option http-no-delay
frontend clients
    bind 127.0.0.1:{port}
    monitor-uri /health
    default_backend engines
backend engines
    balance roundrobin
    http-reuse always
    {servers}
"""


def problem(name: str) -> str:
    """Return why a proxy cannot be measured, or ""."""
    return "" if shutil.which(name, path=PLACES) else f"{name} is not installed: apt-get install {name}"


def command(name: str, folder: Path, port: int, engines: Sequence[int]) -> list[str]:
    """Write the configuration of a proxy, and return the command that runs it.

    Args:
        name: One of PLAIN.
        folder: Where its files are written.
        port: The port at which it listens.
        engines: The ports of the engines.
    """
    program = shutil.which(name, path=PLACES) or name
    path = folder / f"{name}.conf"
    if name == NGINX:
        servers = " ".join(f"server 127.0.0.1:{engine};" for engine in engines)
        path.write_text(NGINX_FILE.format(folder=folder, port=port, servers=servers))
        return [program, "-c", str(path), "-p", str(folder)]
    servers = "\n    ".join(f"server engine{number} 127.0.0.1:{engine}" for number, engine in enumerate(engines))
    path.write_text(HAPROXY_FILE.format(port=port, servers=servers))
    return [program, "-f", str(path), "-db"]
