# SPDX-License-Identifier: Apache-2.0
"""Both sides of the peer tier of one engine: the thread that fetches and the thread that lends."""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

import zmq

from kvrouter.engine_patch.offload.peer.chunk_checksum import ChunkChecksum
from kvrouter.engine_patch.offload.peer.data_plane import NixlPlane
from kvrouter.engine_patch.offload.peer.lender import Lender, LenderCounts, PeerFacts
from kvrouter.engine_patch.offload.peer.peer_access import PeerAccess, machine
from kvrouter.engine_patch.offload.peer.peer_client import PeerClient
from kvrouter.engine_patch.offload.peer.peer_link import Memory
from kvrouter.engine_patch.offload.peer.peer_server import PeerServer
from kvrouter.engine_patch.offload.peer.peer_wire import VERSION, Welcome
from kvrouter.engine_patch.offload.peer.warmer import Warmer
from kvrouter.engine_patch.offload.tiers.tiering import Tiering
from kvrouter.engine_patch.setup.throttled_log import ThrottledLog
from kvrouter.events.patch.messages import PeerAddress

# Lent chunks cannot be evicted, so most chunks must not be lent at once.
LENT_SHARE = 4
# Stands in an address for all addresses of the machine.
ANY_HOST = "*"
# Hex digits that name the engines which may exchange chunks, 128 bits: no two kinds of engines share them.
EXCHANGE_CHARS = 32


class Slots(NamedTuple):
    """The memory of all slots, in the process of the scheduler."""

    address: int
    num_slots: int
    slot_bytes: int
    # Bytes of a chunk; the rest of its slot is padding.
    chunk_bytes: int
    # Returns the memory of one slot.
    slot: Callable[[int], memoryview]


class Peering:
    """The peer tier's threads."""

    def __init__(
        self,
        slots: Slots,
        facts: Callable[[], PeerFacts],
        algorithm: str,
        host: str,
        port: int,
        key_file: str | None,
        list_file: str | None,
        log: logging.Logger,
    ) -> None:
        """Register the memory, and start the thread that fetches.

        Args:
            slots: The memory of all slots.
            facts: Returns the facts that a peer must share.
            algorithm: The name of the checksum.
            host: The address at which to lend.
            port: The port at which to lend.
            key_file: The file with this engine's secret CURVE key, or None.
            list_file: The file with the peers' public keys and addresses, or None.
            log: The engine's log.

        Raises:
            ValueError: A setting is wrong, or NIXL is missing; the text says what to change.
        """
        self._host, self._port, self._log = host, port, log
        self._access = PeerAccess(host, key_file, list_file)
        self._facts = facts
        self._slots = slots
        self._checksum = ChunkChecksum(algorithm, slots.slot, slots.chunk_bytes)
        # A name that no other engine has, nor this one after a restart.
        self._plane = NixlPlane(f"kvrouter-{secrets.token_hex(8)}", slots.address, slots.num_slots * slots.slot_bytes)
        memory = Memory(slots.address, slots.slot_bytes, slots.chunk_bytes, self._checksum)
        self.client = PeerClient(
            self._plane, memory, facts, self._access, time.monotonic, ThrottledLog(log, time.monotonic)
        )
        self._welcome = Welcome(self._plane.metadata, slots.address, slots.slot_bytes)
        self.max_lent_chunks = max(1, slots.num_slots // LENT_SHARE)
        self._server: PeerServer | None = None
        self.counts = LenderCounts()

    def lend(self, tiers: Tiering) -> None:
        """Start the thread that lends the chunks of these tiers. Raise ValueError if the address is taken."""
        log = ThrottledLog(self._log, time.monotonic)
        warmer = Warmer(tiers, self._slots.chunk_bytes, self._slots.num_slots, time.monotonic, log)
        lender = Lender(tiers, self._facts, self._welcome, self._checksum, self.max_lent_chunks)
        self.counts = lender.counts
        try:
            self._server = PeerServer(self._host, self._port, self._access, lender, warmer, time.monotonic, log)
        except zmq.ZMQError as error:
            raise ValueError(
                f"chunks cannot be lent at {self._host}:{self._port} ({error}): set peer_port to a free port"
            ) from error

    def address(self, num_resets: int, token_bytes: int, lends_disk: bool = False) -> PeerAddress | None:
        """Return where chunks are lent, or None while this engine has not chosen its first parent hash.

        Args:
            num_resets: The number of resets of the tiers.
            token_bytes: Bytes of KV cache for one token, of all groups and ranks.
            lends_disk: Whether chunks that only the disk holds are lent, too.
        """
        facts = self._facts()
        if self._server is None or not facts.hash_root:
            return None
        host = ANY_HOST if is_wildcard(self._host) else self._host
        key = self._access.public_key
        return PeerAddress(host, self._port, exchange(facts), num_resets, token_bytes, key, machine(), lends_disk)

    def stop_lending(self) -> None:
        """End the thread that lends, and all loans."""
        if self._server is not None:
            self._server.close()
            self._server = None


def is_wildcard(host: str) -> bool:
    """Return whether a host stands for all addresses of its machine."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == ANY_HOST


def exchange(facts: PeerFacts) -> str:
    """Return the text that two engines have in common exactly if their first messages to each other would agree."""
    # The version ends at the blank and the identity has a fixed length, so other facts give other bytes.
    return hashlib.sha256(b"%d %s %s" % (VERSION, facts.identity, facts.hash_root)).hexdigest()[:EXCHANGE_CHARS]
