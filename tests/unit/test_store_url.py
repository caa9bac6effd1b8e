# SPDX-License-Identifier: Apache-2.0
"""Redis URLs: their parts, and the refusal of wrong ones without their passwords."""

from __future__ import annotations

import pytest

from kvrouter.router.base.redis_client.errors import StoreError
from kvrouter.router.base.redis_client.url import parse_url
from kvrouter.router.model.config.settings import without_password


def test_urls_are_read() -> None:
    plain = parse_url("redis://user:p%2Fw@host:7000/3")
    assert plain.address == ("host", 7000)
    assert plain.login.options == {"username": "user", "password": "p/w", "db": 3}
    assert parse_url("redis://").address == ("localhost", 6379)
    assert parse_url("valkey://[::1]:7000").address == ("::1", 7000)
    socket = parse_url("unix://:pw@/tmp/a%20b.sock?db=2")
    assert (socket.address, socket.login.options) == ("/tmp/a b.sock", {"password": "pw", "db": 2})
    assert plain.login.tls is None
    assert parse_url("rediss://host").login.tls is not None
    assert parse_url("redis+cluster://host:1").must_be_cluster


def test_a_sentinel_url_names_the_sentinels_the_service_and_two_logins() -> None:
    url = parse_url("redis+sentinel://user:p%40w@a,[::1]:7000,b:26380/my%2Fservice/3?sentinel_password=s%26t")
    assert (url.sentinels, url.service) == ((("a", 26379), ("::1", 7000), ("b", 26380)), "my/service")
    assert url.login.options == {"username": "user", "password": "p@w", "db": 3}
    assert url.sentinel_options == {"password": "s&t"}
    bare = parse_url("redis+sentinel://a/service")
    assert (bare.login.options, bare.sentinel_options) == ({}, {})


def test_tls_with_sentinel_is_for_both() -> None:
    url = parse_url("rediss+sentinel://a/service?ssl_cert_reqs=none&sentinel_username=watcher")
    assert url.login.tls is not None
    assert url.login.tls.get().check_hostname is False
    assert url.sentinel_options == {"username": "watcher", "ssl": True, "ssl_cert_reqs": "none"}


@pytest.mark.parametrize(
    "url",
    [
        "http://:secret@host",
        "redis://:secret/x@host:6379",
        "redis://:secret@host:port",
        "redis://:secret@host/db",
        "redis://:secret@host?nonsense=1",
        "redis://host?sentinel_password=secret",
        "unix://:secret@",
        "unix+cluster://:secret@/a",
        "unix+sentinel://:secret@/a",
        "redis+sentinel://:secret@a,b",
        "redis+sentinel://:secret@a,b/service/db",
        "redis+sentinel://:secret@a:1,b:port/service",
        "redis://:secret@[::1",
        "rediss://:secret@host?ssl_cert_reqs=nonsense",
        "secret",
    ],
)
def test_a_wrong_url_is_refused_without_showing_its_password(url: str) -> None:
    with pytest.raises(StoreError) as raised:
        parse_url(url)
    error_text = f"{raised.value!r} {raised.value.__cause__!r} {raised.value.__suppress_context__}"
    assert "secret" not in error_text
    assert any(words in str(raised.value) for words in ("://", "known are", "correct them"))


def test_a_parsed_url_never_shows_its_passwords() -> None:
    url = parse_url("redis+sentinel://u:secret@host/service?sentinel_password=secret")
    assert "secret" not in f"{url!r} {url} {url.login!r} {url.login}"


def test_a_url_is_shown_without_its_passwords() -> None:
    url = "redis+sentinel://u:secret@a:1,b:2/service/0?sentinel_username=w&sentinel_password="
    # An unescaped password may hold anything.
    for password in ("secret", "x@secret", "x&secret", "x/secret"):
        assert without_password(url + password) == (
            "redis+sentinel://***@a:1,b:2/service/0?sentinel_username=w&sentinel_password=***"
        )
        assert "secret" not in without_password(f"redis+sentinel://a/s?sentinel_password={password}")
