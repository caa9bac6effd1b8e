# SPDX-License-Identifier: Apache-2.0
"""Engines that want an API key which the router does not have are named at once, with the flag that gives it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from kvrouter.router.route.tokens.unknown_prompts import COUNTED_MIN
from tests.support.clinic import Clinic
from tests.support.engine_http import EngineHttp
from tests.support.fleet import until
from tests.support.router_process import RouterError, RouterProcess
from tests.support.scripted_engine import Asked, ScriptedEngine, Wire, plain

KEY = "Bearer sesame"
MODELS = plain(json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}).encode())
# The answer of vLLM's AuthenticationMiddleware below /v1.
REFUSAL = plain(b'{"error":"Unauthorized"}', "401 Unauthorized")
FLAG = "--worker-api-key"


async def guarded(asked: Asked, wire: Wire) -> None:
    await (plain(b"{}") if KEY in asked.all("authorization") else REFUSAL)(asked, wire)


async def guarded_models(asked: Asked, wire: Wire) -> None:
    await (MODELS if KEY in asked.all("authorization") else REFUSAL)(asked, wire)


@pytest.fixture(scope="module")
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine(guarded) as scripted:
        scripted.pages["/v1/models"] = guarded_models
        yield scripted


@pytest.fixture(scope="module")
def clinic(tmp_path_factory: pytest.TempPathFactory, engine: ScriptedEngine) -> Iterator[Clinic]:
    """Start a router that knows two engines by their addresses alone.

    The address of the second engine has the wrong scheme.
    """
    plain_http = EngineHttp()
    workers = ["--worker", f"keyed={engine.url}", "--worker", f"tls={plain_http.url.replace('http:', 'https:')}"]
    with RouterProcess(tmp_path_factory.mktemp("router"), workers) as router:
        yield Clinic(router)
    plain_http.stop()


def test_an_engine_with_a_key_is_named_before_any_prompt(clinic: Clinic, engine: ScriptedEngine) -> None:
    with clinic.worker("given", url=engine.url) as subject:
        finding = clinic.find("KV109", subject)
        assert "/v1/models answers 401" in finding.evidence and FLAG in finding.fix
        health = clinic.router.request("GET", "/health")
        assert health["status"] == "degraded" and FLAG in str(health["reasons"])
        assert FLAG in clinic.router.worker("given")["reason"]
        assert clinic.router.metric("kvrouter_worker_refusing_engines", worker="given") == 1


def test_texts_without_tokens_are_named_with_their_reason(clinic: Clinic, engine: ScriptedEngine) -> None:
    with clinic.worker("texts", "texts", url=engine.url):
        for _ in range(COUNTED_MIN):
            assert "KV406" not in clinic.codes()
            with pytest.raises(RouterError, match="401"):
                clinic.router.request(
                    "POST", "/v1/completions", {"model": "texts", "prompt": "a text", "max_tokens": 1}
                )
        finding = clinic.find("KV406", "model texts")
        assert f"{COUNTED_MIN} of the last {COUNTED_MIN} text prompts had no tokens" in finding.evidence
        assert "(unauthorized)" in finding.evidence and FLAG in finding.fix
        assert "had no tokens" in str(clinic.router.request("GET", "/health"))


def test_a_listed_worker_says_what_keeps_it_from_being_registered(clinic: Clinic) -> None:
    def says(name: str, evidence: str) -> bool:
        return evidence in clinic.find("KV104", f"worker {name}").evidence

    for name, evidence, fix in (("keyed", "answers 401", FLAG), ("tls", "does not speak TLS", "write http://")):
        # On a busy machine, the engine may not have answered yet.
        until(partial(says, name, evidence), evidence)
        assert fix in clinic.find("KV104", f"worker {name}").fix


def test_with_the_key_nothing_is_wrong(tmp_path: Path, engine: ScriptedEngine) -> None:
    flags = ["--worker", f"keyed={engine.url}", FLAG, KEY.removeprefix("Bearer ")]
    with RouterProcess(tmp_path, flags) as router:
        router.wait_row("keyed", lambda row: row["model"] == "m", "registered")
        clinic = Clinic(router)
        clinic.find("KV201", "worker keyed")
        assert not {"KV104", "KV109"} & set(clinic.codes())
