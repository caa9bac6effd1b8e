# SPDX-License-Identifier: Apache-2.0
"""`/query`, `/query_by_hash` and `/select`: their answers and their refusals."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest

from kvrouter.router.base.common.json_arrays import LONG_BODY_BYTES
from kvrouter.router.serve.api.http.http_api import HttpApi
from kvrouter.router.serve.api.http.plain_head import plain_head
from kvrouter.router.serve.api.http.request import HttpRequest
from tests.contract.api_support import TinyCore, TinyTokens, build, call, exchange, hit


@pytest.fixture
def core() -> TinyCore:
    return TinyCore([hit("w0", 64, 128, 192), hit("w1", 0, 0, 0)])


# The limit of the hits that `api_support.hit` makes.
LIMITED_AT_64 = {
    "group_idx": 1,
    "kind": "sliding_window",
    "why": "at no boundary past 64 tokens are the blocks of its window (64 tokens) all on the GPU",
}


def test_query_has_the_shape_of_the_contract(core: TinyCore) -> None:
    answer = call(build(core)[0], "POST", "/query", {"model": "m", "token_ids": [1, 2, 3]})
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert answer.json() == {
        "instances": {
            "w0": {"longest_matched": 192, "gpu": 64, "cpu": 128, "disk": 192, "dp": {"0": 192}, "state": "live"},
            "w1": {"longest_matched": 0, "gpu": 0, "cpu": 0, "disk": 0, "dp": {"0": 0}, "state": "live"},
        },
        "scores": {"w0": {"0": 192}, "w1": {"0": 0}},
        "frequencies": [],
    }


def test_explain_adds_groups_and_limit_and_an_explicit_null(core: TinyCore) -> None:
    core.hits_known.append(msgspec.structs.replace(hit("w2", 0, 0, 0), limiter=None, groups=()))
    answer = call(build(core)[0], "POST", "/query", {"model": "m", "token_ids": [1], "explain": True})
    instances = answer.json()["instances"]
    assert instances["w0"]["groups"] == [{"group_idx": 0, "kind": "full_attention", "covered": 192}]
    assert (instances["w0"]["limited_by"], instances["w2"]["groups"]) == (LIMITED_AT_64, [])
    assert instances["w2"]["limited_by"] is None
    assert core.asked[0].explain


def test_ranks_of_one_worker_are_merged_and_the_best_rank_counts(core: TinyCore) -> None:
    core.hits_known = [hit("w0", 64, 64, 64, 0), hit("w0", 32, 32, 96, 1, "why"), hit("w0", 16, 16, 16, 2)]
    answer = call(build(core)[0], "POST", "/query", {"model": "m", "token_ids": [1]}).json()
    instance = answer["instances"]["w0"]
    assert instance["dp"] == {"0": 64, "1": 96, "2": 16}
    assert (instance["gpu"], instance["cpu"], instance["disk"], instance["longest_matched"]) == (32, 32, 96, 96)
    assert instance["reason"] == "why"
    assert answer["scores"] == {"w0": {"0": 64, "1": 96, "2": 16}}


def test_a_question_carries_every_field_of_the_body(core: TinyCore) -> None:
    body = {
        "model_name": "m",
        "token_ids": [0, 5, 2**31 - 1],
        "lora_name": "a",
        "cache_salt": "s",
        "workers": ["w0", 7],
        "unknown": {"x": [1]},
    }
    assert call(build(core)[0], "POST", "/query", body).status == 200
    question = core.asked[0]
    assert question.token_ids is not None and question.token_ids.dtype == np.int64
    assert question.token_ids.tolist() == [0, 5, 2**31 - 1]
    assert (question.num_tokens, question.lora_name, question.cache_salt) == (3, "a", "s")
    assert (question.worker_ids, question.block_hashes) == ({"w0", "7"}, None)


@pytest.mark.parametrize("name", ["model", "model_name", "modelname"])
def test_the_model_goes_by_three_names(core: TinyCore, name: str) -> None:
    assert call(build(core)[0], "POST", "/query", {name: "m", "token_ids": [1]}).status == 200


def test_empty_lora_and_salt_are_none_as_in_the_engine(core: TinyCore) -> None:
    call(build(core)[0], "POST", "/query", {"model": "m", "token_ids": [1], "lora_name": "", "cache_salt": ""})
    assert (core.asked[0].lora_name, core.asked[0].cache_salt) == (None, None)


HASH_FORMS = [
    (5, 5),
    (0, 0),
    (2**64 - 1, 2**64 - 1),
    (-1, 2**64 - 1),
    (-(2**63), 2**63),
    ("ff", 255),
    ("0xFf", 255),
    ("0123456789abcdef", 0x0123456789ABCDEF),
    # Decimal digits in a string are read as hex.
    ("10", 16),
    ("aa" * 8 + "0123456789abcdef", 0x0123456789ABCDEF),
    ("0x" + "aa" * 24 + "f123456789abcdef", 0xF123456789ABCDEF),
]


@pytest.mark.parametrize(("given", "value"), HASH_FORMS)
def test_every_form_of_a_hash_is_read(core: TinyCore, given: int | str, value: int) -> None:
    assert call(build(core)[0], "POST", "/query_by_hash", {"model": "m", "block_hashes": [given]}).status == 200
    hashes = core.asked[0].block_hashes
    assert hashes is not None and hashes.dtype == np.uint64
    assert hashes.tolist() == [value]


def test_all_hash_forms_together_keep_their_order(core: TinyCore) -> None:
    body = {"model": "m", "block_hashes": [given for given, _ in HASH_FORMS]}
    assert call(build(core)[0], "POST", "/query_by_hash", body).status == 200
    hashes = core.asked[0].block_hashes
    assert hashes is not None and hashes.tolist() == [value for _, value in HASH_FORMS]


@pytest.mark.parametrize(
    ("extra", "expected"), [({}, 2 * 16 + 1), ({"num_tokens": 40}, 40), ({"num_tokens": None}, 33)]
)
def test_num_tokens_defaults_to_one_more_than_the_hashes_cover(
    core: TinyCore, extra: dict[str, Any], expected: int
) -> None:
    call(build(core)[0], "POST", "/query_by_hash", {"model": "m", "block_hashes": [1, 2], **extra})
    assert core.asked[0].num_tokens == expected


BAD_BODIES = [
    ("/query", {"token_ids": [1]}, "model"),
    ("/query", {"model": "m"}, "token_ids"),
    ("/query", {"model": "m", "token_ids": []}, "token_ids"),
    ("/query", {"model": "m", "token_ids": [1, -1]}, "token_ids[1]"),
    ("/query", {"model": "m", "token_ids": [2**31]}, "token_ids[0]"),
    ("/query", {"model": "m", "token_ids": [2**64]}, "token_ids[0]"),
    ("/query", {"model": "m", "token_ids": [1.5]}, "token_ids"),
    ("/query", {"model": "m", "token_ids": [True]}, "token_ids"),
    ("/query", {"model": "m", "token_ids": ["1"]}, "token_ids"),
    ("/query", {"model": "m", "model_name": "n", "token_ids": [1]}, "contradict"),
    ("/query", {"model": "m", "token_ids": [1], "explain": "yes"}, "explain"),
    ("/query_by_hash", {"model": "m", "block_hashes": [2**64]}, "block_hashes[0]"),
    ("/query_by_hash", {"model": "m", "block_hashes": [-(2**63) - 1]}, "block_hashes[0]"),
    ("/query_by_hash", {"model": "m", "block_hashes": [1, "xyz"]}, "block_hashes[1]"),
    ("/query_by_hash", {"model": "m", "block_hashes": [""]}, "block_hashes[0]"),
    ("/query_by_hash", {"model": "m", "block_hashes": ["1_0"]}, "block_hashes[0]"),
    ("/query_by_hash", {"model": "m", "block_hashes": ["-1"]}, "block_hashes[0]"),
    ("/query_by_hash", {"model": "m", "block_hashes": ["a" * 20]}, "block_hashes[0]"),
    ("/query_by_hash", {"model": "m", "block_hashes": [1], "num_tokens": 0}, "num_tokens"),
    ("/query_by_hash", {"model": "m", "block_hashes": [1], "num_tokens": 2**31}, "num_tokens"),
    ("/select", {"model": "m"}, "give exactly one of"),
    ("/select", {"model": "m", "token_ids": [1], "block_hashes": [1]}, "give exactly one of"),
    ("/select", {"model": "m", "token_ids": [1], "prompt": "x"}, "give exactly one of"),
    ("/query", [1, 2], "object"),
]


@pytest.mark.parametrize(("path", "body", "named"), BAD_BODIES)
def test_a_bad_body_is_400_and_names_the_field(core: TinyCore, path: str, body: Any, named: str) -> None:
    answer = call(build(core)[0], "POST", path, body)
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
    assert named in answer.error["message"]
    assert not core.asked


@pytest.mark.parametrize(
    "raw", [b"", b"{", b'{"model": "m", "token_ids": [1]} x', b"\xff\xfe", b'{"model":"\xff"}', b'{"x":' + b"[" * 99999]
)
def test_a_body_that_is_not_json_is_400(core: TinyCore, raw: bytes) -> None:
    answer = call(build(core)[0], "POST", "/query", raw)
    assert answer.status == 400
    assert answer.error["code"] in ("malformed_body", "invalid_body")


def test_unknown_model_is_404_with_its_code(core: TinyCore) -> None:
    for path, body in (
        ("/query", {"token_ids": [1]}),
        ("/query_by_hash", {"block_hashes": []}),
        ("/select", {"token_ids": [1]}),
    ):
        answer = call(build(core)[0], "POST", path, {"model": "zz", **body})
        assert (answer.status, answer.error["code"]) == (404, "unknown_model")


def test_messagepack_is_read_and_answered(core: TinyCore) -> None:
    raw = msgspec.msgpack.encode({"model": "m", "block_hashes": [2**64 - 1, -1, "ff"]})
    headers = {"content-type": "application/msgpack", "accept": "application/msgpack"}
    answer = call(build(core)[0], "POST", "/query_by_hash", raw, headers=headers)
    assert (answer.status, answer.headers["content-type"]) == (200, "application/msgpack")
    assert msgspec.msgpack.decode(answer.body)["scores"] == {"w0": {"0": 192}, "w1": {"0": 0}}
    assert core.asked[0].block_hashes is not None
    assert core.asked[0].block_hashes.tolist() == [2**64 - 1, 2**64 - 1, 255]


@pytest.mark.parametrize(
    ("accept", "msgpack"),
    [
        ("*/*", False),
        ("application/json", False),
        ("application/x-msgpack", True),
        ("application/json, application/msgpack;q=0.5", False),
        ("application/json;q=0.5, application/msgpack", True),
        ("application/msgpack;q=0", False),
        ("application/msgpack;q=oops", False),
    ],
)
def test_the_reply_has_the_encoding_that_the_client_prefers(core: TinyCore, accept: str, msgpack: bool) -> None:
    answer = call(build(core)[0], "POST", "/query", {"model": "m", "token_ids": [1]}, headers={"accept": accept})
    assert ("msgpack" in answer.headers["content-type"]) is msgpack


def test_select_has_the_shape_of_the_contract(core: TinyCore, app: HttpApi) -> None:
    body = {"model": "m", "token_ids": [1] * 200, "session_id": "s", "max_tokens": 5, "exclude_workers": ["w9"]}
    first, second = call(app, "POST", "/select", body).json(), call(app, "POST", "/select", body).json()
    assert first.pop("selection_id") != second.pop("selection_id")
    assert first == {
        "model": "m",
        "worker_id": "w0",
        "dp_rank": 0,
        "endpoint": "http://w:8000",
        "overlap": {"longest_matched": 192, "gpu": 64, "cpu": 128, "disk": 192, "dp": {"0": 192}},
        "expected_tokens": 192,
        "effective_prefill_tokens": 8,
        "reason": "reuses 192 of 200 tokens (64 on the GPU, 64 more from the CPU tier, 64 more from storage)",
        "model_name": "m",
        "isl_tokens": 200,
        "num_prompts": 1,
        "block_size": 16,
        "routing_group": "default",
        # 200 tokens of the prompt.
        "potential_decode_blocks": 13,
        "reserved": False,
    }
    assert core.asked[0].exclude_worker_ids == {"w9"}


@pytest.mark.parametrize("field", ["max_tokens", "expected_output_tokens"])
@pytest.mark.parametrize("limit", [2**63 - 1, 2**64, 10**400])
def test_a_limit_of_any_size_is_a_limit_that_a_decision_can_hold(app: HttpApi, field: str, limit: int) -> None:
    for path in ("/select", "/select_and_reserve"):
        assert call(app, "POST", path, {"model": "m", "token_ids": [1], field: limit}).status == 200
        decision = call(app, "GET", "/decisions").json()["decisions"][0]
        assert decision["max_tokens"] == 2**63 - 1


def test_decisions_are_listed_by_worker_and_model_and_by_what_went_wrong(app: HttpApi) -> None:
    for _ in range(3):
        call(app, "POST", "/select", {"model": "m", "token_ids": [1]})
    worker = call(app, "GET", "/decisions").json()["decisions"][0]["worker_id"]
    for query, listed in (
        ("", 3),
        (f"worker={worker}", 3),
        (f"worker={worker}@1", 0),
        ("model=m&limit=2", 2),
        ("model=another", 0),
        ("only=failed", 0),
    ):
        reply = call(app, "GET", "/decisions", query=query).json()
        assert (len(reply["decisions"]), reply["kept"]) == (listed, 3), query
        assert reply["searched"] == (2 if listed == 2 else 3)
    refused = call(app, "GET", "/decisions", query="only=right")
    assert refused.status == 400 and "only" in refused.json()["error"]["message"]


def test_select_explains_every_candidate(core: TinyCore) -> None:
    body = {"model": "m", "block_hashes": [1], "num_tokens": 300, "explain": True}
    candidates = call(build(core)[0], "POST", "/select", body).json()["candidates"]
    assert candidates[0] == {
        "worker_id": "w0",
        "dp_rank": 0,
        "overlap": {"longest_matched": 192, "gpu": 64, "cpu": 128, "disk": 192, "dp": {"0": 192}},
        "load": 0,
        # 108 tokens to compute, 64 to load back from each of the two tiers; an idle fleet adds no waiting.
        "cost": 166,
        "parts": {
            "prefill": 166,
            "queued": 0,
            "decode": 0,
            "delay": 0,
            "room": 0,
            "copy": 0,
            "junction": 0,
            "session": 0,
        },
        "saturated": False,
        "state": "live",
        "limited_by": LIMITED_AT_64,
    }
    assert [candidate["worker_id"] for candidate in candidates] == ["w0", "w1"]


@pytest.mark.parametrize("text", [{"prompt": "hi"}, {"messages": [{"role": "user", "content": "hi"}]}])
def test_text_is_refused_without_a_tokenizer(core: TinyCore, text: dict[str, Any]) -> None:
    answer = call(build(core)[0], "POST", "/select", {"model": "m", **text})
    assert (answer.status, answer.error["code"]) == (400, "tokens_required")
    assert "token_ids" in answer.error["message"]


def test_null_text_beside_tokens_is_ignored(core: TinyCore) -> None:
    body = {"model": "m", "token_ids": [1], "prompt": None, "messages": None}
    assert call(build(core)[0], "POST", "/select", body).status == 200
    raw = msgspec.msgpack.encode(body)
    assert call(build(core)[0], "POST", "/select", raw, headers={"content-type": "application/msgpack"}).status == 200


def test_no_worker_is_503(core: TinyCore) -> None:
    core.hits_known = []
    answer = call(build(core)[0], "POST", "/select", {"model": "m", "token_ids": [1]})
    assert (answer.status, answer.error["code"]) == (503, "no_worker")


@pytest.mark.parametrize(
    ("method", "part"), [("POST", "/prefill_complete"), ("POST", "/output_block"), ("DELETE", "")], ids=str
)
def test_an_end_says_the_same_whether_the_reservation_is_here_or_not(core: TinyCore, method: str, part: str) -> None:
    app, registry = build(core)
    for name in ("mine", "it's mine"):
        body = {"model": "m", "token_ids": [1], "selection_id": name}
        assert call(app, "POST", "/select_and_reserve", body).status == 200
        answer = call(app, method, f"/reservations/{name}{part}")
        assert (answer.status, answer.json()) == (200, {"status": "ok"})
    packed = call(app, "POST", "/reservations/mine/prefill_complete", headers={"accept": "application/msgpack"})
    assert packed.status == (200 if part else 404)
    route = f"/reservations/{{selection_id}}{part}"
    for path in (
        f"/reservations/other{part}",
        f"/reservations/mine/more{part}",
        f"/reservations/mine{part}/",
        "/reservations/",
    ):
        assert call(app, method, path).status == 404
    assert call(app, "GET", f"/reservations/mine{part}").status == 405
    counted = registry.get_sample_value("kvrouter_requests_total", {"path": route, "code": "200"})
    assert counted == 2 + (part == "/prefill_complete")
    assert registry.get_sample_value("kvrouter_requests_total", {"path": route, "code": "404"}) == 1


@pytest.mark.parametrize(
    ("method", "part"), [("POST", "/prefill_complete"), ("POST", "/output_block"), ("DELETE", "")], ids=str
)
@pytest.mark.parametrize("length", ["Content-Length: 2\r\n\r\n{}", "\r\n"], ids=["body", "bare"])
def test_an_end_says_the_same_on_the_short_way(core: TinyCore, method: str, part: str, length: str) -> None:
    app, registry = build(core)
    for name, status in (("mine", b"200 OK"), ("other", b"404 Not Found"), ("mine/more", b"404 Not Found")):
        line = f"{method} /reservations/{name}{part} HTTP/1.1\r\nHost: localhost\r\n"
        short = f"{line}{length}".encode()
        is_short = (
            plain_head(short, app.plain_paths, app.forwarded_paths, app.plain_below, None, 1_000, 100) is not None
        )
        assert is_short == (method == "DELETE" or "{}" in length)
        answers = []
        for sent in (short, f"{line}X-Unknown: 1\r\n{length}".encode()):
            call(app, "POST", "/select_and_reserve", {"model": "m", "token_ids": [1], "selection_id": "mine"})
            answers.append(asyncio.run(exchange(app, sent, hang_up=True)))
        assert answers[0].startswith(b"HTTP/1.1 " + status)
        assert answers[0].partition(b"\r\n\r\n")[2] == answers[1].partition(b"\r\n\r\n")[2]
    route = f"/reservations/{{selection_id}}{part}"
    assert registry.get_sample_value("kvrouter_requests_total", {"path": route, "code": "200"}) == 2


def test_with_a_key_no_end_goes_the_short_way(core: TinyCore) -> None:
    app, _ = build(core, api_key="secret")
    body, key = {"model": "m", "token_ids": [1], "selection_id": "mine"}, {"authorization": "Bearer secret"}
    assert call(app, "POST", "/select_and_reserve", body, headers=key).status == 200
    sent = b"DELETE /reservations/mine HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert asyncio.run(exchange(app, sent, hang_up=True)).startswith(b"HTTP/1.1 401 ")


def test_an_end_here_needs_no_task(app: HttpApi) -> None:
    call(app, "POST", "/select_and_reserve", {"model": "m", "token_ids": [1], "selection_id": "mine"})
    request = HttpRequest(b"DELETE", "1.1", b"/reservations/mine", [(b"host", b"x")], keep_alive=True, upgrades=False)
    answer = app.respond(request)
    assert isinstance(answer, tuple) and answer[0] == 200
    # The reservation is gone from this process, so another process may have it.
    later = app.respond(request)
    assert not isinstance(later, tuple)
    later.close()


def test_decisions_are_timed_by_the_given_clock(core: TinyCore) -> None:
    ticks = iter([10.0, 10.25, 20.0, 20.2, 20.3, 20.5])
    app, registry = build(core, clock=lambda: next(ticks))
    call(app, "POST", "/query", {"model": "m", "token_ids": [1]})
    call(app, "POST", "/select", {"model": "m", "token_ids": [1]})
    assert registry.get_sample_value("kvrouter_decide_seconds_count") == 2
    assert registry.get_sample_value("kvrouter_decide_seconds_sum") == pytest.approx(0.75)
    assert registry.get_sample_value("kvrouter_choice_seconds_count") == 1
    assert registry.get_sample_value("kvrouter_choice_seconds_sum") == pytest.approx(0.1)


def test_a_text_is_placed_by_its_tokens(core: TinyCore) -> None:
    tokens = TinyTokens()
    body = {"model": "m", "prompt": "Paris", "cache_salt": "s", "dp_rank": 0, "add_special_tokens": False}
    answer = call(build(core, tokens=tokens)[0], "POST", "/select", body)
    assert answer.status == 200
    assert answer.json()["tokens"] == {"source": "render", "num_tokens": 5, "known_tokens": 5, "problem": ""}
    question = core.asked[-1]
    assert question.token_ids is not None and question.token_ids.tolist() == list(b"Paris")
    assert (question.num_tokens, question.cache_salt, question.dp_rank) == (5, "s", 0)
    # The whole body decides the tokens, not only the fields that the router knows.
    assert tokens.asked == [("/v1/completions", "m", body)]


def test_a_chat_and_its_tools_reach_the_tokenizer_unchanged(core: TinyCore) -> None:
    tokens = TinyTokens()
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function"}]}
    for question_body in (body, {**body, "prompt": None}):
        assert call(build(core, tokens=tokens)[0], "POST", "/select", question_body).status == 200
    assert tokens.asked[0] == ("/v1/chat/completions", "m", body)
    packed = msgspec.msgpack.encode(body)
    headers = {"content-type": "application/msgpack"}
    assert call(build(core, tokens=tokens)[0], "POST", "/select", packed, headers=headers).status == 200
    assert tokens.asked[-1] == tokens.asked[0]


def test_a_text_without_known_tokens_is_placed_by_load(core: TinyCore) -> None:
    answer = call(build(core, tokens=TinyTokens())[0], "POST", "/select", {"model": "m", "prompt": "unknown"})
    assert answer.status == 200
    expected = {"source": "none", "num_tokens": 1000, "known_tokens": 0, "problem": "no engine to ask"}
    assert answer.json()["tokens"] == expected
    question = core.asked[-1]
    assert question.token_ids is None and question.block_hashes is not None and not len(question.block_hashes)


def test_a_text_that_the_engine_rejects_is_400(core: TinyCore) -> None:
    answer = call(build(core, tokens=TinyTokens())[0], "POST", "/select", {"model": "m", "prompt": "refused"})
    assert (answer.status, answer.error["code"]) == (400, "prompt_refused")
    assert "the template says no" in answer.error["message"]


def test_a_bug_while_tokenizing_is_500(core: TinyCore) -> None:
    answer = call(build(core, tokens=TinyTokens())[0], "POST", "/select", {"model": "m", "prompt": "bug"})
    assert (answer.status, answer.error["code"]) == (500, "internal_error")


@pytest.mark.parametrize("path", ["/query", "/select"])
def test_an_adapter_is_a_model_of_the_workers_that_have_it(core: TinyCore, path: str) -> None:
    app = build(core, tokens=TinyTokens())[0]
    assert call(app, "POST", path, {"model": "adapter", "token_ids": [1, 2]}).status == 200
    question = core.asked[-1]
    assert (question.model, question.lora_name, question.worker_ids) == ("m", "style", frozenset({"w0"}))
    call(app, "POST", path, {"model": "adapter", "token_ids": [1, 2], "workers": ["w0", "w1"], "lora_name": "own"})
    question = core.asked[-1]
    assert (question.lora_name, question.worker_ids) == ("own", frozenset({"w0"}))


def test_workers_and_health_say_how_tokens_are_found(core: TinyCore) -> None:
    app = build(core, tokens=TinyTokens())[0]
    for worker_id, url in (("w0", "http://h:1"), ("w1", None)):
        call(app, "POST", "/register", {"worker_id": worker_id, "model": "m", "endpoint": "tcp://h:5557", "url": url})
    rows = call(app, "GET", "/workers").json()["workers"]
    assert [row["tokens"]["way"] for row in rows] == ["render", "none"]
    assert call(app, "GET", "/health").json() == {"status": "degraded", "reasons": ["tokens differ"]}


LONG_IDS = [70_000] * 150_000
LONG_HASHES = [2**63 + n for n in range(40_000)]


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/query", {"token_ids": LONG_IDS}),
        ("/query_by_hash", {"block_hashes": LONG_HASHES}),
        ("/query_by_hash", {"block_hashes": [hex(block_hash) for block_hash in LONG_HASHES]}),
        ("/select", {"token_ids": LONG_IDS}),
        ("/select", {"block_hashes": LONG_HASHES}),
        ("/select", {"prompt": "long " * 60_000}),
        ("/select_and_reserve", {"token_ids": LONG_IDS}),
        ("/reservations", {"token_ids": LONG_IDS, "worker_id": "w0"}),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_long_body_is_answered_like_a_short_one(
    core: TinyCore, path: str, prompt: dict[str, Any], packed: bool
) -> None:
    content_type = "application/msgpack" if packed else "application/json"
    encode = msgspec.msgpack.encode if packed else msgspec.json.encode
    short = {name: field if name == "worker_id" else field[:20] for name, field in prompt.items()}
    for fields in (short, prompt):
        body = encode({"model": "m", **fields})
        assert (len(body) >= LONG_BODY_BYTES) == (fields is prompt)
        headers = {"content-type": content_type}
        answer = call(build(core, tokens=TinyTokens())[0], "POST", path, body, headers=headers)
        assert answer.status in (200, 201), answer.json()
    few, many = core.asked
    if "token_ids" in prompt:
        assert few.token_ids is not None and few.token_ids.tolist() == LONG_IDS[:20]
        assert many.token_ids is not None and many.token_ids.tolist() == LONG_IDS
    elif "block_hashes" in prompt:
        assert few.block_hashes is not None and few.block_hashes.tolist() == LONG_HASHES[:20]
        assert many.block_hashes is not None and many.block_hashes.tolist() == LONG_HASHES


@pytest.mark.parametrize("path", ["/query", "/query_by_hash", "/select", "/select_and_reserve", "/reservations"])
def test_a_long_body_that_is_wrong_is_refused_in_the_same_words(core: TinyCore, path: str) -> None:
    field = "block_hashes" if path == "/query_by_hash" else "token_ids"
    api = build(core)[0]
    for wrong in ("[1, 2.5]", "[1, null]", "[1, 99999999999999999999]", "[1, 2"):
        short, long = (
            call(
                api,
                "POST",
                path,
                f'{{"model": "m", "worker_id": "w0", "{field}": {wrong}}}{" " * spaces}'.encode(),
                headers={"content-type": "application/json"},
            )
            for spaces in (0, LONG_BODY_BYTES)
        )
        assert (short.status, short.body, short.status) == (long.status, long.body, 400)
