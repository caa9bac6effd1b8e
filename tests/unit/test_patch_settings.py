# SPDX-License-Identifier: Apache-2.0
"""Settings of the patch in the engine's environment, and the messages for wrong ones."""

from __future__ import annotations

import pytest

from kvrouter.engine_patch.setup.settings import PatchSettings, from_environment


def test_an_empty_environment_gives_the_defaults() -> None:
    for environment in ({}, {"KVROUTER_PATCH": "", "KVROUTER_PATCH_MAX_BLOCKS": " "}, {"VLLM_X": "1"}):
        assert from_environment(environment) == (PatchSettings(), [])
    assert PatchSettings().enabled


@pytest.mark.parametrize(
    ("text", "on"), [("1", True), ("TRUE", True), (" on ", True), ("0", False), ("No", False), ("off", False)]
)
def test_the_switch_turns_the_patch_on_and_off(text: str, on: bool) -> None:
    assert from_environment({"KVROUTER_PATCH": text}) == (PatchSettings(enabled=on), [])


def test_every_variable_is_read() -> None:
    settings, wrong = from_environment(
        {
            "KVROUTER_PATCH_REQUESTS": "tcp://[::1]:0",
            "KVROUTER_PATCH_REPORTS": "ipc:///tmp/reports",
            "KVROUTER_PATCH_HEARTBEAT_S": "0.25",
            "KVROUTER_PATCH_MAX_BLOCKS": "1000",
        }
    )
    assert wrong == []
    assert settings == PatchSettings(True, "tcp://[::1]:0", "ipc:///tmp/reports", 0.25, 1_000)
    assert (settings.reporter().heartbeat_s, settings.reporter().max_ledger_blocks) == (0.25, 1_000)


@pytest.mark.parametrize(
    "text", ["tcp://*:15557", "tcp://10.0.0.1:65535", "tcp://host.name:1", "tcp://[fe80::1%eth0]:5", "inproc://x"]
)
def test_each_kind_of_endpoint_is_accepted(text: str) -> None:
    assert from_environment({"KVROUTER_PATCH_REQUESTS": text}) == (PatchSettings(requests=text), [])


@pytest.mark.parametrize(
    ("variable", "texts", "hint"),
    [
        ("KVROUTER_PATCH", ["2", "enabled", "-1"], "1 (on) or 0 (off); 1 is used"),
        (
            "KVROUTER_PATCH_REQUESTS",
            ["15557", "tcp://host", "tcp://host:70000", "tcp://::1:5", "http://h:1", "tcp://a b:1", "ipc://"],
            "like tcp://*:15557 or ipc:///run/engine-requests; a place beside the engine's event endpoint is used",
        ),
        ("KVROUTER_PATCH_REPORTS", ["tcp://h:x"], "like tcp://*:16557 or ipc:///run/engine-reports; a place beside"),
        (
            "KVROUTER_PATCH_HEARTBEAT_S",
            ["0", "-1", "61", "nan", "inf", "1s", "0.01"],
            "a number of seconds from 0.05 to 60; 1.0 is used",
        ),
        (
            "KVROUTER_PATCH_MAX_BLOCKS",
            ["0", "-5", "1e6", "1_000", "٣", "1" * 13],
            "a whole number of blocks, 1 or more, like 4000000; 4000000 is used",
        ),
    ],
)
def test_a_wrong_value_is_named_and_the_default_used(variable: str, texts: list[str], hint: str) -> None:
    for text in texts:
        settings, wrong = from_environment({"KVROUTER_PATCH_HEARTBEAT_S": "2"} | {variable: text})
        assert len(wrong) == 1, text
        assert wrong[0].startswith(f"{variable}={text!r} is not ")
        assert hint in wrong[0]
        # The other settings stay valid.
        expected = PatchSettings() if variable.endswith("HEARTBEAT_S") else PatchSettings(heartbeat_s=2.0)
        assert settings == expected


def test_an_unknown_variable_is_named() -> None:
    settings, wrong = from_environment({"KVROUTER_PATCH_HEARTBEAT": "2", "KVROUTER_PATCH_SERVICE_PORT_HTTP": "1"})
    assert settings == PatchSettings()
    assert len(wrong) == 1
    assert wrong[0].startswith(
        "KVROUTER_PATCH_HEARTBEAT is not a setting of the engine patch; there are KVROUTER_PATCH, "
    )
