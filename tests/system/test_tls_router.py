# SPDX-License-Identifier: Apache-2.0
"""A whole router over TLS.

Commands, streams and the page's data go through it, certificates change while it runs, keys have scopes, and several
processes serve.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import httpx
import pytest

from tests.support.certificates import HOST, Authority, Pair
from tests.support.exchange import run_cli
from tests.support.fleet import until
from tests.support.router_process import RouterProcess
from tests.support.scripted_engine import Asked, ScriptedEngine, Wire, chunk

WAIT_S = 30.0
JSON = {"content-type": "application/json"}
CHAT = "/v1/chat/completions"
EVENTS = 200
ASK_KEY, WATCH_KEY, REGISTER_KEY = "a-key-that-may-ask", "a-key-that-may-watch", "a-key-that-may-register"
KEYS = f"""\
keys:
- {{name: gateway, scopes: [ask], key: {ASK_KEY}}}
- {{name: prometheus, scopes: [watch], key: {WATCH_KEY}}}
- {{name: engines, scopes: [register], key: {REGISTER_KEY}}}
"""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def flags(pair: Pair) -> list[str]:
    return ["--tls-certificate", str(pair.certificate), "--tls-key", str(pair.key)]


def command(router: RouterProcess, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_cli(*arguments, "--url", f"https://{HOST}:{router.port}", env=os.environ | environment)


def serial(router: RouterProcess, authority: Authority) -> str:
    """Return the serial number of the certificate that a new connection gets."""
    with (
        socket.create_connection((HOST, router.port), timeout=WAIT_S) as plain,
        authority.client().wrap_socket(plain, server_hostname=HOST) as secured,
    ):
        shown = secured.getpeercert()
        assert shown is not None
        return str(shown["serialNumber"])


async def stream(asked: Asked, wire: Wire) -> None:
    await wire.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    for number in range(EVENTS):
        await wire.send(chunk(b"data: %d\n\n" % number))
        await asyncio.sleep(0.001)
    await wire.send(b"0\r\n\r\n")


@pytest.fixture(scope="module")
def placed(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Write a first pair to the files that the router reads, and return these."""
    folder = tmp_path_factory.mktemp("placed")
    first = authority.issue("first")
    pair = Pair(folder / "tls.crt", folder / "tls.key")
    for file, issued in zip(pair, first, strict=True):
        file.write_bytes(issued.read_bytes())
    return pair


