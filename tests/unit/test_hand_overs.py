# SPDX-License-Identifier: Apache-2.0
"""Hand-overs as the router begins them: who takes over, which share, and what engines answer over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvrouter.engine_patch.offload.peer.peer_access import PeerAccess
from kvrouter.events.patch.messages import PeerAddress
from kvrouter.events.transport.curve import read_secret
from kvrouter.router.app.core.hand_overs import NO_PEER, HandOvers
from kvrouter.router.base.common.errors import Conflict, UnknownWorker
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.model.workers.stream_state import StreamState
from tests.support.peer_keys import PeerKeys
from tests.support.ports import free_port
from tests.support.receiving_engine import HOST, ReceivingEngine

NUMBER = 42
WITHIN_S = 30.0


class TinyRegistry:
    """The workers, as far as hand-overs read them."""

    def __init__(self) -> None:
        self.followers: dict[WorkerKey, Any] = {}
        self.draining: set[WorkerKey] = set()

    def add(
        self,
        worker_id: str,
        port: int | None,
        exchange: str = "kind",
        resets: int = 0,
        state: StreamState = StreamState.LIVE,
        key: str = "",
    ) -> WorkerKey:
        worker = WorkerKey("m", worker_id)
        peer = None if port is None else PeerAddress(HOST, port, exchange, resets, key=key)
        self.followers[worker] = SimpleNamespace(state=SimpleNamespace(view=SimpleNamespace(peer=peer, state=state)))
        return worker

    def drains(self, worker: WorkerKey) -> bool:
        return worker in self.draining

    def given_id(self, worker: WorkerKey) -> str:
        return worker.worker_id


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def registry() -> TinyRegistry:
    return TinyRegistry()


@pytest.fixture
def hand_overs(registry: TinyRegistry) -> HandOvers:
    return HandOvers(registry, None, lambda: NUMBER)  # type: ignore[arg-type]


async def until_over(hand_overs: HandOvers) -> list[Any]:
    while True:
        parts = await hand_overs.progress(NUMBER)
        if parts and all(part.end for part in parts):
            return sorted(parts, key=lambda part: str(part.worker_id))
        await asyncio.sleep(0.001)


async def test_every_neighbour_takes_a_share_of_the_worker(
    stack: ExitStack, registry: TinyRegistry, hand_overs: HandOvers
) -> None:
    engines = [ReceivingEngine(stack) for _ in range(3)]
    for number, engine in enumerate(engines):
        registry.add(f"w{number}", engine.port)
    engines[0].store(1, 2, 3)
    engines[0].store(11, 12, 13)
    number, parts = await hand_overs.begin("w0", None, None, None, 1 << 20, WITHIN_S)
    assert number == NUMBER
    assert {part.worker_id for part in parts} == {"w1", "w2"} and not any(part.problem for part in parts)
    parts = await until_over(hand_overs)
    assert [(part.worker_id, part.end, part.fetched) for part in parts] == [
        ("w1", "complete", 3),
        ("w2", "complete", 3),
    ]
    taken = [engine.held() for engine in engines[1:]]
    assert taken[0] | taken[1] == engines[0].held() and not taken[0] & taken[1]


async def test_named_workers_alone_take_over(stack: ExitStack, registry: TinyRegistry, hand_overs: HandOvers) -> None:
    engines = [ReceivingEngine(stack) for _ in range(3)]
    for number, engine in enumerate(engines):
        registry.add(f"w{number}", engine.port)
    engines[0].store(1, 2, 3)
    await hand_overs.begin("w0", None, None, ["w2"], 1 << 20, WITHIN_S)
    (part,) = await until_over(hand_overs)
    assert (part.worker_id, part.fetched) == ("w2", 3)


async def test_a_neighbour_that_does_not_answer_gets_no_share(
    stack: ExitStack, registry: TinyRegistry, hand_overs: HandOvers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrouter.router.app.core.hand_overs.ANSWER_TIMEOUT_S", 0.5)
    engines = [ReceivingEngine(stack) for _ in range(2)]
    for number, engine in enumerate(engines):
        registry.add(f"w{number}", engine.port)
    registry.add("w2", free_port())
    engines[0].store(1, 2, 3)
    engines[0].store(11, 12, 13)
    _, parts = await hand_overs.begin("w0", None, None, None, 1 << 20, WITHIN_S)
    by_name = {part.worker_id: part for part in parts}
    assert by_name["w2"].end == "unreachable" and "curve_client_key" in by_name["w2"].problem
    (part,) = await until_over(hand_overs)
    assert (part.worker_id, part.fetched) == ("w1", 6)


@pytest.mark.parametrize("is_listed", [True, False])
async def test_engines_with_keys_take_messages_of_a_router_that_they_list_alone(
    is_listed: bool, stack: ExitStack, registry: TinyRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, ports = PeerKeys(tmp_path), [free_port(), free_port()]
    files, publics = zip(*(keys.make(f"engine {port}") for port in ports), strict=True)
    for public, port in zip(publics, ports, strict=True):
        keys.admit(public, f"{HOST}:{port}")
    router_file, router_public = keys.make("router")
    if is_listed:
        keys.admit(router_public, f"{HOST}:1")
    engines = [
        ReceivingEngine(stack, PeerAccess(HOST, file, str(keys.list_file)), port)
        for file, port in zip(files, ports, strict=True)
    ]
    for number, (port, public) in enumerate(zip(ports, publics, strict=True)):
        registry.add(f"w{number}", port, key=public)
    engines[0].store(1, 2, 3)
    hand_overs = HandOvers(registry, read_secret(router_file), lambda: NUMBER)  # type: ignore[arg-type]
    if is_listed:
        await hand_overs.begin("w0", None, None, None, 1 << 20, WITHIN_S)
        (part,) = await until_over(hand_overs)
        assert (part.worker_id, part.end, part.fetched) == ("w1", "complete", 3)
        assert engines[1].held() == engines[0].held()
    else:
        monkeypatch.setattr("kvrouter.router.app.core.hand_overs.ANSWER_TIMEOUT_S", 0.5)
        with pytest.raises(Conflict, match=r"curve_client_key\) in peer_list_file"):
            await hand_overs.begin("w0", None, None, None, 1 << 20, WITHIN_S)
        assert not engines[1].held()


async def test_a_second_hand_over_to_a_busy_engine_says_so(
    stack: ExitStack, registry: TinyRegistry, hand_overs: HandOvers
) -> None:
    engine = ReceivingEngine(stack)
    registry.add("w0", free_port())
    registry.add("w1", engine.port)
    await hand_overs.begin("w0", None, None, None, 1 << 20, WITHIN_S)
    hand_overs._new_number = lambda: NUMBER + 1
    _, (part,) = await hand_overs.begin("w0", None, None, None, 1 << 20, WITHIN_S)
    assert part.end == "busy" and "another hand-over" in part.problem
    (stopped,) = await hand_overs.stop(NUMBER)
    assert stopped.end == "stopped"


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"port": None}, "peer_port"),
        ({"port": 1, "exchange": "other"}, "hash seed"),
        ({"port": 1, "resets": 2}, "reset 2 times"),
        ({"port": 1, "state": StreamState.DOWN}, "w1 is down"),
    ],
)
async def test_workers_that_cannot_take_over_are_named_with_the_reason(
    registry: TinyRegistry, hand_overs: HandOvers, facts: dict[str, Any], words: str
) -> None:
    registry.add("w0", 1)
    registry.add("w1", **facts)
    with pytest.raises(Conflict, match=words):
        await hand_overs.begin("w0", None, None, None, 1, WITHIN_S)


async def test_a_worker_that_lends_nothing_or_is_alone_or_unknown_hands_nothing_over(
    registry: TinyRegistry, hand_overs: HandOvers
) -> None:
    with pytest.raises(UnknownWorker, match="w0"):
        await hand_overs.begin("w0", None, None, None, 1, WITHIN_S)
    registry.add("w0", 1)
    with pytest.raises(Conflict, match="only worker"):
        await hand_overs.begin("w0", None, None, None, 1, WITHIN_S)
    with pytest.raises(Conflict, match="w9 is not registered"):
        await hand_overs.begin("w0", None, None, ["w9"], 1, WITHIN_S)
    registry.draining.add(registry.add("w1", 1))
    with pytest.raises(Conflict, match="w1 drains"):
        await hand_overs.begin("w0", None, None, None, 1, WITHIN_S)
    registry.add("w2", None)
    with pytest.raises(Conflict, match="w2 lends no blocks"):
        await hand_overs.begin("w2", None, None, None, 1, WITHIN_S)


async def test_an_engine_with_vllms_own_p2p_tier_takes_part_in_no_hand_over(
    stack: ExitStack, registry: TinyRegistry, hand_overs: HandOvers
) -> None:
    for name in ("w0", "w1"):
        registry.add(name, free_port(), exchange="vllm-p2p:1")
    with pytest.raises(Conflict, match=NO_PEER):
        await hand_overs.begin("w0", None, None, None, 1 << 20, WITHIN_S)
