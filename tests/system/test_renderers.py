# SPDX-License-Identifier: Apache-2.0
"""`kvrouter serve --renderer`: the tokens of an engine behind vLLM's front end in Rust come from a renderer beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvrouter.simulator.cache import tokenizer
from kvrouter.simulator.cache.shapes import make_geometry
from kvrouter.simulator.http.engine_flags import EngineFlags
from kvrouter.simulator.http.server import ReplicaServer, ServerThread
from tests.support.clinic import Clinic
from tests.support.exchange import run_cli
from tests.support.fleet import until
from tests.support.router_process import RouterProcess
from tests.support.scripted_engine import Asked, ScriptedEngine, Wire, plain

MODEL = "rust"
POOL_BLOCKS = 2_000
# Some blocks of the replica's shape.
TEXT = "The cache of an engine keeps what it computed. " * 60


async def render(asked: Asked, wire: Wire) -> None:
    """Answer as a renderer with the replicas' tokenizer and template."""
    body = json.loads(asked.body)
    if asked.target == "/v1/completions/render":
        await plain(json.dumps([{"token_ids": tokenizer.encode(body["prompt"])}]).encode())(asked, wire)
    elif asked.target == "/v1/chat/completions/render":
        names = ("add_generation_prompt", "continue_final_message")
        arguments = {name: body[name] for name in names if name in body}
        text = tokenizer.render_chat(body["messages"], tools=body.get("tools"), **arguments)
        await plain(json.dumps({"token_ids": tokenizer.encode(text)}).encode())(asked, wire)
    else:
        await plain(b'{"detail": "Not Found"}', "404 Not Found")(asked, wire)


async def render_otherwise(asked: Asked, wire: Wire) -> None:
    """Answer as a renderer with another template."""
    ids: Any = {"token_ids": [1, 2, 3]}
    await plain(json.dumps([ids] if asked.target == "/v1/completions/render" else ids).encode())(asked, wire)


@pytest.fixture(scope="module")
def replica() -> Iterator[ReplicaServer]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    flags = EngineFlags(rust_front_end=True)
    server = ReplicaServer(make_geometry("gemma3"), POOL_BLOCKS, context=context, model=MODEL, flags=flags)
    thread = ServerThread([server])
    thread.start()
    yield server
    thread.stop()
    context.destroy(linger=0)


@pytest.fixture(scope="module")
def renderer() -> Iterator[ScriptedEngine]:
    with ScriptedEngine(render) as scripted:
        yield scripted


@pytest.fixture(scope="module")
def clinic(
    replica: ReplicaServer, renderer: ScriptedEngine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Clinic]:
    ends = replica.endpoints
    spec = f"w0={ends['url']},events={ends['events']},replay={ends['replay']},model={MODEL}"
    # With this timeout, no text is late on a busy machine.
    flags = ["--worker", spec, "--renderer", f"{MODEL}={renderer.url}", "--tokenize-timeout-s", "60"]
    with RouterProcess(tmp_path_factory.mktemp("router"), flags) as router:
        yield Clinic(router)


def verified(clinic: Clinic) -> None:
    clinic.router.wait_row(
        "w0", lambda row: row["tokens"]["way"] == "render" and not row["tokens"]["problem"], "verified"
    )


def asked_for(renderer: ScriptedEngine, text: str) -> bool:
    return any(text in asked.body.decode() for asked in renderer.asked)


