# SPDX-License-Identifier: Apache-2.0
"""Differences between engines, chosen per worker: SGLang's stock stream beside vLLM's."""

from __future__ import annotations

import ast
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvrouter.contract.registrations import RegisterBody
from kvrouter.events.vllm.codec import BatchDecoder
from kvrouter.events.vllm.messages import BlockStored
from kvrouter.router.base.common.errors import BadQuestion, SettingError
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.ingest.residency import Residency
from kvrouter.router.index.ingest.worker_profile import WorkerProfile
from kvrouter.router.model.engines.engine import NotThisEngine
from kvrouter.router.model.engines.known import ENGINES, engine_named
from kvrouter.router.model.engines.sglang.server_info import streams_in
from kvrouter.router.model.kvcache.block_hash import HashScheme
from kvrouter.router.model.kvcache.page_hash import page_chain
from kvrouter.router.model.kvcache.scheme_verification import HashIdentity, SchemeState
from kvrouter.router.model.workers.engine_answers import Stream
from kvrouter.router.model.workers.engine_name import ENGINE_NAMES
from kvrouter.router.model.workers.listed_worker import listed_worker
from kvrouter.router.model.workers.registration import CatalogSpec, GroupSpec, Registration
from kvrouter.router.model.workers.registration_from_body import registration_of
from kvrouter.router.route.tokens.client_body import MESSAGES_PATH, read_client_body
from kvrouter.router.route.tokens.engine.wire import RenderQuirks, tokenize_body
from kvrouter.router.route.tokens.proxied_paths import AUDIO, INFERENCE_PATHS
from kvrouter.router.route.tokens.thinking import ThinkingSwitch
from kvrouter.router.route.tokens.token_request import TokenRequest, read

PAGE_TOKENS = 4
FULL_ALONE = CatalogSpec(groups=(GroupSpec(None, "full_attention", PAGE_TOKENS),))


def profile(engine: str | None, catalog: CatalogSpec | None = None) -> WorkerProfile:
    worker = Registration(WorkerKey("m", "w"), events="tcp://10.0.0.2:5557", engine=engine, catalog=catalog)
    return WorkerProfile(worker, None)


def stored(algo: str, salt: str | None) -> BlockStored:
    """Return the decoded event of a prompt's first page, as SGLang's stock stream has it."""
    ids = np.arange(PAGE_TOKENS + 1)
    lookahead = algo == "sglang_bigram"
    hashes, _ = page_chain(algo, None, ids if lookahead else ids[:-1], PAGE_TOKENS, salt, None)
    signed = int(hashes.astype(np.int64)[0])
    tokens = [(i, i + 1) for i in range(PAGE_TOKENS)] if lookahead else list(range(PAGE_TOKENS))
    event: dict[str, object] = {
        "type": "BlockStored",
        "block_hashes": [signed],
        "parent_block_hash": None,
        "token_ids": tokens,
    }
    event |= {"block_size": PAGE_TOKENS, "lora_id": None, "medium": "GPU", "cache_salt": salt}
    payload = msgspec.msgpack.encode([1.0, [event], 0])
    (decoded,) = BatchDecoder().decode(payload, with_tokens=True).events
    assert isinstance(decoded, BlockStored)
    return decoded


def test_every_engine_has_a_folder_and_a_name() -> None:
    root = Path(__file__).parents[2] / "router" / "model" / "engines"
    folders = {path.parent.name for path in root.glob("*/description.py")}
    assert folders == set(ENGINE_NAMES) == set(ENGINES)
    assert all(engine.name == name for name, engine in ENGINES.items())
    assert engine_named(None) is engine_named("vllm") is engine_named("of a later router")


@pytest.mark.parametrize("algo", ["sglang", "sglang_bigram"])
@pytest.mark.parametrize("salt", [None, "salt"])
def test_a_page_of_the_stock_stream_verifies_the_scheme(algo: str, salt: str | None) -> None:
    spec = ENGINES["sglang"].completed(CatalogSpec(hash_algo=algo))
    identity = HashIdentity(spec, ENGINES["sglang"].schemes(spec, None))
    identity.judge(stored(algo, salt))
    assert identity.standing is SchemeState.VERIFIED
    assert identity.scheme == HashScheme(algo, b"")


@pytest.mark.parametrize("stated", [None, "sglang", "sglang_bigram"])
@pytest.mark.parametrize(("algo", "lookahead_tokens"), [("sglang", 0), ("sglang_bigram", 1)])
def test_the_first_page_shows_whether_pages_are_of_bigrams(
    stated: str | None, algo: str, lookahead_tokens: int
) -> None:
    worker = profile("sglang", msgspec.structs.replace(FULL_ALONE, hash_algo=stated))
    worker.identity.judge(stored(algo, None))
    assert worker.identity.standing is SchemeState.VERIFIED
    assert worker.identity.scheme == HashScheme(algo, b"")
    assert worker.catalog.lookahead_tokens == lookahead_tokens


