# SPDX-License-Identifier: Apache-2.0
"""The systemd unit's limits fit what the router needs, and its settings are settings."""

from __future__ import annotations

import re
from configparser import ConfigParser
from pathlib import Path

import msgspec

from kvrouter.router.app.server.descriptors import FILES_PER_CONNECTION
from kvrouter.router.app.server.supervisor import CLOSE_TIMEOUT_S
from kvrouter.router.base.redis_client.embedded_valkey import STOP_TIMEOUT_S
from kvrouter.router.model.config.loading import load_config
from kvrouter.router.model.config.settings import FIELDS, Config, variable_of
from kvrouter.router.serve.api.http.deadlines import HttpLimits

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "systemd"
PAGE = (FOLDER.parents[1] / "docs" / "how-to" / "systemd.md").read_text()
# Number of descriptors for a worker (router/app/server/descriptors.py).
FILES_PER_WORKER = 7


def unit() -> ConfigParser:
    # A directive may occur twice.
    parser = ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(FOLDER / "kvrouter.service")
    return parser


def test_a_stop_has_time_for_the_routers_own() -> None:
    defaults = Config()
    own_s = defaults.shutdown_delay_s + defaults.drain_s + CLOSE_TIMEOUT_S + STOP_TIMEOUT_S
    assert float(unit()["Service"]["TimeoutStopSec"]) > own_s


def test_every_client_and_worker_has_its_files() -> None:
    most = max(HttpLimits().max_connections, FILES_PER_WORKER * Config().max_workers)
    assert int(unit()["Service"]["LimitNOFILE"]) > FILES_PER_CONNECTION * most


def test_only_the_router_is_signalled_and_its_readiness_waited_for() -> None:
    service = unit()["Service"]
    assert (service["Type"], service["KillMode"], service["Restart"]) == ("notify", "mixed", "on-failure")


def test_the_store_is_in_the_state_directory() -> None:
    service = unit()["Service"]
    assert service["Environment"] == f"{variable_of('data_dir')}=%S/{service['StateDirectory']}"


def test_every_setting_of_the_environment_file_is_one_and_takes_its_example() -> None:
    lines = (FOLDER / "kvrouter.env").read_text().splitlines()
    examples = dict(re.findall(r"^#?(KVROUTER_\w+)=(.*)$", "\n".join(lines), re.MULTILINE))
    assert len(examples) > 8 and examples.keys() <= {variable_of(name) for name in FIELDS}
    # Load the file as it stands, and then with every example that has a value.
    active = dict(line.partition("=")[::2] for line in lines if line.startswith("KVROUTER_"))
    assert msgspec.to_builtins(load_config(None, active, {}))["log_format"] == "json"
    load_config(None, {name: value for name, value in examples.items() if value}, {})


def test_the_page_says_what_the_unit_says() -> None:
    service = unit()["Service"]
    for name in ("LimitNOFILE", "KillMode", "MemoryDenyWriteExecute", "ProtectProc"):
        assert f"`{name}={service[name]}`" in PAGE or f"`{name}={service[name]}`," in PAGE
    assert f"{service['TimeoutStopSec']} s fits the defaults" in PAGE
