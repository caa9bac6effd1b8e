# SPDX-License-Identifier: Apache-2.0
"""Cache salts that the router makes: each tenant has its own, on every path, whatever a client sends."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvrouter.router.base.common.errors import BadQuestion, Forbidden, SettingError
from kvrouter.router.route.tokens.client_body import ClientBody
from kvrouter.router.route.tokens.proxied_paths import AUDIO, PATHS, WITHOUT_PROMPT
from kvrouter.router.serve.access.key_bounds import KeyBounds
from kvrouter.router.serve.access.salt_maker import SaltMaker
from kvrouter.router.serve.access.tenants import Tenants
from tests.contract.api_support import TinyCore, TinyTokens, ask_app, build, call, hit
from tests.contract.picker_support import Door
from tests.contract.proxy_support import ProxyServer, code, proxying, worker
from tests.support.scripted_engine import ScriptedEngine, plain
from tests.unit.test_access import access

SECRET = "a-secret-that-is-long-enough-for-HMAC-SHA256"
SALT = re.compile(r"[0-9a-f]{64}")
KEYS = {
    "anna": "scopes: [ask]",
    "bert": "scopes: [ask]",
    "old": "scopes: [ask], tenant: acme",
    "new": "scopes: [ask], tenant: acme",
    "gateway": "scopes: [ask], names_tenants: true",
    "limited": "scopes: [ask], models: [n]",
    "operator": "scopes: [ask, watch]",
}
TEXT = {"model": "m", "prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "input": "hi", "text": "hi"}
SALTED_PATHS = sorted(PATHS - AUDIO - WITHOUT_PROMPT - {"/v1/audio/speech"})


def bearer(name: str, **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer the-key-that-is-called-{name}", **more}


def write_keys(folder: Path, **keys: str) -> str:
    lines = [f"- {{name: {name}, key: the-key-that-is-called-{name}, {text}}}" for name, text in keys.items()]
    (folder / "keys.yaml").write_text("\n".join(["keys:", *lines]))
    return str(folder / "keys.yaml")


def write_secret(folder: Path, secret: str = SECRET) -> str:
    (folder / "secret").write_text(secret + "\n")
    return str(folder / "secret")


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return {
        "api_keys_file": write_keys(tmp_path, **KEYS),
        "cache_salt_secret_file": write_secret(tmp_path),
        "tenant_header": "x-tenant",
    }


@contextmanager
def serving(engine: str = "vllm", **settings: Any) -> Iterator[tuple[ProxyServer, ScriptedEngine]]:
    with ScriptedEngine(plain(b"{}")) as scripted:
        registration = msgspec.structs.replace(worker("w0", scripted.url), engine=engine)
        with proxying(registration, **settings) as router:
            yield router, scripted


def engine_for(path: str) -> str:
    return "sglang" if path == "/generate" else "vllm"


# Proxied requests.


@pytest.mark.parametrize("path", SALTED_PATHS)
def test_each_tenant_has_a_salt_of_its_own_on_every_path(settings: dict[str, Any], path: str) -> None:
    with serving(engine_for(path), **settings) as (router, engine):

        def salt(headers: dict[str, str], **more: Any) -> str:
            before = len(engine.asked)
            status, _, answer = router.post(path, TEXT | more, headers)
            assert (status, len(engine.asked)) == (200, before + 1), answer
            sent = json.loads(engine.asked[-1].body)["cache_salt"]
            assert SALT.fullmatch(sent) and router.placer.requests[-1].question.cache_salt == sent
            assert sent.encode() not in answer
            return str(sent)

        anna, bert = salt(bearer("anna")), salt(bearer("bert"))
        assert anna == salt(bearer("anna")) != bert
        # The client's own salt is ignored, also that of another tenant.
        for own in (bert, "x", "", None, [bert], [bert] * 20_000, 5, {"a": bert}):
            assert salt(bearer("anna"), cache_salt=own) == anna
        acme = salt(bearer("old"))
        assert acme == salt(bearer("new")) not in (anna, bert)
        # A key speaks for its own tenant, whatever header its client sends.
        assert salt(bearer("anna", **{"x-tenant": "bert"})) == anna
        named = salt(bearer("gateway", **{"x-tenant": "bert"}))
        assert named not in (anna, bert, acme) and salt(bearer("gateway", **{"x-tenant": "acme"})) == acme


PICTURE = {"type": "image_url", "image_url": None, "uuid": "of-bert"}
FOREIGN: dict[str, Any] = {
    "blocks": {"kv_transfer_params": {"remote_block_ids": [1]}},
    "blocks of SGLang": {"bootstrap_room": 7},
    "hashes of media": {"features": {"mm_hashes": {"image": ["of-bert"]}}},
    "blocks as an extension": {"sampling_params": {"extra_args": {"kv_transfer_params": {}}}},
    "a long extension": {"vllm_xargs": {"x": "y" * 100_000}},
    "a medium": {"messages": [{"role": "user", "content": [PICTURE]}]},
    "a medium in a result": {
        "messages": [{"role": "user", "content": [{"type": "tool_result", "content": [PICTURE]}]}]
    },
    "a medium of a part": {"content_parts": [PICTURE]},
    "a medium in a response": {"input": [{"role": "user", "content": [PICTURE]}]},
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_tenant_names_no_content_of_another(settings: dict[str, Any], name: str) -> None:
    with serving(**settings) as (router, engine):
        body = TEXT | FOREIGN[name]
        raw = json.dumps(body).replace('"uuid"', '"\\u0075uid"')
        for sent in (body, raw.encode()):
            assert router.failure("/v1/chat/completions", sent, bearer("anna"))[:2] == (403, "salt_not_allowed")
        assert not engine.asked
        assert router.post("/v1/chat/completions", body, bearer("operator"))[0] == 200


def test_arguments_of_tools_may_have_any_field(settings: dict[str, Any]) -> None:
    use = {"type": "tool_use", "id": "t", "name": "find", "input": {"uuid": "1"}}
    call = {"type": "function", "id": "t", "function": {"name": "find", "arguments": '{"uuid": "1"}'}}
    messages = [{"role": "assistant", "content": [use]}, {"role": "assistant", "tool_calls": [call]}]
    with serving(**settings) as (router, _):
        assert router.post("/v1/chat/completions", TEXT | {"messages": messages}, bearer("anna"))[0] == 200


@pytest.mark.parametrize("path", sorted(WITHOUT_PROMPT))
def test_paths_that_cache_nothing_get_no_salt(settings: dict[str, Any], path: str) -> None:
    with serving(**settings) as (router, engine):
        assert router.post(path, TEXT, bearer("anna"))[0] == 200
        assert "cache_salt" not in json.loads(engine.asked[-1].body)


def test_a_clients_salt_divides_the_cache_of_its_tenant_where_it_is_combined(settings: dict[str, Any]) -> None:
    with serving("sglang", **settings, client_salts="combine") as (router, engine):

        def salt(name: str, own: Any) -> str:
            assert router.post("/generate", TEXT | {"cache_salt": own}, bearer(name))[0] == 200
            return str(json.loads(engine.asked[-1].body)["cache_salt"])

        salts = [salt(name, own) for name in ("anna", "bert") for own in (None, "x", "y", salt("anna", "x"))]
        assert len(set(salts)) == len(salts) and salt("anna", "") == salt("anna", None)
        # A salt for each prompt of a list cannot be one text.
        for wrong in (["x", "y"], 5):
            assert router.failure("/generate", TEXT | {"cache_salt": wrong}, bearer("anna"))[:2] == (
                400,
                "invalid_cache_salt",
            )


def test_prompts_that_an_engine_would_not_salt_are_refused(settings: dict[str, Any]) -> None:
    refused = {"vllm": AUDIO | {"/generate", "/v1/audio/speech"}, "sglang": AUDIO | {"/v1/messages", "/v1/embeddings"}}
    form = b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nm\r\n--b--\r\n'
    for engine_name, paths in refused.items():
        with serving(engine_name, **settings) as (router, engine):
            for path in sorted(paths):
                headers = bearer("anna")
                if path in AUDIO:
                    headers["content-type"] = "multipart/form-data; boundary=b"
                status, _, answer = router.post(path, form if path in AUDIO else TEXT, headers)
                assert (status, code(answer)) == (403, "salt_not_allowed"), path
                assert "makes the cache salts" in json.loads(answer)["error"]["message"]
            assert not engine.asked


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/generate"])
def test_a_body_that_an_engine_may_read_in_another_way_is_refused(settings: dict[str, Any], path: str) -> None:
    raw = json.dumps(TEXT).encode()
    bodies = [
        b"\xef\xbb\xbf" + raw,
        json.dumps(TEXT).encode("utf-16"),
        raw[:-1] + b', "top_p": Infinity}',
        raw[:-1] + b', "user": "\\ud800"}',
        raw[:-1] + b', "cache_salt": "a", "cache_salt": "b"}',
        raw[:-1] + b', "cache_salt": "a", "\\u0063ache_salt": "b"}',
    ]
    with serving(engine_for(path), **settings) as (router, engine):
        for body in bodies:
            assert router.failure(path, body, bearer("anna"))[:2] == (400, "malformed_body"), body
        assert not engine.asked
    del settings["cache_salt_secret_file"], settings["tenant_header"]
    settings["api_keys_file"] = write_keys(Path(settings["api_keys_file"]).parent, anna="scopes: [ask]")
    with serving(engine_for(path), **settings) as (router, engine):
        for body in bodies if path != "/v1/responses" else bodies[:0]:
            assert router.post(path, body, bearer("anna"))[0] == 200, body
        assert router.post(path, TEXT | {"cache_salt": "x"}, bearer("anna"))[0] == 200
        assert json.loads(engine.asked[-1].body)["cache_salt"] == "x"


def test_a_request_that_registers_names_one_tenant_too(tmp_path: Path) -> None:
    keys = write_keys(tmp_path, joiner="scopes: [register], names_tenants: true")
    app, _ = build(
        TinyCore(), api_keys_file=keys, cache_salt_secret_file=write_secret(tmp_path), tenant_header="x-tenant"
    )
    answer = call(app, "POST", "/register", {}, headers=bearer("joiner", **{"x-tenant": "a", "X-Tenant": "b"}))
    assert (answer.status, answer.json()["error"]["code"]) == (400, "repeated_header")


def test_a_trusted_client_names_one_tenant_with_each_request(settings: dict[str, Any]) -> None:
    with serving(**settings) as (router, engine):
        for headers in ({}, {"x-tenant": ""}, {"x-tenant": " "}, {"x-tenant": "x" * 513}, {"x-tenant": "\xe4"}):
            failure = router.failure("/v1/completions", TEXT, bearer("gateway", **headers))
            assert failure[:2] == (400, "tenant_missing"), headers
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 2\r\n"
        key = f"authorization: {bearer('gateway')['authorization']}\r\n"
        answer = router.exchange(f"{head}{key}x-tenant: a\r\nx-tenant: b\r\n\r\n{{}}".encode())
        assert answer.startswith(b"HTTP/1.1 400 ") and b"repeated_header" in answer
        assert not engine.asked
        # A response belongs to the tenant, not to the key that all tenants share.
        router.post("/v1/responses", TEXT, bearer("gateway", **{"x-tenant": "acme"}))
        router.post("/v1/responses", TEXT, bearer("gateway", **{"x-tenant": "other"}))
        router.post("/v1/responses", TEXT, bearer("old"))
        names = [request.key_name for request in router.placer.requests]
        assert names == ["tenant acme", "tenant other", "tenant acme"]


def test_without_keys_every_client_is_trusted_to_name_its_tenant(tmp_path: Path) -> None:
    with serving(cache_salt_secret_file=write_secret(tmp_path), tenant_header="x-tenant") as (router, engine):
        salts = []
        for tenant in ("a", "b", "a"):
            assert router.post("/v1/completions", TEXT, {"x-tenant": tenant})[0] == 200
            salts.append(json.loads(engine.asked[-1].body)["cache_salt"])
        assert salts[0] == salts[2] != salts[1]
        for path in ("/v1/completions", "/v1/responses", "/query", "/select"):
            assert router.failure(path, {"model": "m", "prompt": "x", "token_ids": [1]}) in (
                (400, "tenant_missing", ""),
                (400, "invalid_body", ""),
            )
        assert router.failure("/query", {"model": "m", "token_ids": [1]})[1] == "tenant_missing"
        assert len(engine.asked) == 3 and router.get("/health")


# The router's own paths.


def test_questions_and_choices_have_the_salt_of_their_tenant(settings: dict[str, Any]) -> None:
    core = TinyCore([hit("w0", 16, 16, 16)])
    app = build(core, tokens=TinyTokens(), **settings)[0]
    maker = SaltMaker(SECRET.encode(), combines=False)
    bodies: list[tuple[str, dict[str, Any]]] = [("/query", {"token_ids": [1, 2, 3]})]
    for path in ("/select", "/select_and_reserve"):
        bodies += [(path, {"token_ids": [1, 2]}), (path, {"prompt": "hi"}), (path, {"token_ids": [1] * 200_000})]
    for path, body in bodies:
        for name in ("anna", "bert"):
            answer = call(app, "POST", path, {"model": "m", "cache_salt": "x", **body}, headers=bearer(name))
            assert answer.status == 200, answer.body
            assert core.asked[-1].cache_salt == maker.make(name, None)
            if path != "/query":
                assert answer.json()["cache_salt"] == maker.make(name, None)
    reserved = {"model": "m", "token_ids": [1, 2, 3], "worker_id": "w0", "selection_id": "r"}
    assert call(app, "POST", "/reservations", reserved, headers=bearer("anna")).status == 201
    assert core.asked[-1].cache_salt == maker.make("anna", None)
    forbidden = call(app, "POST", "/select", {"model": "m", "token_ids": [1]}, headers=bearer("limited"))
    assert (forbidden.status, forbidden.error["code"]) == (403, "model_not_allowed")


def test_a_key_that_reads_all_events_may_ask_about_any_salt_but_sends_prompts_under_its_own(
    settings: dict[str, Any],
) -> None:
    core = TinyCore([hit("w0", 16, 16, 16)])
    app = build(core, tokens=TinyTokens(), **settings)[0]
    own = SaltMaker(SECRET.encode(), combines=False).make("operator", None)
    for path, body in (("/query", {"token_ids": [1]}), ("/select", {"token_ids": [1]}), ("/select", {"prompt": "hi"})):
        for named, expected in (("x", "x"), (None, own), ("", own)):
            question = {"model": "m", "cache_salt": named, **body}
            assert call(app, "POST", path, question, headers=bearer("operator")).status == 200
            assert core.asked[-1].cache_salt == expected
    hashes = {"model": "m", "block_hashes": [1]}
    assert call(app, "POST", "/query_by_hash", hashes, headers=bearer("operator")).status == 200
    with serving(**settings) as (router, engine):
        assert router.post("/v1/completions", TEXT | {"cache_salt": "x"}, bearer("operator"))[0] == 200
        assert json.loads(engine.asked[-1].body)["cache_salt"] == own


@pytest.mark.parametrize("path", ["/query_by_hash", "/select", "/select_and_reserve", "/reservations"])
def test_block_hashes_are_refused_because_their_salt_cannot_be_seen(settings: dict[str, Any], path: str) -> None:
    core = TinyCore([hit("w0", 16, 16, 16)])
    app = build(core, **settings)[0]
    body = {"model": "m", "block_hashes": [1], "worker_id": "w0"}
    answer = call(app, "POST", path, body, headers=bearer("anna"))
    assert (answer.status, answer.error["code"]) == (403, "salt_not_allowed") and not core.asked


def test_without_the_secret_no_answer_has_a_salt(tmp_path: Path) -> None:
    app = build(TinyCore([hit("w0", 16, 16, 16)]), api_keys_file=write_keys(tmp_path, anna="scopes: [ask]"))[0]
    answer = call(app, "POST", "/select", {"model": "m", "token_ids": [1], "cache_salt": "x"}, headers=bearer("anna"))
    assert answer.status == 200 and "cache_salt" not in answer.json()


async def test_what_one_tenant_had_tokenized_is_not_remembered_for_another(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    spaces: list[str] = []

    class Noting(TinyTokens):
        async def prompt(self, path: str, model: str, body: ClientBody, **more: Any) -> Any:
            spaces.append(more.get("space", "none"))
            return await super().prompt(path, model, body)

    app = build(TinyCore([hit("w0", 16, 16, 16)]), tokens=Noting(), **settings)[0]
    for name in ("anna", "bert", "anna"):
        raw = json.dumps({"model": "m", "prompt": "hi"}).encode()
        assert (await ask_app(app, "POST", "/select", raw, headers=bearer(name))).status == 200
    assert spaces[0] == spaces[2] != spaces[1] and all(map(SALT.fullmatch, spaces))


# The settings.


def test_the_secret_is_read_again_and_makes_other_salts(tmp_path: Path) -> None:
    keys, file = write_keys(tmp_path, anna="scopes: [ask]"), write_secret(tmp_path)
    current = access(api_keys_file=keys, cache_salt_secret_file=file)

    def salt() -> str | None:
        assert current.keys is not None
        holder = current.keys.holder(bearer("anna")["authorization"])
        assert holder is not None
        return holder.bounds.salted("x")

    first = salt()
    for secret, problem in (("too short", "bytes"), (SECRET + "2", "")):
        write_secret(tmp_path, secret)
        assert current._secret is not None
        asyncio.run(current._secret.read_again())
        assert (salt() == first) is bool(problem) and problem in " ".join(current.health())
    assert SECRET not in repr(current.tenants and current.tenants.maker)


@pytest.mark.parametrize(
    ("keys", "changes", "words"),
    [
        ({}, {"tenant_header": None}, "needs tenants"),
        ({"a": "scopes: [ask]"}, {}, "no key has `names_tenants: true`"),
        ({"a": "scopes: [ask], names_tenants: true"}, {"tenant_header": None}, "set tenant_header"),
        ({"a": "scopes: [ask], names_tenants: true, tenant: b"}, {}, "keep one of them"),
        ({"a": "scopes: [ask], cache_salt: b"}, {"tenant_header": None}, "makes all salts"),
        ({"a": "scopes: [ask], cache_salts: [b]"}, {"tenant_header": None}, "makes all salts"),
        ({"a": "scopes: [ask], tenant: b"}, {"cache_salt_secret_file": None, "tenant_header": None}, "only with"),
        ({"a": "scopes: [ask]"}, {"cache_salt_secret_file": None}, "tenant_header needs cache_salt_secret_file"),
        ({}, {"cache_salt_secret_file": None, "tenant_header": None, "client_salts": "combine"}, "client_salts needs"),
        ({}, {"tenant_header": "authorization"}, "another meaning"),
        ({}, {"tenant_header": None, "gateway_port": 0, "api_key": "k"}, "set tenant_header"),
        ({}, {"gateway_port": 0, "gateway_translated_paths": ("/v1/messages",)}, "exclude each other"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    tmp_path: Path, keys: dict[str, str], changes: dict[str, Any], words: str
) -> None:
    settings: dict[str, Any] = {"cache_salt_secret_file": write_secret(tmp_path), "tenant_header": "x-tenant"} | changes
    if keys:
        settings["api_keys_file"] = write_keys(tmp_path, **keys)
    with pytest.raises(SettingError) as caught:
        access(**settings)
    assert words in caught.value.message and SECRET not in caught.value.message


def test_a_short_secret_is_refused_with_its_cause(tmp_path: Path) -> None:
    file = write_secret(tmp_path, "short")
    with pytest.raises(SettingError, match="has 5 bytes, and at least 32") as caught:
        access(api_key="k" * 16, cache_salt_secret_file=file)
    assert "openssl" in caught.value.message


def test_a_tenant_is_never_taken_from_a_header_of_two_values() -> None:
    tenants = Tenants(SaltMaker(SECRET.encode(), combines=False), "x-tenant")
    with pytest.raises(BadQuestion, match="more than one"):
        tenants.bounds_of(tenants.keyless, [(b"x-tenant", b"a"), (b"x-tenant", b"a")])
    assert tenants.bounds_of(tenants.keyless, [(b"x-tenant", b"a")]).caller == "tenant a"
    plain_bounds = KeyBounds("k", maker=tenants.maker)
    assert tenants.bounds_of(plain_bounds, [(b"x-tenant", b"a"), (b"x-tenant", b"b")]) is plain_bounds


# Requests of gateways.


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        # SGLang computes prompts for PUT, too.
        (b"PUT", "/generate", {}),
        (b"PUT", "/v1/rerank", {}),
        (b"POST", "/invocations", {}),
        (b"CONNECT", "/v1/realtime", {}),
        (b"GET", "/v1/realtime", {"upgrade": "websocket"}),
    ],
)
def test_a_gateway_gets_no_endpoint_for_a_prompt_without_a_salt(
    method: bytes, path: str, headers: dict[str, Any]
) -> None:
    tenants = Tenants(SaltMaker(SECRET.encode(), combines=False), "x-tenant")
    body = json.dumps(TEXT).encode()
    with serving("sglang") as (router, _):
        with pytest.raises(Forbidden) as error:
            Door(router, tenants).pick(body, path, method=method, x_tenant="anna", **headers)
        assert error.value.code == "salt_not_allowed"
        for harmless in (b"GET", b"HEAD", b"OPTIONS"):
            assert Door(router, tenants).pick(b"", "/v1/models", method=harmless).body is None
        # Without salts that the router makes, the engine decides.
        assert Door(router).pick(body, path, method=method, **headers).body is None or path in PATHS