@pytest.mark.parametrize(
    ("engine", "advice"), [("vllm", "PYTHONHASHSEED"), ("sglang", "bigrams (EAGLE) were both tried")]
)
def test_hashes_that_nothing_explains_are_answered_with_the_advice_of_their_engine(engine: str, advice: str) -> None:
    worker = profile(engine, FULL_ALONE)
    worker.identity.judge(msgspec.structs.replace(stored("sglang", None), block_hashes=np.array([1], np.uint64)))
    assert worker.identity.standing is SchemeState.UNEXPLAINED
    worker.contact.linked = True
    assert advice in worker.reason(Residency())


def test_stock_events_earn_nothing_unless_full_attention_alone_is_stated() -> None:
    unknown = profile("sglang")
    unknown.learner.stored(stored("sglang", None))
    assert "load the engine patch" in (unknown.catalog.problem or "")
    hybrid = CatalogSpec(groups=(*FULL_ALONE.groups, GroupSpec(1, "mamba", PAGE_TOKENS)))
    assert "load the engine patch" in (profile("sglang", hybrid).catalog.problem or "")
    alone = profile("sglang", FULL_ALONE).catalog
    assert alone.problem is None and alone.whole_windows and alone.offload.connector == "HiCache"
    assert profile(None, FULL_ALONE).catalog.offload.connector is None


@pytest.mark.parametrize("engine", [None, *ENGINE_NAMES])
@pytest.mark.parametrize("algo", [None, "sha256", "xxhash", "sglang", "sglang_bigram"])
@pytest.mark.parametrize("seed", [None, "0"])
def test_no_stated_algorithm_breaks_any_engine(engine: str | None, algo: str | None, seed: str | None) -> None:
    worker = Registration(WorkerKey("m", "w"), engine=engine, catalog=CatalogSpec(hash_algo=algo))
    assert WorkerProfile(worker, seed).identity.scheme.algo


def test_an_engine_is_named_by_spec_and_body() -> None:
    assert listed_worker("w0=http://10.0.0.2:30000,engine=sglang").registration.engine == "sglang"
    assert listed_worker("w0=http://10.0.0.2:30000").registration.engine is None
    with pytest.raises(SettingError, match="engine must be one of vllm, sglang"):
        listed_worker("w0=http://10.0.0.2:30000,engine=trtllm")
    body = RegisterBody(worker_id="w0", model="m", url="http://10.0.0.2:30000", engine="sglang")
    assert registration_of(body).engine == "sglang"
    with pytest.raises(BadQuestion, match="engine must be one of"):
        registration_of(msgspec.structs.replace(body, engine="trtllm"))


def test_server_info_names_a_stream_a_rank() -> None:
    info: dict[str, dict[str, object]] = {
        "kv_events": {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "dp_size": 2}
    }
    info["kv_events"]["replay_endpoint_port_base"] = 5600
    answers = streams_in(msgspec.json.encode(info), "http://10.0.0.2:30000")
    assert answers.streams == {
        0: Stream("tcp://10.0.0.2:5557", "tcp://10.0.0.2:5600"),
        1: Stream("tcp://10.0.0.2:5558", "tcp://10.0.0.2:5601"),
    }
    silent = streams_in(b'{"kv_events": null, "disable_radix_cache": false}', "http://10.0.0.2:30000")
    assert silent.streams == {} and "--kv-events-config" in silent.problem
    with pytest.raises(ValueError, match="/server_info cannot be read"):
        streams_in(b"[]", "http://10.0.0.2:30000")


def test_vllms_own_server_info_is_not_sglangs() -> None:
    """Reject vLLM's own answer: vLLM has a path of that name, too, in its development mode."""
    with pytest.raises(NotThisEngine):
        streams_in(b'{"vllm_config": "model=..."}', "http://10.0.0.2:30000")


ROUTER = Path(__file__).parents[2] / "router"


def names_compared(tree: ast.AST) -> list[int]:
    """Return the lines that decide by an engine's name: comparisons, cases and look-ups with a name."""
    lines = []
    for node in ast.walk(tree):
        parts: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            parts = [node.value]
        elif isinstance(node, ast.Subscript):
            parts = [node.slice]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            parts = list(node.args) if node.func.attr in ("get", "startswith", "endswith") else []
        constants = [child for part in parts for child in ast.walk(part) if isinstance(child, ast.Constant)]
        if any(constant.value in ENGINE_NAMES for constant in constants):
            lines.append(node.lineno)  # type: ignore[attr-defined]
    return lines


def test_no_room_outside_decides_by_an_engines_name() -> None:
    uses = []
    for path in sorted(ROUTER.rglob("*.py")):
        if path.is_relative_to(ROUTER / "model" / "engines"):
            continue
        uses += [f"{path.relative_to(ROUTER)}:{line}" for line in names_compared(ast.parse(path.read_text()))]
    assert not uses, "ask the engine's description (router/model/engines/engine.py) instead"