def test_texts_are_placed_by_the_renderers_tokens(clinic: Clinic, renderer: ScriptedEngine) -> None:
    # It is verified before any text comes.
    verified(clinic)
    router = clinic.router
    for _ in range(2):
        answer = router.request("POST", "/v1/completions", {"model": MODEL, "prompt": TEXT, "max_tokens": 1})
        reused = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        router.wait_row("w0", lambda row: sum(row["residency"].values()) > 0, "its blocks are known")
    assert reused > 0 and asked_for(renderer, TEXT)
    router.wait_row("w0", lambda row: row["reuse"]["answers"] == 2, "answered")
    reuse = router.worker("w0")["reuse"]
    assert reuse["predicted_tokens"] == reuse["delivered_tokens"] == reused
    assert router.metric("kvrouter_prompts_total", source="render") == 2
    selection = router.request("POST", "/select", {"model": MODEL, "messages": [{"role": "user", "content": TEXT}]})
    assert selection["tokens"]["source"] == "render"
    # It is no worker, and nothing asks it for health, events or load.
    assert [row["worker_id"] for row in router.request("GET", "/workers")["workers"]] == ["w0"]
    assert not renderer.looked


def test_kv410_names_a_renderer_that_is_away_until_it_is_verified_again(
    clinic: Clinic, renderer: ScriptedEngine
) -> None:
    verified(clinic)
    renderer.script = plain(b"{}", "503 Service Unavailable")
    finding = clinic.find("KV410", f"model {MODEL} at {renderer.url}")
    assert "answers 503" in finding.evidence and "vllm launch render" in finding.fix
    health = clinic.router.request("GET", "/health")
    assert health["status"] == "degraded" and f"renderer {renderer.url}" in str(health["reasons"])
    assert "answers 503" in clinic.router.worker("w0")["tokens"]["problem"]
    until(lambda: clinic.router.metric("kvrouter_renderers_unusable") == 1, "counted")
    # The replica's /tokenize takes its place.
    selection = clinic.router.request("POST", "/select", {"model": MODEL, "prompt": "while it is away"})
    assert selection["tokens"]["source"] == "tokenize"
    renderer.script = render
    clinic.wait_gone("KV410")
    verified(clinic)
    until(lambda: clinic.router.metric("kvrouter_renderers_unusable") == 0, "counted")


def test_kv410_names_a_renderer_that_makes_other_tokens(clinic: Clinic, renderer: ScriptedEngine) -> None:
    verified(clinic)
    renderer.script = render_otherwise
    evidence = clinic.find("KV410").evidence
    assert "makes other tokens of a chat than the engine" in evidence
    clinic.router.request("POST", "/select", {"model": MODEL, "prompt": "while it differs"})
    assert not asked_for(renderer, "while it differs")
    renderer.script = render
    clinic.wait_gone("KV410")


def test_kv408_lists_only_what_the_renderer_lacks(clinic: Clinic) -> None:
    verified(clinic)
    finding = clinic.find("KV408", f"model {MODEL}")
    assert "each request to /v1/responses" in finding.evidence
    assert "chat" not in finding.evidence.partition("placed by load")[2] and "--renderer MODEL=URL" in finding.fix


def test_a_renderer_that_may_not_be_reached_ends_the_start(tmp_path: Path) -> None:
    flags = ["--allow-host", "10.0.0.0/8", "--renderer", "m=http://127.0.0.1:1"]
    done = run_cli("serve", "--data-dir", str(tmp_path), "--port", "0", *flags)
    assert done.returncode == 2 and "--renderer m: 127.0.0.1 is not in the router's setting allow_hosts" in done.stderr


def test_a_draining_engine_is_not_queried_for_tokens_while_another_is_there(clinic: Clinic) -> None:
    with ScriptedEngine(render) as one, ScriptedEngine(render) as two:
        fields = {"model": "drained"}
        with clinic.worker("d0", url=one.url, **fields), clinic.worker("d1", url=two.url, **fields):
            router = clinic.router
            router.request("POST", "/select", {"model": "drained", "prompt": "a text"})
            for worker_id in ("d0", "d1"):
                router.wait_row(worker_id, lambda row: row["tokens"]["way"] == "render", "verified")
            router.request("PATCH", "/workers/d0", {"state": "draining"})
            for number in range(12):
                selection = router.request("POST", "/select", {"model": "drained", "prompt": f"text {number}"})
                assert selection["tokens"]["source"] == "render"
            assert not asked_for(one, "text 1") and asked_for(two, "text 11")
