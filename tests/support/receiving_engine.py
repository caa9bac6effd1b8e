# SPDX-License-Identifier: Apache-2.0
"""An engine with the real threads and sockets of its peer tier, which lends and receives hand-overs."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import ExitStack

from kvrouter.engine_patch.offload.key import OffloadKey
from kvrouter.engine_patch.offload.peer.peer_access import PeerAccess
from kvrouter.engine_patch.offload.peer.peer_client import PeerClient
from kvrouter.engine_patch.offload.peer.peer_server import PeerServer
from kvrouter.engine_patch.offload.peer.warmer import Warmer
from kvrouter.engine_patch.offload.tiers.peer_tier import PeerTier
from kvrouter.engine_patch.setup.throttled_log import ThrottledLog
from tests.support.peer_world import CHUNK_BYTES, Engine, World, key
from tests.support.ports import free_port

HOST = "127.0.0.1"
# Longer than any answer takes.
TIMEOUT_S = 30.0
LOG = ThrottledLog(logging.getLogger("test"), time.monotonic)


class ReceivingEngine:
    """An engine that is idle: only its threads run."""

    def __init__(self, stack: ExitStack, access: PeerAccess | None = None, port: int | None = None) -> None:
        access = access or PeerAccess(HOST, None, None)
        self.port = port or free_port()
        self.engine = engine = Engine(World(), f"engine {self.port}", 8)
        client = PeerClient(engine.plane, engine.slots, lambda: engine.facts, access, time.monotonic, LOG)
        engine.tiers.peers = PeerTier(client, TIMEOUT_S, time.monotonic)
        warmer = Warmer(engine.tiers, CHUNK_BYTES, 8, time.monotonic, LOG)
        server = PeerServer(HOST, self.port, access, engine.lender, warmer, time.monotonic, LOG)
        stack.callback(client.close)
        stack.callback(engine.tiers.fail_warming)
        stack.callback(server.close)
        self.woken = threading.Event()
        engine.tiers.wake = self.woken.set

    def store(self, *numbers: int) -> None:
        """Compute chunks of one prompt and store them."""
        self.engine.store(*map(key, numbers))

    def held(self) -> set[OffloadKey]:
        """Return the chunks that the engine announces in its next step."""
        with self.engine.tiers.lock:
            self.engine.read_changes()
        return self.engine.announced
