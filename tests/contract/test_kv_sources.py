# SPDX-License-Identifier: Apache-2.0
"""Sources of blocks in requests: those that the router names, and those that clients do. The sockets are real."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import msgspec
import openai
import pytest

from kvrouter.events.patch.messages import PeerAddress
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.pull import Pull
from kvrouter.router.model.workers.role import HandoverWay, Role
from kvrouter.router.route.load.transfer_rates import HostPair
from kvrouter.router.route.load.worker_speed import SAMPLES_MIN
from kvrouter.router.route.placement.candidates import DRAINING
from kvrouter.router.route.placement.lenders import PULL_LATENCY_S
from kvrouter.router.route.placement.planned_pull import PlannedPull
from kvrouter.router.serve.proxy.kv_source import REMOVED_FIELDS
from tests.contract.picker_support import Door
from tests.contract.proxy_support import CHAT, COMPLETIONS, ProxyServer, fleet, until
from tests.contract.test_quality import PREDICTED, TOKENS, answer, counted, events, usage
from tests.support.placing_stage import Stage, hit
from tests.support.scripted_engine import Asked, Wire, plain, reset, stream

RESPONSES, MESSAGES, GENERATE = "/v1/responses", "/v1/messages", "/inference/v1/generate"
MESSAGE = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": MESSAGE},
    COMPLETIONS: TOKENS,
    RESPONSES: {"model": "m", "input": "hi"},
    MESSAGES: {"model": "m", "messages": MESSAGE, "max_tokens": 4},
    GENERATE: {"model": "m", "token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4}},
}
EMPTY = plain(b"{}")
THEIRS = {"kv_request_id": "mine", "remote_host": "10.9.9.9", "remote_port": 1}


def pull(source: str = "w9", host: str = "10.0.0.9", tokens: int = 98) -> PlannedPull:
    return PlannedPull(WorkerKey("m", source), host, 5710, tokens, tokens - PREDICTED, 0.25)


def named(router: ProxyServer, placed: int = -1) -> dict[str, Any]:
    """Return the source that a request with this pull names."""
    selection_id = router.placer.placed[placed].selection_id
    return {"kv_request_id": selection_id, "remote_host": "10.0.0.9", "remote_port": 5710, "timeout_s": 0.25}


def removed(router: ProxyServer) -> dict[str, float]:
    counts = {name: router.sample("client_kv_sources_removed_total", field=name) for name in REMOVED_FIELDS}
    return {name: count for name, count in counts.items() if count}


# The router's own sources.


@pytest.mark.parametrize("path", sorted(BODIES))
def test_a_request_with_a_pull_names_its_source_and_keeps_all_other_bytes(path: str) -> None:
    with fleet(EMPTY) as (router, engine):
        router.placer.pulls["w0"] = pull()
        raw = b" \n" + json.dumps(BODIES[path] | {"temperature": 0.10, "é": "ü"}, indent=2).encode()
        assert router.post(path, raw)[0] == 200
        body = engine.asked[0].body
        assert json.loads(body)["kv_transfer_params"] == {"remote_kv_source": named(router)}
        assert body.endswith(raw.split(b"{", 1)[1].lstrip())
        assert engine.asked[0].all("content-length") == [str(len(body))]
        # vLLM with its own p2p tier may be older than its reading of sources at this path.
        assert router.placer.requests[0].pulls_declared is (path == GENERATE)


def test_a_source_joins_the_clients_own_transfer_parameters() -> None:
    with fleet(EMPTY) as (router, engine):
        router.placer.pulls["w0"] = pull()
        for params in ({"mine": 1.50}, {}, None):
            router.post(COMPLETIONS, TOKENS | {"kv_transfer_params": params})
            sent = json.loads(engine.asked[-1].body)["kv_transfer_params"]
            assert sent == (params or {}) | {"remote_kv_source": named(router)}
        router.post(COMPLETIONS, b'{"prompt": [1, 2], "kv_transfer_params": {"mine": 1.50}, "x": 1.0}')
        assert b'{"mine":1.50,"remote_kv_source":' in engine.asked[-1].body and b'"x":1.0' in engine.asked[-1].body


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"model": "m", "input": "hi"}),
        ("/v1/score", {"model": "m", "queries": "a", "documents": "b"}),
        ("/generate", {"model": "m", "input_ids": [1, 2]}),
        (COMPLETIONS, TOKENS | {"kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [1]}}),
        (COMPLETIONS, TOKENS | {"kv_transfer_params": "text"}),
    ],
)
def test_no_source_is_planned_where_an_engine_would_not_read_it(path: str, body: dict[str, Any]) -> None:
    raw = json.dumps(body).encode()
    with fleet(EMPTY) as (router, engine):
        router.placer.pulls["w0"] = pull()
        router.post(path, raw)
        assert not router.placer.requests[0].may_pull
        assert engine.asked[0].body == raw


def test_json_that_only_python_reads_gets_no_source() -> None:
    raw = b'{"prompt": [1], "temperature": NaN, "kv_transfer_params": {"\\ud800": 1}}'
    with fleet(EMPTY) as (router, engine):
        router.placer.pulls["w0"] = pull()
        assert router.post(COMPLETIONS, raw)[0] == 200
        assert engine.asked[0].body == raw


def test_a_retry_has_the_source_of_its_own_worker_or_none() -> None:
    with fleet(reset, EMPTY) as (router, bad, good):
        router.placer.pulls |= {"w0": pull(), "w1": pull("w8")}
        assert router.post(COMPLETIONS, TOKENS)[0] == 200
        sources = [json.loads(e.asked[0].body)["kv_transfer_params"]["remote_kv_source"] for e in (bad, good)]
        assert sources == [named(router, 0), named(router, 1)] and sources[0] != sources[1]
    with fleet(reset, EMPTY) as (router, bad, good):
        router.placer.pulls["w0"] = pull()
        assert router.post(COMPLETIONS, TOKENS)[0] == 200
        assert b"remote_kv_source" in bad.asked[0].body
        assert json.loads(good.asked[0].body) == TOKENS


def test_nothing_is_fetched_from_a_worker_that_has_just_failed() -> None:
    with fleet(reset, answer(PREDICTED)) as (router, _, good):
        router.placer.pulls["w1"] = pull("w0")
        assert router.post(COMPLETIONS, TOKENS)[0] == 200
        assert json.loads(good.asked[0].body) == TOKENS
        until(lambda: counted(router, "w1") == {"exact": 1}, "it is judged")
        assert not router.sample("peer_pulls_total", worker="w1", outcome="none")


# Clients' own sources.

FOREIGN: list[tuple[str, Any, Any, str]] = [
    ("kv_transfer_params", {"remote_kv_source": THEIRS}, None, "remote_kv_source"),
    ("kv_transfer_params", {"remote_prefiller": THEIRS, "x": 1.50}, {"x": 1.50}, "remote_prefiller"),
    ("kv_transfer_params", {"remote_decoder": {"kv_request_id": "a"}}, None, "remote_decoder"),
    ("kv_hints", {"actions": []}, None, "kv_hints"),
    (
        "sampling_params",
        {"max_tokens": 4, "extra_args": {"kv_transfer_params": {"remote_kv_source": THEIRS}, "y": 2}},
        {"max_tokens": 4, "extra_args": {"kv_transfer_params": {}, "y": 2}},
        "remote_kv_source",
    ),
    (
        "vllm_xargs",
        {"kv_transfer_params": {"remote_prefiller": THEIRS}},
        {"kv_transfer_params": {}},
        "remote_prefiller",
    ),
]


@pytest.mark.parametrize(("field", "value", "left", "name"), FOREIGN)
def test_a_clients_source_is_removed_and_counted(field: str, value: Any, left: Any, name: str) -> None:
    raw = json.dumps({"temperature": 0.10} | TOKENS | {field: value}).encode()
    with fleet(EMPTY) as (router, engine):
        assert router.post(COMPLETIONS, raw)[0] == 200
        assert json.loads(engine.asked[0].body) == {"temperature": 0.10} | TOKENS | (
            {} if left is None else {field: left}
        )
        assert removed(router) == {name: 1}
        assert router.placer.requests[0].may_pull
        router.placer.pulls["w0"] = pull()
        router.post(COMPLETIONS, raw)
        body = engine.asked[1].body
        assert json.loads(body)["kv_transfer_params"]["remote_kv_source"] == named(router)
        assert b"10.9.9.9" not in body


@pytest.mark.parametrize(("field", "value", "left", "name"), FOREIGN)
def test_a_trusted_clients_source_is_kept_and_no_other_is_named(field: str, value: Any, left: Any, name: str) -> None:
    raw = json.dumps(TOKENS | {field: value}).encode()
    with fleet(EMPTY, trust_client_kv_sources="on") as (router, engine):
        router.placer.pulls["w0"] = pull()
        router.post(COMPLETIONS, raw)
        assert engine.asked[0].body == raw
        assert not removed(router)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt": [1], "kv_transfer_params": {"remote\\u005fkv_source": {"remote_host": "10.9.9.9"}}}',
        b'{"prompt": [1], "kv\\u005ftransfer_params": {"remote_kv_source": {"remote_host": "10.9.9.9"}}}',
        b'{"prompt": [1], "kv_transfer_params": {"\\ud800": 1, "remote_kv_source": {"remote_host": "10.9.9.9"}}}',
        b'{"prompt": [1], "kv_transfer_params": {"a": NaN, "remote_kv_source": {"remote_host": "10.9.9.9"}}}',
        '{"prompt": [1], "kv_transfer_params": {"remote_kv_source": {"remote_host": "10.9.9.9"}}}'.encode("utf-16"),
        b'{"kv_transfer_params": {"remote_kv_source": {"remote_host": "10.9.9.9"}, "remote_kv_source": {"a": 1}}}',
        b'{"sampling_params": {"extra_args": {"kv\\u005ftransfer_params": {"remote_kv_source": {"h": "10.9.9.9"}}}}}',
    ],
)
def test_no_spelling_hides_a_source(raw: bytes) -> None:
    with fleet(EMPTY) as (router, engine):
        assert router.post(COMPLETIONS, raw)[0] == 200
        body = json.loads(engine.asked[0].body)
        assert "10.9.9.9" not in json.dumps(body), body
        assert removed(router) == {"remote_kv_source": 1}


def test_a_body_without_a_source_keeps_its_bytes() -> None:
    raw = (
        b' {"prompt" : [1], "kv_transfer_params": {"remote_kv_source" : null}, "kv_hints": null, "sampling_params": {}}'
    )
    with fleet(EMPTY) as (router, engine):
        router.post(COMPLETIONS, raw)
        assert engine.asked[0].body == raw
        assert not removed(router)


def test_the_log_has_one_line_for_each_field_of_clients(caplog: pytest.LogCaptureFixture) -> None:
    with fleet(EMPTY) as (router, _):
        for _ in range(3):
            router.post(
                COMPLETIONS, TOKENS | {"kv_transfer_params": {"remote_kv_source": THEIRS}, "kv_hints": {"a": 1}}
            )
        assert removed(router) == {"remote_kv_source": 3, "kv_hints": 3}
    assert sorted(record.field for record in caplog.records if "kv_sources" in record.message) == [  # type: ignore[attr-defined]
        "kv_hints",
        "remote_kv_source",
    ]


def test_client_libraries_send_transfer_parameters_through_the_router() -> None:
    with fleet(plain(json.dumps({"id": "x", "choices": [], "object": "chat.completion"}).encode())) as (router, engine):
        router.placer.pulls["w0"] = pull()
        theirs = {"kv_transfer_params": {"remote_kv_source": THEIRS, "mine": 1}}
        url = f"http://127.0.0.1:{router.port}"
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], extra_body=theirs)
        with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as other:
            other.messages.create(
                model="m", max_tokens=4, messages=[{"role": "user", "content": "hi"}], extra_body=theirs
            )
        for n, asked in enumerate(engine.asked):
            params = json.loads(asked.body)["kv_transfer_params"]
            assert params == {"mine": 1, "remote_kv_source": named(router, n)}
        assert removed(router) == {"remote_kv_source": 2}


# The endpoint picker.


def test_the_picker_names_the_source_in_body_and_header() -> None:
    with fleet(EMPTY) as (router, _):
        router.placer.pulls["w0"] = pull(host="fd00::9")
        route = Door(router).pick(json.dumps(TOKENS).encode(), x_kvrouter_kv_source="10.9.9.9:1")
        assert dict(route.given)[b"x-kvrouter-kv-source"] == b"[fd00::9]:5710"
        assert route.body is not None
        source = named(router) | {"remote_host": "fd00::9"}
        assert json.loads(route.body) == TOKENS | {"kv_transfer_params": {"remote_kv_source": source}}
        assert route.observer is not None
        route.observer.close()


def test_the_picker_removes_what_clients_name() -> None:
    with fleet(EMPTY) as (router, _):
        raw = json.dumps(TOKENS | {"kv_transfer_params": {"remote_kv_source": THEIRS}}).encode()
        route = Door(router).pick(raw, x_kvrouter_kv_source="10.9.9.9:1")
        assert route.body is not None and json.loads(route.body) == TOKENS
        assert b"x-kvrouter-kv-source" in route.removed
        assert removed(router) == {"remote_kv_source": 1}
        assert route.observer is not None
        route.observer.close()
        untouched = Door(router).pick(json.dumps(TOKENS).encode())
        assert untouched.body is None and untouched.observer is not None
        untouched.observer.close()


# Predicted and delivered.


@pytest.mark.parametrize(
    ("cached", "outcome", "pulled", "fetched", "over", "under"),
    [
        (98, "exact", "whole", 2, 0, 0),
        (97, "exact", "partial", 1, 0, 0),
        (PREDICTED, "exact", "none", 0, 0, 0),
        (80, "less", "none", 0, 16, 0),
        (99, "more", "whole", 2, 0, 1),
    ],
)
def test_a_pull_is_judged_apart_from_the_engines_own_tiers(
    cached: int, outcome: str, pulled: str, fetched: int, over: int, under: int
) -> None:
    with fleet(answer(cached)) as (router, _):
        router.placer.pulls["w0"] = pull()
        router.post(COMPLETIONS, TOKENS)
        until(lambda: counted(router) == {outcome: 1}, "it is counted")
        counts = {o: router.sample("peer_pulls_total", worker="w0", outcome=o) for o in ("whole", "partial", "none")}
        assert {o for o, count in counts.items() if count} == {pulled}
        assert router.sample("peer_tokens_predicted_total", worker="w0") == 98 - PREDICTED
        assert router.sample("peer_tokens_delivered_total", worker="w0") == fetched
        assert router.sample("delivered_cached_tokens_total", worker="w0") == cached - fetched
        assert router.sample("over_credit_tokens_total", worker="w0") == over
        assert router.sample("under_credit_tokens_total", worker="w0") == under
        # The expectation is one token over the prediction, and the pull ends above it.
        assert router.sample("expectation_error_tokens_bucket", model="m", le="-1.0") == (cached <= PREDICTED)
        assert router.sample("expectation_error_tokens_bucket", model="m", le="0.0") == (cached <= 98)
        (row,) = router.get("/workers/w0")["workers"]
        assert row["reuse"]["delivered_tokens"] == cached - fetched
        assert router.placer.placed[0].reused_tokens == cached


@pytest.mark.parametrize(
    ("more", "cached"), [({"n": 2}, 98), ({}, None)], ids=["several-answers", "without-cached-tokens"]
)
def test_a_pull_whose_result_is_not_reported_is_unknown(more: dict[str, Any], cached: int | None) -> None:
    with fleet(answer(cached)) as (router, _):
        router.placer.pulls["w0"] = pull()
        router.post(COMPLETIONS, TOKENS | more)
        until(lambda: router.sample("peer_pulls_total", worker="w0", outcome="unknown") == 1, "it is counted")
        assert router.sample("peer_tokens_predicted_total", worker="w0") == 0


def test_a_fleet_that_fetches_nothing_has_no_counts_of_pulls() -> None:
    with fleet(answer(PREDICTED)) as (router, _):
        router.post(COMPLETIONS, TOKENS)
        until(lambda: counted(router) == {"exact": 1}, "it is counted")
        labels = {"model": "m", "worker": "w0", "outcome": "none"}
        assert router.registry.get_sample_value("kvrouter_peer_pulls_total", labels) is None


# From the engine's answer to the price of the next pull.

LONG, LENT, RATE = 8_192, 7_936, 10_000.0
HOSTS = HostPair("m", "host-w1", "host-w0")


def lending(router: ProxyServer) -> Stage:
    """Have a real placer choose, whose clock stands still: `w1` holds prompts, takes none, and lends them to `w0`."""
    source = WorkerKey("m", "w1")
    fetching = msgspec.structs.replace(hit("w0"), pulls=(Pull(source, LENT),))
    stage = Stage(fetching, hit("w1", LENT), unavailable={"w1": DRAINING})
    stage.fleet.peers |= {name: PeerAddress(f"host-{name}", 5_710, "same") for name in ("w0", "w1")}
    weights = stage.placer.weights
    for _ in range(SAMPLES_MIN):
        weights.rates_of(WorkerKey("m", "w0")).first_token(10_000, 0, 0, 10_000 / RATE)
    weights.tick(stage.fleet.workers(), stage.now)
    router.proxy._placer = stage.placer  # type: ignore[assignment]
    return stage


def long_prompt(first: int) -> dict[str, Any]:
    return {"model": "m", "prompt": [first, *range(1, LONG)], "stream": True}


def judged(router: ProxyServer, outcome: str, number: int) -> None:
    until(lambda: router.sample("peer_pulls_total", worker="w0", outcome=outcome) == number, "they are judged")


def test_answers_with_all_blocks_teach_how_fast_hosts_exchange_them() -> None:
    token_s = 3e-5
    with fleet(EMPTY, EMPTY) as (router, engine, _):
        stage = lending(router)
        transfers, cpu_cost = stage.placer.weights.transfers, stage.placer.weights.token_costs[1]

        async def slow(asked: Asked, wire: Wire) -> None:
            stage.now += (LONG - LENT + LENT * cpu_cost) / RATE + PULL_LATENCY_S + LENT * token_s
            await stream(events(None, usage(LENT, LONG)))(asked, wire)

        engine.script = slow
        for number in range(SAMPLES_MIN):
            assert router.post(COMPLETIONS, long_prompt(number))[0] == 200
            assert b"remote_kv_source" in engine.asked[-1].body
            judged(router, "whole", number + 1)
        assert transfers.rate(HOSTS, 0, RATE)[0] == pytest.approx(token_s)


def test_answers_without_the_blocks_end_the_pulls() -> None:
    with fleet(stream(events(None, usage(0, LONG))), EMPTY) as (router, engine, _):
        lending(router)
        for number in range(20):
            assert router.post(COMPLETIONS, long_prompt(number))[0] == 200
            if b"remote_kv_source" not in engine.asked[-1].body:
                break
            judged(router, "none", number + 1)
        else:
            raise AssertionError("blocks that never arrive are fetched again and again")
        assert number


def test_a_source_lends_once_for_a_request_that_is_sent_twice() -> None:
    with fleet(EMPTY, EMPTY, EMPTY) as (router, first, _, second):
        stage = lending(router)
        stage.fleet.known.append(msgspec.structs.replace(hit("w2"), pulls=stage.fleet.known[0].pulls))
        stage.fleet.peers["w2"] = stage.fleet.peers["w0"]
        loads, lent = stage.placer.weights.table.loads, []

        async def once(asked: Asked, wire: Wire) -> None:
            lent.append(loads[WorkerKey("m", "w1")].lent_tokens)
            await (reset if len(lent) == 1 else answer(LENT))(asked, wire)

        first.script = second.script = once
        assert router.post(COMPLETIONS, long_prompt(0))[0] == 200
        assert lent == [LENT, LENT]
        until(lambda: not loads, "the request has ended")


@pytest.mark.parametrize("way", HandoverWay)
@pytest.mark.parametrize("picked", [False, True])
def test_a_prompt_that_is_handed_over_names_no_source(way: HandoverWay, picked: bool) -> None:
    given = {"do_remote_prefill": True, "remote_block_ids": [[1]]}
    computed = json.dumps({"choices": [{"finish_reason": "length"}], "kv_transfer_params": given}).encode()
    with fleet(answer(0), EMPTY, plain(computed)) as (router, decoder, _, prefiller):
        stage = lending(router)
        registered, computes = router.core.registered, WorkerKey("m", "w2")
        for name, fields in (("w0", {"handover": way}), ("w2", {"role": Role.PREFILL})):
            key = WorkerKey("m", name)
            registered[key] = msgspec.structs.replace(registered[key], **fields)
        stage.placer._decider._prefillers = lambda model: frozenset({computes})
        source = stage.fleet.known[1].worker
        # Both may fetch a part of the prompt, and the decode worker is busy.
        stage.fleet.known[0] = msgspec.structs.replace(hit("w0"), pulls=(Pull(source, 6_000),))
        stage.fleet.known.append(msgspec.structs.replace(hit("w2"), pulls=(Pull(source, 6_000),)))
        stage.fleet.peers["w2"] = stage.fleet.peers["w0"]
        stage.placer.weights.table.reserve("queued", WorkerKey("m", "w0"), 60_000, 0, stage.now)
        body = {"model": "m", "prompt": [0, *range(1, LONG)]}
        if picked:
            door = Door(router)
            door.picker._placer = stage.placer
            route = door.pick(json.dumps(body).encode())
            sent = json.loads(route.body or json.dumps(body))
            assert b"x-kvrouter-kv-source" not in dict(route.given) and route.observer is not None
            router.on_loop(route.observer.close)
        else:
            assert router.post(COMPLETIONS, body)[0] == 200
            sent = json.loads(decoder.asked[0].body)
        assert sent == body | ({"kv_transfer_params": given} if way is HandoverWay.KV_TRANSFER_PARAMS else {})
        assert not any(b"remote_kv_source" in asked.body for asked in prefiller.asked)
        assert len(prefiller.asked) == (way is HandoverWay.KV_TRANSFER_PARAMS)
