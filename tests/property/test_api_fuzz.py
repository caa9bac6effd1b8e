# SPDX-License-Identifier: Apache-2.0
"""Random, truncated and mutated bodies get an answer or a well-formed error; no body makes the API fail."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.model.workers.registration import Registration
from tests.contract.api_support import TinyCore, ask_app, build, hit
from tests.support.examples import examples

GROUP = {"group_idx": 0, "kind": "sliding_window", "block_size": 16, "sliding_window": 128, "eagle": True}
CATALOG = {
    "groups": [GROUP],
    "hash_block_size": 16,
    "hash_algo": "sha256",
    "none_hash": "ab" * 32,
    "lora_paths": {"a": "b"},
}
REGISTER = {
    "worker_id": "w1",
    "model": "m",
    "endpoint": "tcp://h:5557",
    "replay_endpoint": "tcp://h:5558",
    "url": "http://h:8000",
    "dp_rank": 1,
    "block_size": 16,
    "catalog": CATALOG,
}
ASKED = {"model": "m", "lora_name": "a", "cache_salt": "s", "workers": ["w0", 1], "explain": True}
CHOOSING = {**ASKED, "workers": ["w0"]}
# Every endpoint that takes a body, with a body that it accepts.
ENDPOINTS: dict[tuple[str, str], dict[str, Any]] = {
    ("POST", "/query"): {**ASKED, "token_ids": [1, 2, 3]},
    ("POST", "/query_by_hash"): {**ASKED, "block_hashes": [1, -1, "0xff", 2**64 - 1], "num_tokens": 70},
    ("POST", "/select"): {
        **CHOOSING,
        "token_ids": [1, 2],
        "session_id": "s",
        "max_tokens": 5,
        "exclude_workers": ["w9"],
    },
    ("POST", "/select_and_reserve"): {
        **CHOOSING,
        "block_hashes": [1, 2],
        "isl_tokens": 70,
        "expected_output_tokens": 9,
        "pinned_worker": {"worker_id": "w0", "dp_rank": 0},
    },
    ("POST", "/reservations"): {**CHOOSING, "worker_id": "w0", "token_ids": [1, 2], "session_id": "s", "max_tokens": 5},
    ("POST", "/register"): REGISTER,
    ("POST", "/workers"): REGISTER,
    ("POST", "/unregister"): {"instance_id": "w0", "dp_rank": 0},
    ("PATCH", "/workers/w0"): {"url": "http://h:1", "endpoint": None, "dp_rank": 0, "catalog": CATALOG},
}
# The bodies for each of 9 endpoints. In CI they are the same each time, so that more of them would find nothing new there.
EXAMPLES = examples(400)

NUMBERS = (0, -1, 2**31, 2**63, 2**64 - 1, 2**64, -(2**63), 10**400, 1e308)
TEXTS = ("", "\x00", "\ud800", "0x", "tcp://", "http://[", "w0")
SPECIAL = st.sampled_from([*NUMBERS, *TEXTS])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | SPECIAL
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)


def paths_of(value: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of the value and of everything inside it."""
    yield prefix
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from paths_of(inner, (*prefix, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return a copy of the value with `new` at the path."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(copy[path[0]], path[1:], new)
    return copy


def encoded(value: Any, msgpack: bool) -> bytes:
    if msgpack:
        # A value that MessagePack cannot express (a number over 64 bits, a lone surrogate) is sent as JSON, which is
        # not valid MessagePack.
        with contextlib.suppress(OverflowError, ValueError, msgspec.MsgspecError):
            return msgspec.msgpack.encode(value)
    return json.dumps(value).encode("utf-8", "surrogatepass")


@st.composite
def bodies(draw: st.DrawFn, good: dict[str, Any]) -> tuple[bytes, bool]:
    """Draw a body, and whether it is labelled as MessagePack."""
    msgpack = draw(st.booleans())
    how = draw(st.sampled_from(["good", "field", "extra", "random", "bytes", "cut", "flip", "insert"]))
    if how == "bytes":
        return draw(st.binary(max_size=64)), msgpack
    value: Any = good
    if how == "field":
        for _ in range(draw(st.integers(1, 3))):
            value = replaced(value, draw(st.sampled_from(list(paths_of(value))[1:] or [()])), draw(VALUES))
            if not isinstance(value, dict):
                break
    elif how == "extra":
        value = {**good, draw(st.text(max_size=8)): draw(VALUES)}
        value.pop(draw(st.sampled_from(sorted(good))))
    elif how == "random":
        value = draw(VALUES)
    raw = bytearray(encoded(value, msgpack))
    if how == "cut":
        raw = raw[: draw(st.integers(0, len(raw)))]
    elif how == "flip":
        for _ in range(draw(st.integers(1, 4))):
            raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    elif how == "insert":
        at = draw(st.integers(0, len(raw)))
        raw[at:at] = draw(st.binary(min_size=1, max_size=6))
    return bytes(raw), msgpack


def reset(core: TinyCore) -> None:
    """Restore the two workers that the good bodies name, whatever the previous example did to them."""
    core.asked.clear()
    core.registered.clear()
    for rank in (0, 1):
        worker = WorkerKey("m", "w0", rank)
        core.registered[worker] = Registration(worker, events="tcp://h:1", url="http://h:1")


@pytest.mark.property
@pytest.mark.parametrize(("method", "path"), list(ENDPOINTS))
def test_no_body_makes_the_api_fail(method: str, path: str) -> None:
    seen: Counter[int] = Counter()
    core = TinyCore([hit("w0", 16, 32, 48), hit("w0", 0, 0, 0, 1)])
    # The limit is high, so that bodies with a huge claimed length do not cause the next one to be refused.
    app, _ = build(core, saturation_tokens=2**40)

    @settings(max_examples=EXAMPLES, database=None, suppress_health_check=list(HealthCheck))
    @given(case=bodies(ENDPOINTS[method, path]), accept=st.sampled_from(["", "application/msgpack"]))
    def probe(case: tuple[bytes, bool], accept: str) -> None:
        body, msgpack = case
        headers = {"content-type": "application/msgpack" if msgpack else "application/json", "accept": accept}
        reset(core)
        answer = loop.run_until_complete(ask_app(app, method, path, body, headers))
        done = answer.status in (200, 201)
        seen[200 if done else answer.status] += 1
        if done:
            decode = msgspec.msgpack.decode if accept else msgspec.json.decode
            assert isinstance(decode(answer.body), dict)
        elif answer.status == 503:
            # The body excludes all workers.
            assert answer.error["code"] == "no_worker", answer.body
        else:
            assert answer.status in (400, 404, 409), (answer.status, answer.body)
            assert answer.error["type"] == "invalid_request_error"

    loop = asyncio.new_event_loop()
    try:
        probe()
    finally:
        loop.close()
    # Make sure that more than one kind of answer was probed.
    assert seen[200] >= EXAMPLES // 20, seen
    assert seen[400] >= EXAMPLES // 5, seen
