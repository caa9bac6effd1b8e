# SPDX-License-Identifier: Apache-2.0
"""The address at which a worker's engine lends chunks, from the engine's declaration to the worker's view."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvrouter.events.patch.items import Declared
from kvrouter.events.patch.messages import DeclaredCatalog, DeclaredGroup, PeerAddress
from kvrouter.events.vllm.stream_items import Connected
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.follow.streams.peer_view import META_LENDING, PeerView, declared_peer_of
from kvrouter.router.follow.streams.worker_state import WorkerState
from kvrouter.router.index.store.commit import WorkerImage
from kvrouter.router.model.workers.lending_address import MAX_HOST_CHARS, lending_address
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.stream_state import StreamState
from tests.support.bare_services import bare_services
from tests.unit.test_report_ingest import live, restored, snapshot

DECLARED = PeerAddress("10.1.2.3", 6000, "e7c4", 2, 4096)
WORKER = WorkerKey("m", "w")


def changed(**fields: Any) -> PeerAddress:
    return msgspec.structs.replace(DECLARED, **fields)


def catalog(peer: PeerAddress | None, rank: int = 0) -> DeclaredCatalog:
    return DeclaredCatalog([DeclaredGroup(0, "full_attention", 16)], hash_block_size=16, dp_rank=rank, peer=peer)


def test_an_address_of_its_own_is_taken_as_it_is() -> None:
    assert lending_address(DECLARED, ["tcp://10.9.9.9:1"]) == DECLARED


@pytest.mark.parametrize(
    ("endpoints", "host"),
    [
        (["tcp://10.0.0.5:1", None, "http://[fd00::1]:8000"], "10.0.0.5"),
        (["tcp://127.0.0.1:1", None, "http://node-7:8000"], "node-7"),
        (["ipc:///tmp/x", "tcp://*:1", "http://[fd00::1]:8000/v1"], "fd00::1"),
    ],
)
@pytest.mark.parametrize("wildcard", ["*", "0.0.0.0", "::"])
def test_a_wildcard_is_the_host_at_which_the_engine_is_reached(
    endpoints: list[str | None], host: str, wildcard: str
) -> None:
    assert lending_address(changed(host=wildcard), endpoints) == changed(host=host)


def test_a_wildcard_without_a_known_host_is_no_address() -> None:
    assert lending_address(changed(host="*"), ["ipc:///tmp/x", None, "tcp://[::"]) is None


def test_engines_that_lend_on_loopback_exchange_only_within_their_machine() -> None:
    def exchange(*endpoints: str) -> str:
        address = lending_address(changed(host="127.0.0.1"), endpoints)
        assert address is not None and address.host == "127.0.0.1"
        return address.exchange

    assert exchange("tcp://127.0.0.1:1") == exchange("tcp://localhost:2", "http://[::1]:80") == exchange()
    assert exchange("tcp://10.0.0.5:1") == exchange("tcp://127.0.0.1:2", "http://10.0.0.5:80") != exchange()
    assert exchange("tcp://10.0.0.6:1") != exchange("tcp://10.0.0.5:1") != DECLARED.exchange


def test_machines_behind_tunnels_are_distinguished_by_the_name_that_their_engines_declare() -> None:
    def exchange(machine: str, endpoint: str, host: str = "127.0.0.1") -> str:
        address = lending_address(changed(host=host, machine=machine), [endpoint])
        assert address is not None and address.host == "127.0.0.1"
        return address.exchange

    # Each is reached over a tunnel that begins at a loopback address of the router's machine.
    assert exchange("a", "tcp://127.0.0.1:1") != exchange("b", "tcp://127.0.0.1:2")
    assert exchange("a", "tcp://127.0.0.1:1", "*") != exchange("b", "tcp://127.0.0.1:2", "*")
    # One machine under two names.
    assert exchange("a", "tcp://127.0.0.1:1") == exchange("a", "tcp://10.0.0.5:1")
    assert lending_address(changed(machine="a"), []) == changed(machine="a")


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 0},
        {"port": -1},
        {"port": 65_536},
        {"port": 2**63},
        {"host": ""},
        {"host": "a" * 10_000},
        {"host": "a b"},
        {"host": "a\n"},
        {"exchange": ""},
        {"exchange": "a" * 10_000},
        {"machine": "a" * 10_000},
        {"resets": -1},
        {"token_bytes": -1},
    ],
    ids=str,
)
def test_a_declaration_that_no_engine_makes_gives_no_address(wrong: dict[str, Any]) -> None:
    assert lending_address(changed(**wrong), ["tcp://10.0.0.5:1"]) is None
    assert lending_address(changed(host="a" * MAX_HOST_CHARS), []) is not None


def state_of(rank: int = 0) -> WorkerState:
    registration = Registration(WorkerKey("m", "w", rank), events="tcp://10.0.0.5:1", url="http://10.0.0.5:80")
    return WorkerState(registration, bare_services(lambda: 0.0))


def test_the_view_of_a_credited_worker_has_the_address_of_its_rank() -> None:
    for rank, port in ((0, 6000), (1, 6001)):
        state = state_of(rank)
        state.ingest.apply(Connected(), 0.0)
        state.ingest.profile.declare(catalog(changed(host="*", port=port), rank))
        state.on_items(0.0)
        assert state.view.credited and state.view.peer == changed(host="10.0.0.5", port=port)


def test_the_view_follows_resets_and_the_loss_of_credit() -> None:
    state = state_of()
    state.ingest.profile.declare(catalog(DECLARED))
    state.on_items(0.0)
    assert not state.view.credited and state.view.peer is None
    state.ingest.apply(Connected(), 0.0)
    state.on_items(0.0)
    assert state.view.state is StreamState.LIVE and state.view.peer == DECLARED
    state.ingest.profile.declare(catalog(changed(resets=3)))
    state.on_items(0.0)
    assert state.view.peer == changed(resets=3)
    state.ingest.profile.forget_learned()
    state.on_items(0.0)
    assert state.view.peer is None


def test_a_restarted_router_has_the_address() -> None:
    ingest = live(Declared(1, catalog(DECLARED)), snapshot(5, {}))
    assert restored(ingest).profile.declared_peer == DECLARED


def test_the_other_routers_have_the_address_before_a_block_is_stored() -> None:
    state = state_of()
    state.ingest.apply(Connected(), 0.0)
    state.ingest.profile.declare(catalog(DECLARED))
    state.on_items(0.0)
    view = PeerView(state.registration, None)
    for declared in (DECLARED, changed(resets=3), None):
        state.ingest.profile.declare(catalog(declared))
        view.take_image(WorkerImage(WORKER, "e", None, state.state_fields(), "0-0", 1, {}))
        assert view.declared_peer == declared


@pytest.mark.parametrize("written", [b"", b"{}", b"no JSON", b'{"host": 1, "port": 2, "exchange": "e"}', b"[]"])
def test_a_field_of_another_version_is_no_address(written: bytes) -> None:
    assert declared_peer_of({META_LENDING: written}) is None