@pytest.fixture(scope="module")
def router(authority: Authority, placed: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    folder = tmp_path_factory.mktemp("router")
    with RouterProcess(folder, flags(placed), tls=authority.client()) as process:
        yield process


def test_commands_reach_it_with_its_authority(router: RouterProcess, authority: Authority) -> None:
    ca = ("--ca-file", str(authority.file))
    for name in ("workers", "doctor"):
        done = command(router, name, "--json", *ca)
        assert not done.stderr, done.stderr
        assert json.loads(done.stdout)
    assert command(router, "workers", KVROUTER_CA_FILE=str(authority.file)).returncode == 0
    # Each mistake is reported with its fix.
    unknown = command(router, "workers")
    assert unknown.returncode == 1 and "is not trusted here" in unknown.stderr and "--ca-file" in unknown.stderr
    missing = command(router, "workers", "--ca-file", "/none.pem")
    assert missing.returncode == 2 and "--ca-file /none.pem" in missing.stderr
    plain = run_cli("workers", "--url", f"http://{HOST}:{router.port}")
    assert plain.returncode == 1 and "write https://" in plain.stderr
    assert f"listens on https://{HOST}:{router.port}" in router.log_tail()


def test_streams_and_large_bodies_pass_with_real_clients(router: RouterProcess, authority: Authority) -> None:
    url = f"https://{HOST}:{router.port}"
    whole = "".join(f"data: {number}\n\n" for number in range(EVENTS))
    with ScriptedEngine(stream) as engine:
        router.request(
            "POST", "/register", {"worker_id": "w0", "model": "m", "url": engine.url, "patch_endpoint": "off"}
        )
        try:
            body = {"model": "m", "messages": [{"role": "user", "content": "x" * 4_000_000}], "stream": True}

            async def all_at_once() -> list[str]:
                connector = aiohttp.TCPConnector(ssl=authority.client())
                async with aiohttp.ClientSession(connector=connector) as session:

                    async def one() -> str:
                        sent = io.BytesIO(json.dumps(body).encode())
                        async with session.post(url + CHAT, data=sent, headers=JSON) as answer:
                            assert answer.status == 200
                            return await answer.text()

                    return await asyncio.gather(*(one() for _ in range(8)))

            assert asyncio.run(all_at_once()) == [whole] * 8
            with httpx.Client(verify=authority.client()) as client:
                with client.stream("POST", url + CHAT, json=body) as answer:
                    assert "".join(answer.iter_text()) == whole
                # A client that leaves within a stream ends it at the engine.
                before = engine.given_up
                with client.stream("POST", url + CHAT, json=body) as answer:
                    next(answer.iter_raw())
            until(lambda: engine.given_up == before + 1, "the engine's request goes on for nobody")
        finally:
            router.unregister("w0")


def test_a_certificate_is_changed_without_a_restart_and_a_broken_one_changes_nothing(
    router: RouterProcess, authority: Authority, placed: Pair
) -> None:
    first, pid = serial(router, authority), router.pid
    expires_s = router.metric("kvrouter_tls_certificate_expiry_timestamp_seconds")
    assert 29 * 86_400 < expires_s - time.time() < 31 * 86_400
    assert router.metric("kvrouter_tls_certificate_start_timestamp_seconds") <= time.time()
    # An open connection stays.
    router.request("GET", "/version")
    placed.replace(authority.issue("second", days=60))
    until(lambda: serial(router, authority) != first, "the new one is not taken")
    second = serial(router, authority)
    assert router.metric("kvrouter_tls_certificate_expiry_timestamp_seconds") > expires_s + 20 * 86_400
    # With the key of another certificate, the former pair is used, and the router says so.
    placed.key.write_bytes(authority.issue("third").key.read_bytes())

    def reasons() -> list[str]:
        return list(router.request("GET", "/health")["reasons"])

    until(lambda: any("are no pair" in reason for reason in reasons()), "a broken pair is not said")
    assert serial(router, authority) == second
    assert router.metric("kvrouter_access_file_stale", file="certificate") == 1
    done = command(router, "doctor", "--ca-file", str(authority.file))
    assert done.returncode == 1 and "KV010" in done.stdout and "the former is used" in done.stdout
    # With the whole pair all is well; a certificate that ends soon is only a warning.
    placed.replace(authority.issue("fourth", days=1))
    until(lambda: not reasons(), "the pair is not taken")
    assert serial(router, authority) not in (first, second)
    assert router.pid == pid
    assert router.metric("kvrouter_access_file_stale", file="certificate") == 0


def test_keys_with_scopes_over_tls_with_client_certificates(authority: Authority, tmp_path: Path) -> None:
    server, client = authority.issue("mutual"), authority.issue("operator")
    keys = tmp_path / "keys.yaml"
    keys.write_text(KEYS)
    arguments = [*flags(server), "--tls-client-ca", str(authority.file), "--api-keys-file", str(keys)]
    context = authority.client(client)
    with RouterProcess(tmp_path / "router", arguments, tls=context, api_key=WATCH_KEY) as router:
        tls_flags = (
            "--ca-file",
            str(authority.file),
            "--client-certificate",
            str(client.certificate),
            "--client-key",
            str(client.key),
        )
        assert command(router, "workers", *tls_flags, "--api-key", WATCH_KEY).returncode == 0
        refused = command(router, "drain", "w0", *tls_flags, "--api-key", ASK_KEY)
        assert refused.returncode == 1 and "the API key gateway has the scope ask" in refused.stderr
        bare = command(router, "workers", "--ca-file", str(authority.file), "--api-key", WATCH_KEY)
        assert bare.returncode == 1 and "--client-certificate" in bare.stderr, bare.stderr
        diagnosed = command(router, "doctor", "--json", *tls_flags, "--api-key", ASK_KEY)
        assert json.loads(diagnosed.stdout)["findings"][0]["code"] == "KV002"
        body = {"worker_id": "w0", "model": "m", "url": "http://127.0.0.1:1", "patch_endpoint": "off"}
        engines = {"authorization": f"Bearer {REGISTER_KEY}"}
        router.request("POST", "/register", body, engines)
        # The key that registers may see workers, but not metrics.
        assert router.request("GET", "/workers", None, engines)["workers"]
        with pytest.raises(AssertionError, match="403"):
            router.request("GET", "/metrics", None, engines)
        assert router.metric("kvrouter_key_requests_total", key="engines", outcome="forbidden") == 1
        for secret in (ASK_KEY, WATCH_KEY, REGISTER_KEY):
            assert secret not in router.log_tail()


def test_each_of_several_processes_takes_a_new_certificate(authority: Authority, tmp_path: Path) -> None:
    pair = Pair(tmp_path / "tls.crt", tmp_path / "tls.key")
    for file, issued in zip(pair, authority.issue("many"), strict=True):
        file.write_bytes(issued.read_bytes())
    arguments = [*flags(pair), "--processes", "2"]
    with RouterProcess(tmp_path / "router", arguments, tls=authority.client()) as router:
        until(lambda: f"https://{HOST}:{router.port}" in router.log_tail(), "it does not say where it listens")
        first = serial(router, authority)
        pair.replace(authority.issue("renewed"))
        # Either process may accept a connection, so none of many may show the former certificate.
        until(lambda: first not in {serial(router, authority) for _ in range(20)}, "a process keeps the former")
        assert router.metric("kvrouter_processes_answering") == 2


def test_a_wrong_pair_ends_the_start_with_one_line(authority: Authority, tmp_path: Path) -> None:
    wrong = Pair(authority.issue("a").certificate, authority.issue("b").key)
    for more in ([], ["--processes", "2"]):
        done = run_cli("serve", "--port", "0", *flags(wrong), *more, cwd=tmp_path)
        assert done.returncode == 2
        assert "are no pair that can be used" in done.stderr and done.stderr.count("\n") == 1
