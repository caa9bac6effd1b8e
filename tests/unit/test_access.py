# SPDX-License-Identifier: Apache-2.0
"""API keys from a file, expiry of certificates, rates of registrations, and watched files."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import pytest

from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.base.common.file_watch import SETTLE_S, FileWatch
from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.model.config.live_settings import LiveSettings
from kvrouter.router.model.config.loading import Origin, load_config
from kvrouter.router.model.config.settings import Config
from kvrouter.router.serve.access.access import Access, TokenBucket
from kvrouter.router.serve.access.access_metrics import AccessMetrics
from kvrouter.router.serve.access.api_keys import MAX_KEYS, ApiKey, ApiKeys, digest_of, parse_keys
from kvrouter.router.serve.access.certificate import Certificate
from kvrouter.router.serve.access.key_bounds import KeyBounds
from kvrouter.router.serve.access.scope import Scope
from kvrouter.router.serve.access.validity import Validity

KEY = "a-key-of-the-gateway"
OTHER = "another-key-of-an-engine"
DAY_S = 86_400.0


def access(clock: list[float] | None = None, wall: list[float] | None = None, **settings: object) -> Access:
    now, wall_now = clock or [0.0], wall or [time.time()]
    return Access(
        LiveSettings(Config(**settings)),  # type: ignore[arg-type]
        AccessMetrics(MetricRegistry()),
        clock=lambda: now[0],
        wall_clock=lambda: wall_now[0],
    )


# Keys.


def test_a_file_lists_keys_by_themselves_or_by_their_digest() -> None:
    digest = hashlib.sha256(OTHER.encode()).hexdigest()
    engines = f"{{name: engines, scopes: [register, watch], sha256: {digest}}}"
    text = f"keys:\n- {{name: gateway, scopes: [ask], key: {KEY}}}\n- {engines}\n"
    first, second = parse_keys(text, "f")
    assert first == ApiKey("gateway", frozenset({Scope.ASK}), digest_of(KEY), KeyBounds("gateway"))
    assert second == ApiKey("engines", frozenset({Scope.REGISTER, Scope.WATCH}), digest_of(OTHER), KeyBounds("engines"))
    keys = ApiKeys([first, second])
    for key, expected in ((KEY, first), (OTHER, second), (KEY + "x", None), ("", None)):
        assert keys.holder(f"Bearer {key}") == expected
        assert keys.holder(f"bearer  {key} ") == expected
        assert keys.holder(f"Basic {key}") is keys.holder(key) is None
    # JSON is valid YAML.
    assert parse_keys(json.dumps({"keys": [{"name": "gateway", "scopes": ["ask"], "key": KEY}]}), "f") == [first]


def test_an_admin_key_has_every_scope_and_others_the_scopes_they_name() -> None:
    admin = ApiKey("a", frozenset({Scope.ADMIN}), b"", KeyBounds("a"))
    ask = ApiKey("b", frozenset({Scope.ASK}), b"", KeyBounds("b"))
    for scope in Scope:
        assert admin.may(frozenset({scope}))
        assert ask.may(frozenset({scope})) == (scope in (Scope.ASK, Scope.PROXY, Scope.HITS))
    assert ask.may(frozenset(Scope))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "lists no keys"),
        ("keys: []", "lists no keys"),
        ("[]", "lists no keys"),
        ("keys: {}\nmore: 1", "lists no keys"),
        ("keys: [", "line 1 is not YAML"),
        ("keys: [5]", "key 1 is no key"),
        (f"keys: [{{name: a b, scopes: [ask], key: {KEY}}}]", "key 1 is no key"),
        (f"keys: [{{name: a, scopes: [], key: {KEY}}}]", "key 1 is no key"),
        (f"keys: [{{name: a, scopes: [root], key: {KEY}}}]", "ask, proxy, hits, register, watch, admin"),
        (f"keys: [{{name: a, scopes: [ask], key: {KEY}, more: 1}}]", "key 1 is no key"),
        ("keys: [{name: a, scopes: [ask], key: 12345678901234567}]", "as quoted text"),
        ("keys: [{name: a, scopes: [ask]}]", "either `key` or `sha256`"),
        (f"keys: [{{name: a, scopes: [ask], key: {KEY}, sha256: '00'}}]", "either `key` or `sha256`"),
        ("keys: [{name: a, scopes: [ask], sha256: '00'}]", "64 hex digits"),
        ("keys: [{name: a, scopes: [ask], key: short}]", "16 or more printable"),
        ("keys: [{name: a, scopes: [ask], key: 'a key with some spaces'}]", "16 or more printable"),
        (f"keys: [{{name: api_key, scopes: [ask], key: {KEY}}}]", "name api_key is taken"),
        (f"keys: [{{name: unknown, scopes: [ask], key: {KEY}}}]", "name unknown is taken"),
        (f"keys: [{{name: a, scopes: [ask], key: {KEY}}}, {{name: a, scopes: [ask], key: {OTHER}}}]", "there twice"),
        (
            f"keys: [{{name: a, scopes: [ask], key: {KEY}}}, {{name: b, scopes: [ask], key: {KEY}}}]",
            "the same key as a",
        ),
        ("keys: [" + ", ".join(f"{{name: k{n}}}" for n in range(MAX_KEYS + 1)) + "]", f"at most {MAX_KEYS}"),
    ],
)
def test_the_refusal_of_a_wrong_file_shows_no_key(text: str, said: str) -> None:
    with pytest.raises(SettingError) as caught:
        parse_keys(text, "keys.yaml")
    assert said in caught.value.message and caught.value.message.startswith("keys.yaml")
    assert KEY not in caught.value.message and "short" not in caught.value.message


def test_the_key_of_the_setting_is_valid_beside_those_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(f"keys: [{{name: gateway, scopes: [ask], key: {KEY}}}]")
    assert access().keys is None
    keys = access(api_key="x", api_keys_file=str(file)).keys
    assert keys is not None and keys.names == ["api_key", "gateway"]
    admin = keys.holder("Bearer x")
    assert admin is not None and admin.scopes == {Scope.ADMIN}


def test_missing_files_end_the_start(tmp_path: Path) -> None:
    missing = str(tmp_path / "none")
    with pytest.raises(SettingError, match="No such file"):
        access(api_keys_file=missing)
    with pytest.raises(SettingError, match="No such file"):
        access(tls_certificate=missing, tls_key=missing)
    halves: list[dict[str, Any]] = [{"tls_certificate": missing}, {"tls_key": missing}]
    for half in halves:
        with pytest.raises(SettingError, match="go together"):
            access(**half)
    with pytest.raises(SettingError, match="tls_client_ca needs"):
        access(tls_client_ca=missing)


# Certificates.


def test_a_certificate_near_its_expiry_is_reported() -> None:
    def at(days_left: float, life_days: float) -> tuple[str | None, str | None]:
        certificate = Certificate(None, Validity(0.0, life_days * DAY_S))  # type: ignore[arg-type]
        now_s = (life_days - days_left) * DAY_S
        return certificate.expiry_caution(now_s), certificate.expiry_problem(now_s)

    assert at(15, 90) == (None, None)
    caution, problem = at(13.9, 90)
    assert caution is not None and "in 14 days" in caution and problem is None
    # A certificate that lives for a day is renewed within that day.
    assert at(0.3, 1) == (None, None)
    caution, problem = at(0.15, 1)
    assert caution is not None and "3.6 hours" in caution and problem is None
    caution, problem = at(0, 90)
    assert caution is None and problem is not None and "has expired" in problem
    caution, problem = at(91, 90)
    assert caution is None and problem is not None and "not valid yet" in problem


# Registrations.


def test_registrations_are_limited_to_a_burst_and_a_rate() -> None:
    bucket = TokenBucket(10.0, 3, 0.0)
    assert [bucket.take(0.0) for _ in range(3)] == [0.0, 0.0, 0.0]
    assert bucket.take(0.0) == pytest.approx(0.1)
    # A refused registration costs nothing.
    assert bucket.take(0.05) == pytest.approx(0.05)
    assert bucket.take(0.11) == 0.0
    # No more than a burst gathers, however long the pause.
    assert [bucket.take(1_000.0) for _ in range(4)][:3] == [0.0, 0.0, 0.0]
    assert bucket.take(1_000.0) > 0


def test_each_key_has_its_own_rate_limit() -> None:
    now = [0.0]
    limited = access(now, max_workers=10, registrations_per_s=1.0)
    assert not any(limited.registration_pause_s("a") for _ in range(40))
    assert limited.registration_pause_s("a") == 1.0
    assert limited.registration_pause_s("b") == 0.0
    now[0] = 1.0
    assert limited.registration_pause_s("a") == 0.0
    unlimited = access(now, max_workers=1, registrations_per_s=0.0)
    assert not any(unlimited.registration_pause_s("a") for _ in range(1_000))


async def test_a_rate_of_the_settings_file_is_applied(tmp_path: Path) -> None:
    file = tmp_path / "k.yaml"
    file.write_text("registrations_per_s: 1\nmax_workers: 1\n")
    config = load_config(file, {}, {})
    live = LiveSettings(config, Origin(str(file), {}, config))
    limited = Access(live, AccessMetrics(MetricRegistry()), clock=lambda: 0.0, wall_clock=time.time)
    while not limited.registration_pause_s("a"):
        pass
    assert limited.registration_pause_s("a") == 1.0
    file.write_text("registrations_per_s: 4\nmax_workers: 1\n")
    assert live.file is not None
    await live.file.read_again()
    while not limited.registration_pause_s("a"):
        pass
    assert limited.registration_pause_s("a") == 0.25


# Files.


def test_a_group_of_files_is_reloaded_when_one_has_changed_and_settled(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text("1")
    second.write_text("2")
    watch = FileWatch(first, second)
    watch.begin()
    assert not watch.due() and not watch.due()
    second.write_text("22")
    assert not watch.due(), "it may be half written"
    assert watch.due()
    watch.begin()
    assert not watch.due()
    first.unlink()
    with pytest.raises(OSError):
        watch.due()
    first.write_text("1")
    assert not watch.due() and watch.due()


def test_no_part_of_a_file_replaces_the_keys_but_whole_entries(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    text = "keys:\n" + "".join(f"- {{name: {name}, scopes: [ask], key: {KEY}-{name}}}\n" for name in ("a", "b"))
    file.write_text(text)
    guard = access(api_keys_file=str(file))
    listed = guard._listed
    assert listed is not None
    for end in range(len(text)):
        file.write_text(text[:end])
        asyncio.run(listed.read_again())
        assert guard.keys is not None and guard.keys.holder(f"Bearer {KEY}-a") is not None, text[:end]
        assert set(guard.keys.names) <= {"a", "b"} and all(len(key.digest) == 32 for key in listed.value)
    for nothing in ("", "keys: []\n", "keys:\n"):
        file.write_text(nothing)
        asyncio.run(listed.read_again())
        assert guard.keys is not None and guard.keys.names and "lists no keys" in listed.problem


def test_a_file_that_is_wanted_at_once_is_not_read_half_written(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("1")
    written: list[str] = []
    pauses_s: list[float] = []

    def write_more(pause_s: float) -> None:
        pauses_s.append(pause_s)
        if written:
            with file.open("a") as writer:
                writer.write(written.pop())

    watch = FileWatch(file, sleep=write_more)
    watch.begin()
    assert not watch.due(at_once=True) and pauses_s == [], "nothing changed"
    file.write_text("12")
    written.append("3")
    assert not watch.due(at_once=True), "it is being written"
    file.write_text("1234")
    assert watch.due(at_once=True) and pauses_s == [SETTLE_S] * 2
    watch.begin()
    assert not watch.due(at_once=True)
    file.write_text("12345")
    assert not watch.due() and watch.due(at_once=True) and len(pauses_s) == 2, "two polls saw the same"
