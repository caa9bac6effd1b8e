# SPDX-License-Identifier: Apache-2.0
"""Redis over TLS with its own user for the router; no password or key is ever shown, whatever goes wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.exchange import exchange, run_cli
from tests.support.fake_engine import NewEngine, prompt, stored
from tests.support.fleet import until
from tests.support.ports import free_port
from tests.support.router_process import RouterProcess
from tests.support.tls_redis import TlsRedis, certificates, tls_redis

# A part of every text that must stay hidden, so that one search finds any of them.
MARK = "Hush"
PASSWORD = f"{MARK}-redis-password"
API_KEY = f"{MARK}-api-key"
TOKENS = prompt(1)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TlsRedis]:
    with tls_redis(tmp_path / "redis", PASSWORD) as server:
        yield server


def asked(router: RouterProcess, path: str, body: object = None, key: str = API_KEY) -> tuple[int, str]:
    """Return the status, and all that the answer shows: its body and its headers."""
    method, headers = "GET" if body is None else "POST", {"authorization": f"Bearer {key}"}
    answer = exchange(router.port, method, path, body, headers)
    return answer.status, answer.content.decode() + str(answer.headers)


def wait_shown(router: RouterProcess, path: str, *parts: str, body: object = None) -> None:
    until(lambda: all(part in asked(router, path, body)[1] for part in parts), f"{path} does not show {parts}")


def command_lines(folder: Path) -> list[str]:
    """Return the command lines of all processes that run in `folder` or below, as `ps` shows them."""
    lines = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cwd").readlink().is_relative_to(folder):
                lines.append((entry / "cmdline").read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return lines


def test_a_router_with_tls_and_an_acl_user_shows_no_secret(
    tmp_path: Path, server: TlsRedis, new_engine: NewEngine
) -> None:
    engine = new_engine()
    environment = {"KVROUTER_REDIS": server.url(), "KVROUTER_API_KEY": API_KEY}
    admin = server.admin()
    seen: list[str] = []
    question = {"model": "m", "token_ids": TOKENS}
    for life in range(2):
        folder = tmp_path / f"life{life}"
        folder.mkdir()
        with RouterProcess(folder, ["--log-level", "debug"], environment) as router:
            if life == 0:
                assert asked(router, "/register", engine.registration("w0", "m"))[0] == 200
            wait_shown(router, "/workers", '"worker_id":"w0"', '"epoch":"')
            engine.wait_subscribed()
            if life == 0:
                engine.publish(stored(TOKENS, 0, 4))
            wait_shown(router, "/query", '"gpu":64', body=question)
            seen += [asked(router, path)[1] for path in ("/workers", "/metrics", "/health", "/docs", "/openapi.json")]
            seen += [asked(router, path, key=f"{API_KEY[:-1]}")[1] for path in ("/workers", "/query")]
            seen += [asked(router, "/query", body)[1] for body in ({}, [1], {"model": "x", "token_ids": [1]})]
            if life == 1:
                # Change the password behind the router's back, and close its connections.
                admin.acl_log_reset()
                admin.execute_command("ACL", "SETUSER", "router", "resetpass", ">another")
                admin.client_kill_filter(_type="normal", skipme=True)
                wait_shown(router, "/health", "degraded")
                status, text = asked(router, "/register", engine.registration("w1", "m"))
                assert status == 503
                seen += [text, asked(router, "/health")[1], asked(router, "/workers")[1]]
                assert asked(router, "/query", question)[0] == 200
            seen += command_lines(tmp_path)
            assert any("kvrouter" in line for line in seen)
        seen.append((folder / "router.log").read_text())
        if life == 0:
            assert admin.acl_log() == [], "the rule of docs/how-to/hardening.md is too narrow"
    admin.close()
    assert "WRONGPASS" in seen[-1], "the log says nothing of it"
    assert not [text for text in seen if MARK in text]


def start(environment: dict[str, str], *arguments: str, folder: Path) -> tuple[int, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVROUTER_")}
    done = run_cli(*arguments, env=clean | environment, cwd=folder)
    return done.returncode, done.stdout + done.stderr


def test_a_failure_at_the_start_is_reported_without_secrets(tmp_path: Path, server: TlsRedis) -> None:
    certificates(tmp_path / "other")
    port = server.port
    tls, secret = f"?ssl_ca_certs={server.authority}", f"router:{PASSWORD}"
    yaml = tmp_path / "k.yaml"
    yaml.write_text(f"redis: http://{secret}@h\napi_key: {API_KEY} {API_KEY}\n")
    cases = {
        "login": {"KVROUTER_REDIS": server.url(password=f"{MARK}-wrong")},
        "login ": {"KVROUTER_REDIS": server.url(user="nobody")},
        "certificate": {"KVROUTER_REDIS": server.url(authority=tmp_path / "other" / "ca.pem")},
        "certificate ": {"KVROUTER_REDIS": f"rediss://{secret}@127.0.0.1:{port}"},
        # The certificate is that of 127.0.0.1, and not of localhost.
        "certificate  ": {"KVROUTER_REDIS": f"rediss://{secret}@localhost:{port}/0{tls}"},
        "rediss://": {"KVROUTER_REDIS": f"redis://{secret}@127.0.0.1:{port}"},
        "TLS options": {"KVROUTER_REDIS": f"rediss://{secret}@127.0.0.1:{port}/0?ssl_ca_certs=/none"},
        "reached": {"KVROUTER_REDIS": f"rediss://{secret}@127.0.0.1:{free_port()}{tls}"},
        "reached ": {"KVROUTER_REDIS": f"rediss://{secret}@no-such-host.invalid:1{tls}"},
        "percent-encoded": {"KVROUTER_REDIS": f"redis://router:{MARK}/with/slashes@h:1"},
        "Sentinel": {
            "KVROUTER_REDIS": f"redis+sentinel://router:{MARK}@127.0.0.1:{free_port()}/s?sentinel_password={MARK}"
        },
        "URL": {"KVROUTER_REDIS": f"redis://router:{MARK}@{MARK}@h:x"},
        "URL ": {"KVROUTER_REDIS": f"http://router:{MARK}/x@{MARK}@h"},
        "key": {"KVROUTER_API_KEY": f"{API_KEY} with spaces"},
        "URL  ": {"KVROUTER_CONFIG": str(yaml)},
        "password": {"KVROUTER_WORKERS": f"w0=http://u:{MARK}@h:1"},
        "events": {"KVROUTER_WORKERS": f"w0=http://h:1,events=tcp://u:{MARK}@h:1"},
    }
    for expected, environment in cases.items():
        code, output = start(environment, "serve", "--port", "0", folder=tmp_path)
        assert code in (1, 2), (expected, output)
        last = output.strip().splitlines()[-1]
        assert last.startswith("kvrouter: ") and expected.strip().lower() in last.lower(), (expected, output)
        assert MARK not in output and "Traceback" not in output, (expected, output)
    url = f"http://127.0.0.1:{free_port()}"
    _, output = start({"KVROUTER_API_KEY": API_KEY, "KVROUTER_URL": url}, "workers", folder=tmp_path)
    assert output.startswith("kvrouter: ") and MARK not in output
