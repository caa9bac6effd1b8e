# SPDX-License-Identifier: Apache-2.0
"""JSON that Python reads, as engines do, and that JSON's own rules forbid: passed on as it came, unless a rule forbids it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from kvrouter.router.route.tokens.client_body import MAX_PYTHON_BYTES
from kvrouter.router.route.tokens.proxied_paths import AUDIO, PATHS
from tests.contract.proxy_support import CHAT, COMPLETIONS, OK, ProxyServer, code, proxying, worker
from tests.support.compression import COMPRESS
from tests.support.scripted_engine import ScriptedEngine

IDS = list(range(1, 100))
IDS_JSON = json.dumps(IDS)
TEXT = json.dumps({"model": "m", "prompt": IDS, "max_tokens": 4, "user": "ä"}, ensure_ascii=False)

# Each name stands for a body, and says whether the tokens of its prompt are read.
BODIES: dict[str, tuple[bytes, bool]] = {
    "byte-order-mark": (b"\xef\xbb\xbf" + TEXT.encode(), True),
    "utf-16": (TEXT.encode("utf-16"), True),
    "utf-16-le": (TEXT.encode("utf-16-le"), True),
    "utf-16-be": (TEXT.encode("utf-16-be"), True),
    "utf-32": (TEXT.encode("utf-32"), True),
    "infinity": (b'{"model": "m", "prompt": %b, "temperature": Infinity}' % IDS_JSON.encode(), True),
    "minus-infinity": (b'{"model": "m", "prompt": %b, "top_k": [-Infinity]}' % IDS_JSON.encode(), True),
    "nan": (b'{"model": "m", "prompt": %b, "max_tokens": NaN}' % IDS_JSON.encode(), True),
    "huge-limit": (b'{"model": "m", "prompt": %b, "max_tokens": 1e999}' % IDS_JSON.encode(), True),
    "surrogate": (b'{"model": "m", "prompt": "a \\ud800 b"}', False),
    "surrogate-beside": (b'{"model": "m", "prompt": %b, "stop": "\\uDFff"}' % IDS_JSON.encode(), True),
    "surrogate-name": (b'{"model": "m", "prompt": %b, "\\ud800": 1}' % IDS_JSON.encode(), True),
    "surrogate-bytes": (b'{"model": "m", "prompt": "a \xed\xa0\x80 b"}', False),
    "surrogate-salt": (b'{"model": "m", "prompt": %b, "cache_salt": "\\ud800"}' % IDS_JSON.encode(), False),
    "repeated": (b'{"model": "x", "prompt": %b, "model": "m"}' % IDS_JSON.encode(), True),
    "repeated-escaped": (b'{"mod\\u0065l": "x", "prompt": %b, "model": "m"}' % IDS_JSON.encode(), True),
}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[ProxyServer, ScriptedEngine]]:
    with ScriptedEngine(OK) as engine, proxying(worker("w0", engine.url)) as router:
        yield router, engine


@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_python_reads_goes_to_the_engine_as_it_came(
    served: tuple[ProxyServer, ScriptedEngine], name: str
) -> None:
    router, engine = served
    raw, is_read = BODIES[name]
    assert router.post(COMPLETIONS, raw, {"content-type": "application/json; charset=x"})[0] == 200
    assert engine.asked[-1].body == raw
    assert engine.asked[-1].all("content-type") == ["application/json; charset=x"]
    placed = router.placer.requests[-1]
    assert placed.question.model == "m" and placed.question.cache_salt is None
    ids = placed.question.token_ids
    if name != "surrogate-salt":
        # `GivenTokens` of this test takes the ids of any body; the salt alone keeps the router from asking it.
        assert (ids is not None) == is_read
    assert ids is None or ids.tolist() == IDS
    assert placed.max_tokens == (4 if "utf" in name or "order" in name else None)


@pytest.mark.parametrize("name", ["byte-order-mark", "utf-16", "infinity", "surrogate"])
@pytest.mark.parametrize("path", sorted(PATHS - AUDIO))
def test_such_a_body_is_taken_at_every_path(served: tuple[ProxyServer, ScriptedEngine], path: str, name: str) -> None:
    router, engine = served
    assert router.post(path, BODIES[name][0])[0] == 200
    assert (engine.asked[-1].target, engine.asked[-1].body) == (path, BODIES[name][0])


@pytest.mark.parametrize("name", BODIES)
def test_an_alias_in_such_a_body_is_replaced_and_all_else_means_the_same(
    served: tuple[ProxyServer, ScriptedEngine], name: str
) -> None:
    router, engine = served
    raw = BODIES[name][0]
    for encoding in ("utf-8", "utf-16-le", "utf-16-be"):
        raw = raw.replace('"m"'.encode(encoding), '"other name"'.encode(encoding))
    raw = raw.replace('"m"'.encode("utf-32")[4:], '"other name"'.encode("utf-32")[4:])
    assert json.loads(raw)["model"] == "other name"
    assert router.post(COMPLETIONS, raw)[0] == 200
    forwarded = json.loads(engine.asked[-1].body)
    assert repr(forwarded) == repr(json.loads(BODIES[name][0]))


def test_a_compressed_body_may_be_such_a_one(served: tuple[ProxyServer, ScriptedEngine]) -> None:
    router, engine = served
    for raw, _ in BODIES.values():
        assert router.post(COMPLETIONS, COMPRESS["zstd"](raw), {"content-encoding": "zstd"})[0] == 200
        assert engine.asked[-1].body == raw


@pytest.mark.parametrize(
    ("raw", "status", "wanted"),
    [
        (b"\xef\xbb\xbf{", 400, "malformed_body"),
        (b"\xef\xbb\xbf[1]", 400, "malformed_body"),
        (b"[Infinity]", 400, "invalid_body"),
        (b'{"model": "m", "x": Infinityy}', 400, "malformed_body"),
        (b'{"model": "m", "x": Infinity', 400, "malformed_body"),
        (b'{"model": "m", "x": "\xff"}Infinity', 400, "malformed_body"),
        (b'{"model": "\\ud800", "x": 1}', 404, "unknown_model"),
        (b'{"model": Infinity}', 400, "invalid_model"),
        ("{".encode("utf-16"), 400, "malformed_body"),
        (b"\xff\xfe\x00", 400, "malformed_body"),
        (b'{"model": "m", "x": NaN, "y": ' + b"[" * 100_000, 400, "malformed_body"),
        (b'{"model": "m", "x": NaN, "y": "' + b"z" * MAX_PYTHON_BYTES + b'"}', 400, "malformed_body"),
    ],
    ids=range(12),
)
def test_what_python_cannot_read_either_is_refused(
    served: tuple[ProxyServer, ScriptedEngine], raw: bytes, status: int, wanted: str
) -> None:
    router, engine = served
    asked = len(engine.asked)
    answered, _, answer = router.post(CHAT, raw)
    assert (answered, code(answer)) == (status, wanted)
    assert len(engine.asked) == asked
    assert router.sample("internal_errors_total", where=CHAT) == 0


KEYS = {
    "free": "{scopes: [ask]",
    "models": "{scopes: [ask], models: [m]",
    "salts": "{scopes: [ask], cache_salts: [mine]",
}


@pytest.fixture(scope="module")
def bound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ProxyServer, ScriptedEngine]]:
    file = tmp_path_factory.mktemp("keys") / "keys.yaml"
    lines = [f"- {text}, name: {name}, key: {bearer(name)['authorization'][7:]}}}" for name, text in KEYS.items()]
    file.write_text("\n".join(["keys:", *lines]))
    with ScriptedEngine(OK) as engine, proxying(worker("w0", engine.url), api_keys_file=str(file)) as router:
        yield router, engine


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer the-key-that-is-called-{name}"}


# Bytes that are no UTF-8, in a field that no rule is about, are passed over by every reader or refused by it.
@pytest.mark.parametrize("name", sorted(BODIES.keys() - {"surrogate-bytes"}))
@pytest.mark.parametrize("key", ["models", "salts"])
def test_a_key_with_bounds_must_send_what_every_reader_sees_alike(
    bound: tuple[ProxyServer, ScriptedEngine], key: str, name: str
) -> None:
    router, engine = bound
    raw = BODIES[name][0]
    asked = len(engine.asked)
    if key == "salts" and "salt" not in name:
        raw = raw.replace(b'{"', b'{"cache_salt": "mine", "', 1)
    status, _, answer = router.post(COMPLETIONS, raw, bearer(key))
    assert (status, code(answer)) == (400, "malformed_body")
    assert f"the API key {key} is bound" in json.loads(answer)["error"]["message"]
    assert len(engine.asked) == asked


def test_a_key_with_bounds_may_use_their_words_elsewhere(bound: tuple[ProxyServer, ScriptedEngine]) -> None:
    router, engine = bound
    raw = (
        b'{"model": "m", "cache_salt": "mine", "messages": [{"role": "model", "content": "\\"model\\" \\u0041 \\\\u0041"}], '
        b'"tools": [{"model": 1, "cache_salt": 2, "model": 3}]}'
    )
    for key in KEYS:
        assert router.post(CHAT, raw, bearer(key))[0] == 200, key
        assert engine.asked[-1].body == raw


def test_a_key_with_bounds_may_not_repeat_their_fields(bound: tuple[ProxyServer, ScriptedEngine]) -> None:
    router, engine = bound
    asked = len(engine.asked)
    for raw, field in (
        (b'{"model": "m", "cache_salt": "mine", "model": "m"}', "model"),
        (b'{"model": "m", "cache_salt": "mine", "cache_salt": "mine"}', "cache_salt"),
        (b'{"model": "m", "cache_salt": "mine", "cache_s\\u0061lt": "yours", "x": {"model": 1}}', "cache_salt"),
        (b'{"m\\u006fdel": "n", "model": "m", "cache_salt": "mine"}', "model"),
    ):
        status, _, answer = router.post(CHAT, raw, bearer("salts"))
        assert (status, code(answer)) == (400, "malformed_body")
        assert f"more than one field {field}" in json.loads(answer)["error"]["message"]
    assert len(engine.asked) == asked
