# SPDX-License-Identifier: Apache-2.0
"""Session affinity by hash, as load balancers and gateways have it, without a look at caches or load.

Rendezvous hashing (Thaler and Ravishankar 1998, highest random weight): each worker's weight is a hash of the session
and the worker, and the highest wins. So a session keeps its worker, and workers get equal shares of the sessions. A
request without a session is hashed by its prompt's first piece, so that prompts with equal beginnings meet.
"""

from __future__ import annotations

import random
from hashlib import blake2b

from kvrouter.replay.policies.peer import Rule, Sight


class SessionHash(Rule):
    """A rule over a fixed number of workers."""

    def __init__(self, workers: int) -> None:
        self._workers = workers

    def pick(self, sight: Sight, rng: random.Random) -> int:
        """Return the worker of the highest weight."""
        name = f"piece {sight.pieces[0]}" if sight.session is None else f"session {sight.session}"
        return max(
            range(self._workers), key=lambda worker: blake2b(f"{name} {worker}".encode(), digest_size=8).digest()
        )
