# SPDX-License-Identifier: Apache-2.0
"""The text by which readers know which engines exchange chunks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from kvrouter.engine_patch.offload.peer import peer_access, peering
from kvrouter.engine_patch.offload.peer.lender import PeerFacts
from kvrouter.engine_patch.offload.peer.peer_access import MACHINE_CHARS, machine
from kvrouter.engine_patch.offload.peer.peer_wire import VERSION, Hello
from kvrouter.engine_patch.offload.peer.peering import Peering, exchange, is_wildcard
from kvrouter.events.patch.messages import PeerAddress

FACTS = PeerFacts(b"a" * 32, b"b" * 32)


@pytest.mark.parametrize(
    "other", [FACTS, PeerFacts(b"c" * 32, b"b" * 32), PeerFacts(b"a" * 32, b"c" * 32), PeerFacts(b"a" * 32, b"b" * 16)]
)
def test_engines_have_the_text_in_common_exactly_if_they_would_answer_each_other(other: PeerFacts) -> None:
    would_answer = FACTS.differs(Hello(VERSION, other.identity, other.hash_root)) is None
    assert (exchange(FACTS) == exchange(other)) is would_answer


def test_another_version_of_the_protocol_has_another_text(monkeypatch: pytest.MonkeyPatch) -> None:
    now = exchange(FACTS)
    monkeypatch.setattr(peering, "VERSION", VERSION + 1)
    assert exchange(FACTS) != now


@pytest.mark.parametrize(
    ("host", "wildcard"), [("0.0.0.0", True), ("::", True), ("*", True), ("127.0.0.1", False), ("node-1", False)]
)
def test_a_wildcard_is_known(host: str, wildcard: bool) -> None:
    assert is_wildcard(host) is wildcard


def test_a_machine_has_one_name_for_each_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    boot_id, network = tmp_path / "boot_id", tmp_path / "net"
    boot_id.write_text("ddd7c02f-5a86-4d93-91e2-38b418717fd9\n")
    network.touch()
    for name, path in (("BOOT_ID", boot_id), ("NETWORK", network)):
        monkeypatch.setattr(peer_access, name, path)
    names = [machine(), machine()]
    # Another network of the same machine, as a container has it.
    monkeypatch.setattr(peer_access, "NETWORK", tmp_path)
    names.append(machine())
    boot_id.write_text("0aa7c02f-5a86-4d93-91e2-38b418717fd9\n")
    names.append(machine())
    assert names[0] == names[1] and len(set(names)) == 3 and len(names[0]) == MACHINE_CHARS
    boot_id.unlink()
    assert machine() == ""


@pytest.mark.parametrize("key", ["", "k" * 40])
def test_the_address_has_the_key_that_clients_of_the_socket_need(key: str) -> None:
    # NIXL, which a whole Peering starts, is not needed for its address.
    lending = object.__new__(Peering)
    vars(lending).update(
        _facts=lambda: FACTS, _server=object(), _host="0.0.0.0", _port=5710, _access=SimpleNamespace(public_key=key)
    )
    assert lending.address(2, 64) == PeerAddress("*", 5710, exchange(FACTS), 2, 64, key, machine())
