# SPDX-License-Identifier: Apache-2.0
"""Clients that compress their bodies, through the proxy to simulated replicas and through Envoy and the picker.

The predicted hits are the tokens that the engines reuse, and engines get the bodies plain.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from random import Random
from typing import Any, NamedTuple

import anthropic
import openai
import pytest

from tests.support.compressing_client import compressing, library_of
from tests.support.compression import CODINGS, COMPRESS, bomb
from tests.support.envoy_process import BUFFERED, FULL_DUPLEX, ORIGINAL_DST, OVERRIDE_HOST, EnvoyProcess
from tests.support.exchange import exchange
from tests.support.fleet import settle, wait_live
from tests.support.ports import free_port
from tests.support.replica_process import MODEL, replicas, worker_flags
from tests.support.router_process import RouterProcess
from tests.support.scripted_engine import ScriptedEngine, plain

pytestmark = pytest.mark.smoke

COMPLETIONS = "/v1/completions"
MAX_BODY_BYTES = 500_000
TURNS = 12
REPLICAS = 2
ANSWER = json.dumps(
    {
        "object": "text_completion",
        "choices": [{"index": 0, "text": " yes"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}},
    }
).encode()


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    with (
        replicas(REPLICAS, "--shape", "gemma3", "--blocks", "2500") as endpoints,
        RouterProcess(tmp_path_factory.mktemp("router"), worker_flags(endpoints)) as started,
    ):
        for number in range(REPLICAS):
            # A replica without blocks has published nothing yet, so send each one a prompt.
            body = {"model": MODEL, "prompt": [number + 1] * 100, "max_tokens": 2}
            assert exchange(started.port, "POST", COMPLETIONS, body, {"x-kvrouter-worker": f"w{number}"}).status == 200
        wait_live(started)
        yield started


@pytest.mark.parametrize("coding", CODINGS)
def test_openais_client_gets_what_is_predicted_for_its_compressed_prompts(router: RouterProcess, coding: str) -> None:
    rng, prompt, reused = Random(coding), [1], 0
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{router.port}/v1", api_key="x", max_retries=0, http_client=compressing(coding)
    ) as client:
        for _ in range(TURNS):
            prompt += [rng.randrange(1, 30_000) for _ in range(rng.randrange(100, 400))]
            settle(router)
            raw = client.completions.with_raw_response.create(model=MODEL, prompt=list(prompt), max_tokens=2)
            usage: Any = raw.parse().usage
            hit_tokens = usage.prompt_tokens_details.cached_tokens
            assert usage.prompt_tokens == len(prompt)
            assert int(raw.headers["x-kvrouter-predicted-hit"]) == hit_tokens
            reused += hit_tokens
    assert reused > 0
    assert router.metric("kvrouter_encoded_bodies_total", outcome="decoded") >= TURNS


@pytest.mark.parametrize("coding", CODINGS)
def test_anthropics_client_gets_what_is_predicted_for_its_compressed_messages(
    router: RouterProcess, coding: str
) -> None:
    turns, reused = list[Any](), 0
    decoded = router.metric("kvrouter_encoded_bodies_total", outcome="decoded")
    client_class: Any = anthropic.Anthropic
    http_client = compressing(coding, library_of(anthropic.DefaultHttpxClient))
    with client_class(
        base_url=f"http://127.0.0.1:{router.port}", api_key="x", max_retries=0, http_client=http_client
    ) as client:
        for number in range(TURNS):
            turns.append({"role": "user", "content": f"{coding} {number}" + " bada bede" * 60})
            settle(router)
            raw = client.messages.with_raw_response.create(
                model=MODEL,
                max_tokens=2,
                system="You are brief." + " bada" * 200,
                messages=turns,
                stream=number % 2 == 1,
            )
            if number % 2:
                events = [event for event in raw.parse() if event.type == "message_delta"]
                hit_tokens = events[-1].usage.cache_read_input_tokens
            else:
                hit_tokens = raw.parse().usage.cache_read_input_tokens
            # The first message makes the router verify the tokens of messages, and may come before that.
            if number:
                assert int(raw.headers["x-kvrouter-predicted-hit"]) == hit_tokens
            reused += hit_tokens
            turns.append({"role": "assistant", "content": "bada"})
    assert reused > 0
    assert router.metric("kvrouter_encoded_bodies_total", outcome="decoded") - decoded == TURNS


class Site(NamedTuple):
    """A scripted engine behind a picker, and two Envoys in front of it."""

    router: RouterProcess
    engine: ScriptedEngine
    ports: dict[str, int]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder, port = tmp_path_factory.mktemp("gateway"), free_port()
    with ExitStack() as stack:
        engine = stack.enter_context(ScriptedEngine(plain(ANSWER)))
        flags = ["--gateway-port", str(port), "--health-interval-s", "0", "--max-body-bytes", str(MAX_BODY_BYTES)]
        flags += ["--model-alias", "other=m", "--worker", f"w0={engine.url},model=m"]
        router = stack.enter_context(RouterProcess(folder / "router", flags))
        urls = [engine.url]
        duplex = EnvoyProcess(folder / "duplex", urls, picker_port=port, how=ORIGINAL_DST, processing=FULL_DUPLEX)
        held = EnvoyProcess(folder / "held", urls, picker_port=port, how=OVERRIDE_HOST, processing=BUFFERED)
        ports = {"duplex": stack.enter_context(duplex).port, "held": stack.enter_context(held).port}
        yield Site(router, engine, ports)
        assert "Traceback" not in router.log_tail()


@pytest.mark.parametrize("coding", COMPRESS)
@pytest.mark.parametrize("mode", ["duplex", "held"])
def test_the_picker_decodes_for_the_choice_and_for_the_engine(site: Site, mode: str, coding: str) -> None:
    bodies: tuple[dict[str, Any], ...] = (
        {"model": "m", "prompt": [1, 2, 3], "max_tokens": 4},
        {"model": "m", "prompt": list(range(70_000)), "max_tokens": 4},
        {"model": "other", "prompt": [1, 2, 3]},
    )
    for body in bodies:
        raw = json.dumps(body).encode()
        first = len(site.engine.asked)
        asked = []
        for content, headers in ((raw, {}), (COMPRESS[coding](raw), {"content-encoding": coding})):
            answer = exchange(site.ports[mode], "POST", COMPLETIONS, content, headers)
            assert (answer.status, answer.content) == (200, ANSWER)
            decision = site.router.request("GET", f"/decisions/{answer.headers['x-kvrouter-selection-id']}")
            asked.append((site.engine.asked[-1].body, decision["num_tokens"], decision["model"]))
        assert asked[0] == asked[1] and asked[1][1] == len(body["prompt"])
        assert json.loads(asked[1][0])["model"] == "m"
        for request in site.engine.asked[first:]:
            assert request.all("content-encoding") == []
            # Envoy sends the body of a stream in chunks.
            assert request.all("content-length") in ([], [str(len(request.body))])


@pytest.mark.parametrize("mode", ["duplex", "held"])
def test_the_picker_refuses_what_cannot_be_decoded(site: Site, mode: str) -> None:
    asked = len(site.engine.asked)
    raw = COMPRESS["gzip"](b'{"model": "m", "prompt": [1]}')
    for coding, body, status, code in (
        ("br", raw, 415, "unsupported_content_encoding"),
        ("gzip, gzip", raw, 415, "unsupported_content_encoding"),
        ("gzip", raw[:-1], 400, "malformed_encoding"),
        ("zstd", raw, 400, "malformed_encoding"),
        ("zstd", bomb("zstd", 100 * MAX_BODY_BYTES), 413, "body_too_large"),
    ):
        answer = exchange(site.ports[mode], "POST", COMPLETIONS, body, {"content-encoding": coding})
        assert (answer.status, answer.json()["error"]["code"]) == (status, code)
        assert (answer.headers.get("accept-encoding") == "gzip, zstd, identity") == (status == 415)
    assert len(site.engine.asked) == asked
