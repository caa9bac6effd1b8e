# SPDX-License-Identifier: Apache-2.0
"""API keys that learn hits, keys that do not, and keys that may name only their own models and salts."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.base.common.json_arrays import LONG_BODY_BYTES
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.route.load.key_shares import KeyShares
from kvrouter.router.route.tokens.proxied_paths import AUDIO, PATHS, WITHOUT_PROMPT
from kvrouter.router.serve.access.api_keys import parse_keys
from kvrouter.router.serve.api.http.http_api import HttpApi
from kvrouter.router.serve.proxy import request_reader
from kvrouter.router.serve.proxy.openai_body import with_fields
from tests.contract.api_support import TinyCore, TinyTokens, build, call
from tests.contract.proxy_support import proxying, worker
from tests.support.scripted_engine import ScriptedEngine, plain

# The entries of the key file, by the key's name.
KEYS = {
    "old": "{scopes: [ask]",
    "hits": "{scopes: [hits]",
    "proxy": "{scopes: [proxy]",
    "bound": "{scopes: [ask], models: [m], cache_salts: [mine, ours]",
    "other": "{scopes: [ask], models: [n]",
    "styled": "{scopes: [ask], models: [style]",
    "salted": "{scopes: [ask], cache_salt: private, cache_salts: [second]",
    "rotated": "{scopes: [ask], cache_salt: private",
}
PROMPT = {"model": "m", "token_ids": [1, 2, 3]}
# Every path that answers with hits, or derives something from them.
HIT_PATHS = ("/query", "/query_by_hash", "/select", "/select_and_reserve", "/reservations")


def key_of(name: str) -> str:
    return f"the-key-that-is-called-{name}"


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key_of(name)}"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    lines = [f"- {text}, name: {name}, key: {key_of(name)}}}" for name, text in KEYS.items()]
    path.write_text("\n".join(["keys:", *lines]))
    return path


@pytest.fixture
def app(core: TinyCore, file: Path) -> HttpApi:
    return build(core, tokens=TinyTokens(), api_keys_file=str(file))[0]


def body_of(path: str, **more: Any) -> dict[str, Any]:
    if path == "/query_by_hash":
        return {"model": "m", "block_hashes": [1], **more}
    return PROMPT | ({"worker_id": "w0"} if path == "/reservations" else {}) | more


# No engine is known to apply salts to speech.
SALTED_PATHS = sorted(PATHS - AUDIO - {"/v1/audio/speech"})


def salting(path: str, url: str) -> Registration:
    """Return the registration of an engine that has the path, and applies salts there."""
    return msgspec.structs.replace(worker("w0", url), engine="sglang" if path == "/generate" else "vllm")


@pytest.mark.parametrize("path", HIT_PATHS)
def test_hits_are_a_scope_of_their_own(app: HttpApi, path: str) -> None:
    for version in ("", "/v1"):
        for name, status in (("hits", (200, 201)), ("old", (200, 201)), ("proxy", (403,))):
            assert call(app, "POST", version + path, body_of(path), headers=bearer(name)).status in status, name
    refused = call(app, "POST", path, body_of(path), headers=bearer("proxy"))
    assert refused.error["code"] == "missing_scope" and "hits" in refused.error["message"]


@pytest.mark.parametrize("path", sorted(PATHS))
def test_a_key_for_hits_sends_no_prompts(app: HttpApi, path: str) -> None:
    for name in ("proxy", "old"):
        assert call(app, "POST", path, {}, headers=bearer(name)).status not in (401, 403), name
    assert call(app, "POST", path, {}, headers=bearer("hits")).status == 403


@pytest.mark.parametrize("path", HIT_PATHS)
def test_a_bound_key_asks_of_its_own_alone(app: HttpApi, core: TinyCore, path: str) -> None:
    def asked(name: str, **more: Any) -> tuple[int, str]:
        answer = call(app, "POST", path, body_of(path, **more), headers=bearer(name))
        return answer.status, "" if answer.status < 300 else answer.error["code"]

    own = (403, "salt_not_allowed") if path == "/query_by_hash" else (201 if path == "/reservations" else 200, "")
    assert asked("bound", cache_salt="mine", selection_id="a") == own
    assert asked("bound", cache_salt="ours", selection_id="b") == own
    questions_before = len(core.asked)
    for salt in ("theirs", "", None, "mine "):
        assert asked("bound", cache_salt=salt) == (403, "salt_not_allowed")
    assert asked("bound") == (403, "salt_not_allowed")
    assert asked("other", cache_salt="mine") == (403, "model_not_allowed")
    # An adapter counts as a separate model, whether it is the model's name or a field.
    assert asked("bound", cache_salt="mine", model="adapter") == (403, "model_not_allowed")
    assert asked("bound", cache_salt="mine", lora_name="style") == (403, "model_not_allowed")
    assert len(core.asked) == questions_before
    assert asked("styled", model="adapter", workers=["w0"], selection_id="c")[0] in (200, 201)


def test_texts_and_long_bodies_are_bound_too(app: HttpApi, core: TinyCore) -> None:
    long = list(range(200_000))
    for body in ({"prompt": "hi"}, {"messages": [{"role": "user", "content": "hi"}]}, {"token_ids": long}):
        for salt, status in (("mine", 200), ("theirs", 403), (None, 403)):
            answer = call(app, "POST", "/select", {"model": "m", "cache_salt": salt, **body}, headers=bearer("bound"))
            assert answer.status == status, (salt, list(body))
    assert call(app, "POST", "/query", PROMPT | {"token_ids": long}, headers=bearer("bound")).status == 403
    assert {question.cache_salt for question in core.asked} <= {"mine"}


def test_a_bound_key_sees_its_own_models(app: HttpApi) -> None:
    def models(name: str) -> list[str]:
        answer = call(app, "GET", "/v1/models", headers=bearer(name))
        return [model["id"] for model in answer.json()["data"]]

    assert models("old") == models("bound") == ["m"] and models("other") == []
    assert call(app, "GET", "/v1/models/m", headers=bearer("bound")).status == 200
    assert call(app, "GET", "/v1/models/m", headers=bearer("other")).status == 404


@pytest.mark.parametrize("path", SALTED_PATHS)
def test_a_proxied_prompt_is_bound_as_a_question_is(file: Path, path: str) -> None:
    with (
        ScriptedEngine(plain(b"{}")) as engine,
        proxying(salting(path, engine.url), api_keys_file=str(file)) as router,
    ):

        def sent(name: str, model: str, **more: str) -> int:
            body = {
                "model": model,
                "prompt": "hi",
                "messages": [{"role": "user", "content": "hi"}],
                "input": "hi",
                **more,
            }
            return router.post(path, body, bearer(name))[0]

        assert sent("bound", "m", cache_salt="mine") == 200
        requests_before = len(engine.asked)
        assert sent("other", "m", cache_salt="mine") == 403
        for salt in ({}, {"cache_salt": "theirs"}, {"cache_salt": ""}):
            # Prompts on these paths are not cached.
            expected = 200 if path in WITHOUT_PROMPT else 403
            assert sent("bound", "m", **salt) == expected
        assert len(engine.asked) == requests_before + (3 if path in WITHOUT_PROMPT else 0)


@pytest.mark.parametrize("path", SALTED_PATHS)
def test_a_keys_salt_is_put_into_its_proxied_prompts(file: Path, path: str) -> None:
    text = {"model": "m", "prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "input": "hi"}
    with (
        ScriptedEngine(plain(b"{}")) as engine,
        proxying(salting(path, engine.url), api_keys_file=str(file)) as router,
    ):

        def sent(name: str, **more: Any) -> Any:
            """Return the salt that the engine got, or the error's code if it got no request."""
            before = len(engine.asked)
            status, _, answer = router.post(path, text | more, bearer(name))
            if status == 403:
                assert len(engine.asked) == before
                return json.loads(answer)["error"]["code"]
            return json.loads(engine.asked[-1].body).get("cache_salt", "none")

        # Prompts on these paths are not cached, so they are sent as they are.
        own = "none" if path in WITHOUT_PROMPT else "private"
        assert sent("salted") == sent("rotated") == own
        if path in WITHOUT_PROMPT:
            return
        assert sent("salted", cache_salt="") == sent("salted", cache_salt=None) == "private"
        assert sent("salted", cache_salt="private") == "private" and sent("salted", cache_salt="second") == "second"
        assert sent("salted", cache_salt="other") == sent("rotated", cache_salt="second") == "salt_not_allowed"
        assert sent("old", cache_salt="private") == sent("bound", cache_salt="private") == "salt_not_allowed"
        assert sent("old", cache_salt="other") == "other" and sent("old") == "none"
        (request,) = {request.question.cache_salt for request in router.placer.requests[:2]}
        assert request == "private", "the prediction is about the prompt that the engine gets"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_other_fields_of_sglang_name_no_foreign_salt_and_no_foreign_adapter(file: Path, path: str) -> None:
    text = {"model": "m", "prompt": [1, 2, 3], "text": ["a", "b"], "messages": [{"role": "user", "content": "hi"}]}
    with ScriptedEngine(plain(b"{}")) as engine:
        registration = msgspec.structs.replace(worker("w0", engine.url), engine="sglang")
        with proxying(registration, api_keys_file=str(file)) as router:

            def sent(name: str, **more: Any) -> Any:
                status, _, answer = router.post(path, text | more, bearer(name))
                return status if status == 200 else json.loads(answer)["error"]["code"]

            for name in ("old", "salted", "bound"):
                assert sent(name, cache_salt=["private", "private"]) == "salt_not_allowed"
                # A list too long to be decoded.
                assert sent(name, cache_salt=["private"] * 10_000) == "salt_not_allowed"
                assert (
                    sent(name, cache_salt={"private": 1}) == sent(name, cache_salt=[["private"]]) == "salt_not_allowed"
                )
            assert sent("bound", cache_salt="mine", lora_path="style") == "model_not_allowed"
            assert sent("bound", cache_salt="mine", lora_path=["style", None]) == "model_not_allowed"
            assert not engine.asked
            assert sent("old", cache_salt=["x", "y"]) == 200
            assert router.placer.requests[-1].question.is_blind, "no hit is predicted for salts that are not read"
            assert sent("old", lora_path="style") == sent("bound", cache_salt="mine", lora_path=None) == 200


