# SPDX-License-Identifier: Apache-2.0
"""Addresses that the setting allow_hosts admits."""

from __future__ import annotations

import pytest

from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.model.config.loading import load_config
from kvrouter.router.model.workers.allow_list import AllowList
from kvrouter.router.model.workers.registration import NO_PATCH, Registration
from kvrouter.router.model.workers.worker_spec import endpoint_problem, url_problem

W0 = WorkerKey("m", "w0")


def allows(entries: list[str], endpoint: str) -> bool:
    return AllowList(entries).problem(endpoint) is None


@pytest.mark.parametrize("endpoint", ["tcp://1.2.3.4:5", "http://any.where", "ipc:///anything", "https://[::1]:1"])
def test_without_a_list_all_is_allowed(endpoint: str) -> None:
    assert allows([], endpoint)


@pytest.mark.parametrize(
    ("entry", "endpoint"),
    [
        ("10.0.0.5", "tcp://10.0.0.5:5557"),
        ("10.0.0.0/8", "http://10.255.255.255:8000/base"),
        ("fd00::/8", "tcp://[fd00::1]:5557"),
        ("[fd00::1]", "https://[fd00::1]/"),
        ("127.0.0.0/8", "tcp://[::ffff:127.0.0.1]:1"),
        ("engine-0", "tcp://engine-0:5557"),
        ("Engine.Example.", "http://ENGINE.example:80"),
        ("engine.example", "http://engine.example.:80"),
        ("*.engines.svc", "tcp://a.b.engines.svc:1"),
        ("ipc:///run/kv/", "ipc:///run/kv/a/b"),
        ("ipc:///run/kv.sock", "ipc:///run//kv.sock"),
        ("ipc:///run/kv.sock", "ipc:////run/kv.sock"),
        ("ipc://@kv", "ipc://@kv"),
    ],
)
def test_a_listed_address_is_allowed(entry: str, endpoint: str) -> None:
    assert allows(["unrelated", entry], endpoint)


@pytest.mark.parametrize(
    ("entry", "endpoint"),
    [
        ("10.0.0.5", "tcp://10.0.0.50:5557"),
        ("10.0.0.0/8", "http://11.0.0.0"),
        ("10.0.0.0/8", "tcp://[fd00::1]:5557"),
        # The C library reads these numbers as 127.0.0.1. The router treats them as names, which nobody listed.
        ("127.0.0.0/8", "http://2130706433"),
        ("127.0.0.0/8", "http://0x7f000001"),
        ("127.0.0.0/8", "tcp://127.1:80"),
        # A network never admits a name, because the address of a name may change.
        ("0.0.0.0/0", "tcp://engine:1"),
        ("engine", "tcp://engine.evil.example:1"),
        ("engine", "tcp://notengine:1"),
        ("*.engines.svc", "tcp://engines.svc:1"),
        ("*.engines.svc", "tcp://evilengines.svc:1"),
        ("*.5", "http://10.0.0.5"),
        ("engine", "ipc://engine"),
        ("0.0.0.0/0", "ipc:///run/kv.sock"),
        ("ipc:///run/kv/", "ipc:///run/kv/../other"),
        ("ipc:///run/kv/", "ipc:///run/kvx"),
        ("ipc:///run/kv", "ipc:///run/kv/a"),
        ("ipc:///kv", "ipc://@/kv"),
        ("engine", "http://"),
        ("engine", "http://[engine"),
    ],
)
def test_the_refusal_of_an_address_names_the_setting(entry: str, endpoint: str) -> None:
    problem = AllowList([entry]).problem(endpoint)
    assert problem is not None
    assert "allow_hosts" in problem


@pytest.mark.parametrize(
    "entry",
    ["", "10.0.0.1/8", "10.0.0.256", "127.1", "0x7f000001", "h:80", "http://h", "a b", "*", "*.", "ipc://", "h/8"],
)
def test_an_invalid_entry_ends_the_start(entry: str) -> None:
    with pytest.raises(SettingError, match="host name"):
        AllowList([entry])
    with pytest.raises(SettingError, match="--allow-host"):
        load_config(None, {}, {"allow_hosts": [entry]})


@pytest.mark.parametrize(
    ("field", "registration"),
    [
        ("endpoint", Registration(W0, events="tcp://bad:1")),
        ("replay_endpoint", Registration(W0, events="tcp://good:1", replay="tcp://bad:1")),
        ("patch_endpoint", Registration(W0, events="tcp://good:1", patch="ipc:///bad")),
        ("url", Registration(W0, events="tcp://good:1", url="http://bad:1")),
        ("peer", Registration(W0, events="tcp://good:1", peer="bad:1")),
    ],
)
def test_every_address_of_a_registration_is_judged(field: str, registration: Registration) -> None:
    problem = AllowList(["good"]).registration_problem(registration)
    assert problem is not None
    assert problem.startswith(f"{field}: ")


def test_a_registration_with_listed_addresses_is_allowed() -> None:
    registration = Registration(W0, "tcp://good:1", "tcp://good:2", "http://good", patch=NO_PATCH)
    assert AllowList(["good"]).registration_problem(registration) is None


def test_a_worker_of_the_settings_is_judged_before_anything_starts() -> None:
    flags = {"workers": ["w0=http://10.0.0.1:8000"], "allow_hosts": ["10.0.0.0/24"]}
    assert load_config(None, {}, flags).allow_hosts == ("10.0.0.0/24",)
    with pytest.raises(SettingError, match=r"'w0': url: 10\.0\.0\.1 is not in .* allow_hosts"):
        load_config(None, {}, flags | {"allow_hosts": ["10.0.1.0/24"]})


# Two readers may take different parts of such an endpoint for the host, which would get past any list.
@pytest.mark.parametrize(
    "endpoint", ["tcp://10.0.0.1:1;10.9.9.9:1", "tcp://fd00::1:1", "tcp://a@b:1", "tcp://good\\bad:1", "tcp://[good]:1"]
)
def test_ambiguous_endpoints_are_refused(endpoint: str) -> None:
    assert endpoint_problem(endpoint)


@pytest.mark.parametrize(
    "url", ["http://good@bad", "http://bad\\@good/", "http://u:p@good", "ftp://good", "file:///good"]
)
def test_ambiguous_urls_are_refused(url: str) -> None:
    assert url_problem(url)


@pytest.mark.parametrize("endpoint", ["tcp://[fe80::1%eth0]:5557", "tcp://[::1]:5557", "tcp://engine_0.svc:5557"])
def test_endpoints_of_all_kinds_are_accepted(endpoint: str) -> None:
    assert endpoint_problem(endpoint) is None
