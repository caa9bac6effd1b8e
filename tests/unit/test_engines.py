# SPDX-License-Identifier: Apache-2.0
"""What differs from engine to engine, chosen per worker: SGLang's stock stream beside vLLM's."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvrouter.events.vllm.codec import BatchDecoder
from kvrouter.events.vllm.messages import BlockStored
from kvrouter.router.common.errors import BadQuestion, SettingError
from kvrouter.router.common.ids import WorkerKey
from kvrouter.router.engines.known import ENGINES, engine_named
from kvrouter.router.engines.sglang.server_info import streams_in
from kvrouter.router.ingest.worker_profile import WorkerProfile
from kvrouter.router.kvcache.block_hash import HashScheme
from kvrouter.router.kvcache.page_hash import page_chain
from kvrouter.router.kvcache.scheme_verification import HashIdentity, SchemeState
from kvrouter.router.workers.engine_answers import Stream
from kvrouter.router.workers.engine_name import ENGINE_NAMES
from kvrouter.router.workers.registration import CatalogSpec, GroupSpec, Registration
from kvrouter.router.workers.registration_bodies import RegisterBody
from kvrouter.router.workers.registration_from_body import registration_of
from kvrouter.router.workers.worker_spec import parse_worker

PAGE_TOKENS = 4
FULL_ALONE = CatalogSpec(groups=(GroupSpec(None, "full_attention", PAGE_TOKENS),))


def profile(engine: str | None, catalog: CatalogSpec | None = None) -> WorkerProfile:
    worker = Registration(WorkerKey("m", "w"), events="tcp://10.0.0.2:5557", engine=engine, catalog=catalog)
    return WorkerProfile(worker, None)


def stored(algo: str, salt: str | None) -> BlockStored:
    """As SGLang's stock stream has the first page of a prompt, decoded."""
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
    (found,) = BatchDecoder().decode(payload, with_tokens=True).events
    assert isinstance(found, BlockStored)
    return found


def test_every_engine_has_a_folder_and_a_name() -> None:
    root = Path(__file__).parents[2] / "router" / "engines"
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


def test_a_page_with_eagle_does_not_verify_without() -> None:
    spec = ENGINES["sglang"].completed(CatalogSpec())
    identity = HashIdentity(spec, ENGINES["sglang"].schemes(spec, None))
    identity.judge(stored("sglang_bigram", None))
    assert identity.standing is not SchemeState.VERIFIED


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
    assert parse_worker("w0=http://10.0.0.2:30000,engine=sglang").registration("m").engine == "sglang"
    assert parse_worker("w0=http://10.0.0.2:30000").registration("m").engine is None
    with pytest.raises(SettingError, match="engine must be one of vllm, sglang"):
        parse_worker("w0=http://10.0.0.2:30000,engine=trtllm")
    body = RegisterBody(worker_id="w0", model="m", url="http://10.0.0.2:30000", engine="sglang")
    assert registration_of(body).engine == "sglang"
    with pytest.raises(BadQuestion, match="engine must be one of"):
        registration_of(msgspec.structs.replace(body, engine="trtllm"))


def test_server_info_names_a_stream_a_rank() -> None:
    info: dict[str, dict[str, object]] = {
        "kv_events": {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "dp_size": 2}
    }
    info["kv_events"]["replay_endpoint_port_base"] = 5600
    told = streams_in(msgspec.json.encode(info), "http://10.0.0.2:30000")
    assert told.streams == {
        0: Stream("tcp://10.0.0.2:5557", "tcp://10.0.0.2:5600"),
        1: Stream("tcp://10.0.0.2:5558", "tcp://10.0.0.2:5601"),
    }
    silent = streams_in(b'{"kv_events": null}', "http://10.0.0.2:30000")
    assert silent.streams == {} and "--kv-events-config" in silent.problem
    with pytest.raises(ValueError, match="/server_info cannot be read"):
        streams_in(b"[]", "http://10.0.0.2:30000")
