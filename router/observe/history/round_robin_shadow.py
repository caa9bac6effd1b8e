# SPDX-License-Identifier: Apache-2.0
"""An estimate of what the workers would reuse if each model's prompts were sent to them in turn. Pure.

Each worker has the pieces of the prompts that its turn brought it, up to the size of its cache, the least lately used
given up first. So it is the rule of full attention: no windows, no states, no offload tiers, and no generated tokens. A
model whose prompts come through several processes has a shadow in each, of the prompts that came there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.route.load.pending_prefixes import PIECE_TOKENS

# The bound of remembered pieces of all workers, some 180 bytes each: caches of 25 million tokens in all. With more, each
# worker counts as having its part of them.
MAX_PIECES = 200_000


class RoundRobinShadow:
    """The pieces that each worker would hold."""

    def __init__(self, max_pieces: int = MAX_PIECES) -> None:
        self._max_pieces = max_pieces
        self._held: dict[WorkerKey, OrderedDict[int, None]] = {}
        self._turns: dict[str, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def sent(
        self, model: str, workers: Sequence[tuple[WorkerKey, int | None]], names: Sequence[int], num_tokens: int
    ) -> int:
        """Send a prompt to the worker whose turn it is, and return the tokens that it would reuse there.

        Args:
            model: The model.
            workers: Its workers, in the order of their turns, each with the tokens that its cache holds, None if that is
                not known; at least one.
            names: The names of the prompt's pieces, each chained over all before it.
            num_tokens: The length of the prompt.
        """
        turn = self._turns.get(model, 0)
        self._turns[model] = turn + 1
        worker, capacity_tokens = workers[turn % len(workers)]
        held = self._held.setdefault(worker, OrderedDict())
        reused = 0
        for name in names:
            if name not in held:
                break
            reused += 1
        # Where only block hashes are known, pieces can be longer; this is the shortest possible length.
        piece_tokens = max(PIECE_TOKENS, num_tokens // (len(names) + 1))
        # The last piece comes first, because a prompt's end must be given up before its start.
        renew = held.move_to_end
        for name in reversed(names):
            if name in held:
                renew(name)
            else:
                held[name] = None
        room = self._max_pieces // max(1, len(self._held))
        if capacity_tokens is not None:
            room = min(room, capacity_tokens // piece_tokens)
        while len(held) > room:
            held.popitem(last=False)
        # The last token of a prompt is always computed.
        return max(0, min(reused * piece_tokens, num_tokens - 1))

    def keep(self, workers: set[WorkerKey]) -> None:
        """Forget all other workers, and the models that have none."""
        for worker in self._held.keys() - workers:
            del self._held[worker]
        for model in self._turns.keys() - {worker.model for worker in workers}:
            del self._turns[model]
