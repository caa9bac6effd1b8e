# SPDX-License-Identifier: Apache-2.0
"""Engines that get the key of the setting worker_api_key, and addresses that are refused without a list."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

import msgspec
import pytest

from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.model.upstream.failure import Failure
from kvrouter.router.model.upstream.origin import target_of
from kvrouter.router.model.upstream.pool import Pool
from kvrouter.router.model.upstream.resolver import CheckedResolver
from kvrouter.router.model.workers.allow_list import AllowList
from kvrouter.router.model.workers.engine_key import EngineKey, parse_engine_keys
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.source_precedence import PRECEDENCE, REGISTER
from kvrouter.router.model.workers.worker_spec import key_name_problem, url_problem

URL = "http://10.0.0.5:8000"


def registered(source: str, url: str = URL, worker_id: str = "w0") -> Registration:
    return Registration(worker=WorkerKey("m", worker_id, 0), url=url, source=source)


@pytest.mark.parametrize("source", [*PRECEDENCE, "of another version"])
def test_the_operators_own_workers_get_the_key_and_a_clients_do_not(source: str) -> None:
    registrations = [registered(source)]
    key = EngineKey("secret", AllowList(), lambda: registrations)
    is_operators = source in PRECEDENCE and source != REGISTER
    assert key.header_for_url(URL) == ("Bearer secret" if is_operators else None)
    # Another port of the host may belong to anybody.
    assert key.header_for_url("http://10.0.0.5:8001") is None
    assert key.withheld() == ([] if is_operators else ["w0"])
    assert ("worker_api_key is not sent to 1 workers ('w0')" in "".join(key.health())) != is_operators


def test_a_list_decides_for_all_other_workers() -> None:
    key = EngineKey("secret", AllowList(["10.0.0.0/8", "*.engines"]), lambda: [registered(REGISTER)])
    for url, listed in ((URL, True), ("http://a.engines", True), ("http://11.0.0.1", False), ("http://engines", False)):
        for _ in range(2):
            assert (key.header_for_url(url) is not None) == listed
    assert key.health() == []
    # The router queries the engine of a workers file before the engine is registered.
    assert key.header_for_url("http://11.0.0.1", named=True) == "Bearer secret"
    assert EngineKey(None, AllowList(["10.0.0.0/8"])).header_for_url(URL, named=True) is None


def test_registrations_are_followed() -> None:
    registrations: Sequence[Registration] = (registered(REGISTER),)
    key = EngineKey("secret", AllowList(), lambda: registrations)
    assert key.header_for_url(URL) is None
    registrations = (registered("file"),)
    assert key.header_for_url(URL) == "Bearer secret"
    registrations = ()
    assert key.header_for_url(URL) is None


def test_a_worker_gets_the_key_that_it_names() -> None:
    named = Registration(WorkerKey("m", "w1", 0), url="http://10.0.0.6:8000", source="file", engine_key="b")
    unknown = Registration(WorkerKey("m", "w2", 0), url="http://10.0.0.7:8000", source="file", engine_key="c")
    key = EngineKey("common", AllowList(), lambda: [registered("file"), named, unknown])
    key.take("common", {"b": "second"})
    assert key.header_for_url(URL) == "Bearer common"
    assert key.header_for_url("http://10.0.0.6:8000") == "Bearer second"
    assert key.header_for_url("http://10.0.0.7:8000") is None, "no other engine's key"
    assert key.missing() == {"c": ["w2"]} and key.withheld() == []
    (problem,) = key.health()
    assert "engine key c" in problem and "'w2'" in problem and "worker_api_keys_file" in problem
    # The router queries the engine of a workers file before the engine is registered.
    assert key.header_for_url("http://11.0.0.1", named=True, name="b") == "Bearer second"
    key.take("common", {"default": "other", "b": "third", "c": "fourth"})
    assert [key.header_for_url(f"http://10.0.0.{n}:8000") for n in (5, 6, 7)] == [
        "Bearer other",
        "Bearer third",
        "Bearer fourth",
    ]
    key.take(None, {"b": "third"})
    assert key.is_set and key.header_for_url(URL) is None and key.withheld() == []


def test_a_client_does_not_decide_which_key_an_operators_engine_gets() -> None:
    operators = Registration(WorkerKey("m", "w0", 0), url=URL, source="file", engine_key="a")
    clients = Registration(WorkerKey("m", "w1", 0), url=URL, source=REGISTER, engine_key="b")
    for registrations in ([operators, clients], [clients, operators]):
        key = EngineKey(None, AllowList(), lambda found=registrations: found)  # type: ignore[misc]
        key.take(None, {"a": "first", "b": "second"})
        assert key.header_for_url(URL) == "Bearer first"
        assert key.header_for_url(URL, name="b") == "Bearer first", "a client registers one more"


@pytest.mark.parametrize("name", ["b", "unknown"])
def test_a_client_does_not_name_the_key_of_an_operators_engine_without_a_name(name: str) -> None:
    operators, clients = registered("file"), registered(REGISTER, worker_id="w1")
    clients = msgspec.structs.replace(clients, engine_key=name)
    for registrations in ([operators, clients], [clients, operators]):
        key = EngineKey("common", AllowList(), lambda found=registrations: found)  # type: ignore[misc]
        key.take("common", {"b": "second"})
        assert key.header_for_url(URL) == "Bearer common"
        assert key.header_for_url(URL, name=name) == "Bearer common", "a client registers one more"
        assert key.withheld() == []


def test_one_of_an_operators_ranks_names_the_key_of_all() -> None:
    first = registered("file")
    second = msgspec.structs.replace(first, worker=WorkerKey("m", "w0", 1), engine_key="b")
    for registrations in ([first, second], [second, first]):
        key = EngineKey("common", AllowList(), lambda found=registrations: found)  # type: ignore[misc]
        key.take("common", {"b": "second"})
        assert key.header_for_url(URL) == "Bearer second"


def test_a_file_lists_keys_by_name() -> None:
    assert parse_engine_keys('default: "k"\nteam-a: sk-1\n', "f") == {"default": "k", "team-a": "sk-1"}
    assert parse_engine_keys('{"a": "b"}', "f") == {"a": "b"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "lists no keys"),
        ("[a]", "lists no keys"),
        ("a: [", "line 1 is not YAML"),
        ("a: HUSH HUSH", "write the key a as quoted text"),
        ("a: 5", "write the key a as quoted text"),
        ("a: ''", "write the key a as quoted text"),
        ("HUSH HUSH: a", "the name of key 1"),
        ("5: a", "the name of key 1"),
        ("- !!python/object/apply:os.system [HUSH]", "is not YAML"),
        ("\n".join(f"k{n}: HUSH" for n in range(6_001)), "at most 6000"),
    ],
)
def test_a_wrong_file_of_keys_is_named_without_its_keys(text: str, words: str) -> None:
    with pytest.raises(SettingError) as caught:
        parse_engine_keys(text, "f")
    assert words in caught.value.message and "HUSH" not in caught.value.message


@pytest.mark.parametrize("name", ["", "a b", "../x", "a" * 65, "ä", "a\n"])
def test_a_name_of_a_key_has_plain_characters(name: str) -> None:
    assert key_name_problem(name) is not None


@pytest.mark.parametrize("part", ["?x=", "?", "#a", "#", "/latest/meta-data/?x=", "/a#?"])
def test_no_address_has_a_query_or_a_fragment(part: str) -> None:
    assert "query" in (url_problem(URL + part) or "")
    # Another version may have written such addresses into the store.
    for allowed in (AllowList(), AllowList(["10.0.0.5"])):
        assert "query" in (allowed.registration_problem(registered(REGISTER, URL + part)) or "")
    assert url_problem(URL + "/engines/0/") is None


LINK_LOCAL = (
    *("169.254.169.254", "169.254.0.1", "[fe80::1]", "[fe80::1%25eth0]", "[::ffff:169.254.169.254]"),
    # The C library reads these as 169.254.169.254.
    *("2852039166", "0xa9fea9fe", "169.254.43518", "0251.0376.0251.0376", "0xA9.254.169.254."),
)


@pytest.mark.parametrize("host", LINK_LOCAL)
def test_a_link_local_address_is_one_that_is_listed(host: str) -> None:
    for endpoint in (f"http://{host}:80/latest", f"tcp://{host}:5557"):
        assert "allow_hosts" in (AllowList().problem(endpoint) or "")
        assert AllowList(["10.0.0.0/8"]).problem(endpoint) is not None
    if host == "169.254.169.254":
        assert AllowList(["169.254.0.0/16"]).problem(f"http://{host}") is None
    for other in ("10.0.0.5", "[2001:db8::1]", "w0", "1.2.3.4.5", "0x7f000001", "169.254.example"):
        assert AllowList().problem(f"http://{other}") is None


class OneAddress(AllowList):
    """Allow list that takes the loopback address for a link-local one, because no name here resolves to a real one."""

    def admits_address(self, host: str, address: str) -> bool:
        return super().admits_address(host, "169.254.0.1" if address in ("127.0.0.1", "::1") else address)


async def test_a_name_with_a_link_local_address_gets_no_request() -> None:
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        target = target_of(f"http://localhost:{port}")
        with pytest.raises(Failure, match="localhost has a link-local address"):
            await Pool(loop, OneAddress()).connect(target)
        connection, _ = server.accept()
        with connection:
            # The server receives nothing but the end of the connection.
            assert await asyncio.to_thread(connection.recv, 1) == b""
        with pytest.raises(OSError, match="localhost has a link-local address"):
            await CheckedResolver(OneAddress()).resolve("localhost", port, socket.AF_INET)
        assert await CheckedResolver(AllowList()).resolve("localhost", port, socket.AF_INET)
        for allowed in (AllowList(), OneAddress(["localhost"])):
            (await Pool(loop, allowed).connect(target)).close()