@pytest.mark.parametrize("path", sorted(PATHS - AUDIO))
def test_a_key_with_a_salt_sends_nothing_to_engines_that_ignore_it(file: Path, path: str) -> None:
    text = {"model": "m", "prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "input": "hi"}
    with ScriptedEngine(plain(b"{}")) as engine:
        registration = msgspec.structs.replace(worker("w0", engine.url), engine="sglang")
        with proxying(registration, api_keys_file=str(file)) as router:
            is_taken = path in (
                "/v1/chat/completions",
                "/v1/completions",
                "/v1/responses",
                "/generate",
                *WITHOUT_PROMPT,
            )
            for name, more in (("salted", {}), ("bound", {"cache_salt": "mine"})):
                status, _, answer = router.post(path, text | more, bearer(name))
                assert status == (200 if is_taken else 403)
                if not is_taken:
                    error = json.loads(answer)["error"]
                    assert error["code"] == "salt_not_allowed" and f"ignore `cache_salt` at {path}" in error["message"]
            assert router.post(path, text, bearer("old"))[0] == 200, "a key without a salt sends anything"
            assert len(engine.asked) == (3 if is_taken else 1)


@pytest.mark.parametrize("path", sorted(AUDIO))
def test_a_key_with_a_salt_sends_no_audio(file: Path, path: str) -> None:
    form = b'--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
    body = form % (b"model", b"m") + form % (b"cache_salt", b"private") + b"--b--\r\n"
    content_type = {"content-type": "multipart/form-data; boundary=b"}
    with ScriptedEngine(plain(b"{}")) as engine, proxying(worker("w0", engine.url), api_keys_file=str(file)) as router:
        for name in ("salted", "bound"):
            status, _, answer = router.post(path, body, bearer(name) | content_type)
            error = json.loads(answer)["error"]
            assert (status, error["code"]) == (403, "salt_not_allowed")
            assert f"ignore `cache_salt` at {path}" in error["message"] and "as `cache_salt`" not in error["message"]
        assert engine.asked == []
        assert router.post(path, body, bearer("old") | content_type)[0] == 200


def test_a_keys_salt_keeps_the_other_values_of_a_body(file: Path) -> None:
    body = b'{"n":  1.50,"cache_salt": null,"model": "m", "prompt": [1,2,3]}'
    with ScriptedEngine(plain(b"{}")) as engine, proxying(worker("w0", engine.url), api_keys_file=str(file)) as router:
        assert router.post("/v1/completions", body, bearer("salted"))[0] == 200
        assert engine.asked[0].body == b'{"n":1.50,"cache_salt":"private","model":"m","prompt":[1,2,3]}'


def test_a_keys_salt_is_put_into_a_long_body_in_a_thread(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def watched(raw: bytes, changes: dict[str, str]) -> bytes:
        threads.append(threading.current_thread().name)
        return with_fields(raw, changes)

    monkeypatch.setattr(request_reader, "with_fields", watched)
    with ScriptedEngine(plain(b"{}")) as engine, proxying(worker("w0", engine.url), api_keys_file=str(file)) as router:
        for length in (1, LONG_BODY_BYTES):
            body = {"model": "m", "prompt": "a" * length}
            assert router.post("/v1/completions", body, bearer("salted"))[0] == 200
            assert json.loads(engine.asked[-1].body) == body | {"cache_salt": "private"}
    short, long = threads
    assert short != long, "the short body is changed on the loop"


@pytest.mark.parametrize("path", HIT_PATHS)
def test_a_keys_salt_is_that_of_its_questions(app: HttpApi, core: TinyCore, path: str) -> None:
    def asked(name: str, **more: Any) -> tuple[int, str]:
        answer = call(app, "POST", path, body_of(path, **more), headers=bearer(name))
        return answer.status, "" if answer.status < 300 else answer.error["code"]

    refused = (403, "salt_not_allowed")
    assert asked("old", cache_salt="private") == refused
    if path == "/query_by_hash":
        assert asked("salted") == refused, "hashes do not show their salt"
        return
    own = (201 if path == "/reservations" else 200, "")
    assert asked("salted", selection_id="a") == asked("salted", cache_salt="private", selection_id="b") == own
    assert core.asked[-1].cache_salt == core.asked[-2].cache_salt == "private"
    assert asked("salted", cache_salt="second", selection_id="c") == own and core.asked[-1].cache_salt == "second"
    assert asked("salted", cache_salt="other") == refused


def test_a_keys_salt_is_that_of_its_texts(app: HttpApi, core: TinyCore) -> None:
    body = {"model": "m", "prompt": "hi"}
    assert call(app, "POST", "/select", body, headers=bearer("salted")).status == 200
    assert core.asked[-1].cache_salt == "private"
    assert call(app, "POST", "/select", {**body, "cache_salt": "private"}, headers=bearer("old")).status == 403


@pytest.mark.parametrize("path", sorted(AUDIO))
def test_a_form_has_no_salt(file: Path, path: str) -> None:
    form = b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nm\r\n--b--\r\n'
    kind = {"content-type": "multipart/form-data; boundary=b"}
    with ScriptedEngine(plain(b"{}")) as engine, proxying(worker("w0", engine.url), api_keys_file=str(file)) as router:
        assert router.post(path, form, bearer("bound") | kind)[0] == 403
        assert router.post(path, form, bearer("other") | kind)[0] == 403
        assert router.post(path, form, bearer("salted") | kind)[0] == 403
        assert not engine.asked
        assert router.post(path, form, bearer("old") | kind)[0] == 200


@pytest.mark.parametrize("shown", ["on", "off"])
def test_the_header_with_the_predicted_hit_can_be_left_off(shown: str) -> None:
    with (
        ScriptedEngine(plain(b"{}")) as engine,
        proxying(worker("w0", engine.url), predicted_hit_header=shown) as router,
    ):
        headers = router.post("/v1/completions", {"model": "m", "prompt": list(range(100))})[1]
        assert "x-kvrouter-worker" in headers
        assert ("x-kvrouter-predicted-hit" in headers) == (shown == "on")


@pytest.mark.parametrize(
    "more",
    [
        "models: []",
        "models: m",
        "models: ['']",
        "cache_salts: [1]",
        "cache_salts: []",
        "salts: [a]",
        "cache_salt: ''",
        "cache_salt: [a]",
    ],
)
def test_invalid_bounds_are_refused(more: str) -> None:
    with pytest.raises(SettingError, match="`models` and `cache_salts`"):
        parse_keys(f"keys: [{{name: a, scopes: [ask], key: {key_of('a')}, {more}}}]", "f")


@pytest.mark.parametrize("scope", ["admin", "watch", "register", "ask, watch"])
def test_a_key_that_could_learn_hits_elsewhere_is_not_bound(scope: str) -> None:
    with pytest.raises(SettingError, match="use another key"):
        parse_keys(f"keys: [{{name: a, scopes: [{scope}], key: {key_of('a')}, models: [m]}}]", "f")


def test_tokens_that_a_request_writes_count_for_its_key(
    file: Path, core: TinyCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count the tokens that requests write by key; without keys, by cache salt."""
    counted: list[str] = []

    def wrote(shares: KeyShares, key: str, *rest: object) -> None:
        counted.append(key)

    monkeypatch.setattr(KeyShares, "wrote", wrote)
    app = build(core, tokens=TinyTokens(), api_keys_file=str(file))[0]
    salted = {**PROMPT, "cache_salt": "mine"}
    for path in ("/select", "/select_and_reserve"):
        assert call(app, "POST", path, salted, headers=bearer("old")).status == 200
    assert call(app, "POST", "/reservations", {**PROMPT, "worker_id": "w0"}, headers=bearer("old")).status < 300
    assert call(build(core, tokens=TinyTokens())[0], "POST", "/select", salted).status == 200
    assert counted[:3] == ["key old"] * 3 and counted[3].startswith("salt ") and len(counted) == 4


def test_a_proxied_prompt_counts_for_its_key(file: Path) -> None:
    body = {"model": "m", "prompt": [1, 2, 3], "cache_salt": "mine"}
    with ScriptedEngine(plain(b"{}")) as engine:
        for keys_file, headers, fair_key in ((str(file), bearer("old"), "key old"), (None, {}, "salt .+")):
            with proxying(worker("w0", engine.url), api_keys_file=keys_file) as router:
                assert router.post("/v1/completions", body, headers)[0] == 200
                (request,) = router.placer.requests
                assert re.fullmatch(fair_key, request.fair_key)