@pytest.mark.parametrize(
    "code", ["if engine == 'sglang': pass", "x = {'vllm': 1}[e] if e in ('vllm', 'b') else 0", "table['sglang']"]
)
def test_the_check_finds_a_comparison_with_an_engine_name(code: str) -> None:
    assert names_compared(ast.parse(code))


def test_no_room_outside_imports_one_engine() -> None:
    found = []
    for path in sorted(ROUTER.rglob("*.py")):
        if path.is_relative_to(ROUTER / "model" / "engines"):
            continue
        for name in ENGINE_NAMES:
            if f"router.model.engines.{name}" in path.read_text():
                found.append(str(path.relative_to(ROUTER)))
    assert not found


def test_tokenize_is_given_what_the_real_endpoint_reads() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": False, "documents": [{"a": "b"}]}
    request = TokenRequest("chat", {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in body.items()})
    bodies = {
        name: msgspec.json.decode(tokenize_body(request, RenderQuirks(), ENGINES[name].tokens)) for name in ENGINES
    }
    assert bodies["vllm"]["add_generation_prompt"] is False
    assert bodies["vllm"]["chat_template_kwargs"] == {"documents": [{"a": "b"}]}
    # SGLang's chats do not know `add_generation_prompt`, but its /tokenize does, so the router leaves it out.
    assert bodies["sglang"] == {name: body[name] for name in ("messages", "documents")}


def test_each_engine_gets_the_chat_that_it_makes_of_a_message_itself() -> None:
    """Claude Code's attribution is dropped by vLLM and kept by SGLang, and they join a system prompt's texts differently."""
    texts = ["x-anthropic-billing-header: cch=1;", "You are brief.", "Be kind."]
    body = {
        "system": [{"type": "text", "text": text} for text in texts],
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"name": "weather", "input_schema": {"type": "object"}}],
        "thinking": {"type": "adaptive"},
        "chat_template_kwargs": {"date": "today"},
    }
    request = read(MESSAGES_PATH, read_client_body(MESSAGES_PATH, msgspec.json.encode(body)))
    assert isinstance(request, TokenRequest)
    quirks = RenderQuirks(switch=ThinkingSwitch(("enable_thinking",)))
    chats = {name: msgspec.json.decode(tokenize_body(request, quirks, ENGINES[name].tokens)) for name in ENGINES}
    systems = {name: chat["messages"][0]["content"] for name, chat in chats.items()}
    assert systems == {"vllm": "".join(texts[1:]), "sglang": "\n".join(texts)}
    functions = {name: chat["tools"][0]["function"] for name, chat in chats.items()}
    function = {"name": "weather", "description": None, "parameters": {"type": "object"}}
    assert functions == {"vllm": function, "sglang": function | {"description": "", "strict": False}}
    arguments = {name: chat["chat_template_kwargs"] for name, chat in chats.items()}
    assert arguments == {"vllm": {"date": "today"}, "sglang": {"enable_thinking": True}}


def test_engines_name_the_paths_at_which_they_apply_a_cache_salt() -> None:
    assert ENGINES["sglang"].salted_paths - {"/generate"} < ENGINES["vllm"].salted_paths
    # These are none of vLLM's paths: forms, SGLang's own, and the one of vLLM-Omni.
    assert INFERENCE_PATHS - ENGINES["vllm"].salted_paths == AUDIO | {"/generate", "/v1/audio/speech"}


@pytest.mark.parametrize(
    ("fields", "vllm", "sglang"),
    [
        ({}, False, False),
        ({"echo": True}, False, False),
        ({"logprobs": 1}, False, False),
        ({"echo": True, "logprobs": 1}, True, True),
        # vLLM takes 0 as a request for logprobs, and SGLang does not.
        ({"echo": True, "logprobs": 0}, True, False),
        ({"prompt_logprobs": 0}, True, False),
    ],
)
def test_some_requests_have_the_whole_prompt_computed(fields: dict[str, object], vllm: bool, sglang: bool) -> None:
    assert (ENGINES["vllm"].skips_cache(fields), ENGINES["sglang"].skips_cache(fields)) == (vllm, sglang)


@pytest.mark.parametrize(
    ("answer", "front_end"),
    [
        (b'{"version":"0.33.0","rust_frontend_version":"0.33.0"}', "vLLM's Rust front end 0.33.0"),
        (b'{"version":"0.33.0"}', ""),
        (b'{"rust_frontend_version":7}', ""),
        (b"", ""),
        (b"[" * 100_000, ""),
    ],
)
def test_vllms_front_end_in_rust_names_itself(answer: bytes, front_end: str) -> None:
    assert ENGINES["vllm"].tokens.front_end_in(answer) == front_end
    assert ENGINES["sglang"].tokens.front_end_in(answer) == ""
