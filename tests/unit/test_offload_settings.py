# SPDX-License-Identifier: Apache-2.0
"""Settings of the tiers that a user gives, and the messages for those that cannot be met."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvrouter.engine_patch.offload.settings import (
    DEFAULT_DISK_THREADS,
    DEFAULT_POLICY,
    OF_VLLM,
    TierSettings,
    tier_settings,
)

CPU = {"cpu_bytes_to_use": 1000}
DISK = {**CPU, "disk_path": "/d"}


def test_missing_settings_have_their_defaults() -> None:
    assert tier_settings(CPU) == TierSettings(1000, DEFAULT_POLICY, None, 0, DEFAULT_DISK_THREADS)
    assert tier_settings(CPU | dict.fromkeys(OF_VLLM - {"canonical_layout"}, 1)) == tier_settings(CPU)


def test_only_an_own_disk_has_a_budget() -> None:
    assert tier_settings(DISK | {"disk_bytes_to_use": "5", "disk_threads": 2}) == TierSettings(
        1000, disk_folder=Path("/d"), disk_bytes=5, disk_threads=2
    )
    assert tier_settings(DISK | {"disk_read_only": True}) == TierSettings(
        1000, disk_folder=Path("/d"), disk_read_only=True
    )
    assert not tier_settings(DISK | {"disk_bytes_to_use": 5, "disk_read_only": False}).disk_read_only


def test_a_port_opens_the_peer_tier() -> None:
    assert tier_settings(CPU).peer_port is None
    given = tier_settings(
        CPU | {"peer_port": 5710, "peer_host": "10.0.0.1", "peer_timeout_s": 2, "peer_key_file": "/k"}
    )
    assert (given.peer_port, given.peer_host, given.peer_timeout_s) == (5710, "10.0.0.1", 2.0)
    assert (given.peer_key_file, given.peer_list_file) == ("/k", None)
    assert not given.peer_lends_disk
    disk = {"peer_port": 5710, "disk_path": "/d", "disk_read_only": True}
    assert tier_settings(CPU | disk | {"peer_lends_disk": True}).peer_lends_disk


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "lacks cpu_bytes_to_use"),
        (DISK, "lacks disk_bytes_to_use"),
        (CPU | {"disk_bytes_to_use": 5}, "disk_bytes_to_use is set without disk_path"),
        (CPU | {"disk_read_only": True}, "disk_read_only is set without disk_path"),
        (DISK | {"disk_read_only": True, "disk_bytes_to_use": 5}, "the engine that writes the folder"),
        (DISK | {"disk_read_only": "yes"}, "it must be true or false"),
        (CPU | {"cpu_byte": 5}, "cpu_byte, which this offload tier does not know; it knows cpu_bytes_to_use"),
        (CPU | {"canonical_layout": True}, "leave it out"),
        ({"cpu_bytes_to_use": "much"}, "'much', which is no whole number"),
        ({"cpu_bytes_to_use": 0}, "must be at least 1"),
        (DISK | {"disk_bytes_to_use": 1, "disk_threads": 65}, "at least 1 and at most 64"),
        (CPU | {"peer_host": "10.0.0.1"}, "peer_host is set without peer_port"),
        (DISK | {"disk_read_only": True, "peer_lends_disk": True}, "peer_lends_disk is set without peer_port"),
        (CPU | {"peer_port": 1, "peer_lends_disk": True}, "peer_lends_disk is set without disk_path"),
        (DISK | {"peer_port": 1, "peer_lends_disk": "yes"}, "it must be true or false"),
        (CPU | {"peer_port": 70_000}, "at least 1 and at most 65535"),
        (CPU | {"peer_port": 1, "peer_timeout_s": 0}, "peer_timeout_s is 0; .* from 0.05 to 60"),
        (CPU | {"peer_port": 1, "peer_timeout_s": True}, "a number of seconds"),
    ],
)
def test_errors_name_the_key_and_what_it_should_be(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tier_settings(given)
