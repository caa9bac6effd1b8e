# SPDX-License-Identifier: Apache-2.0
"""An estimate of what the workers would reuse if each model's prompts were sent to them in turn. Pure.

Each worker holds the pieces of the prompts that fell to its turn, and the checkpoints at which those can be resumed
(`model/kvcache/resume_rule.py`). It holds at most the blocks of its cache, and evicts the least recently used first.
The estimate covers neither offload tiers nor generated tokens. If a model's prompts come through several processes,
each process has a shadow of its own, for the prompts that it received.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.observe.history.shadow_cache import ShadowCache, WorkerCache, shadow_cache
from kvrouter.router.route.load.prefix_tree import PIECE_TOKENS

# How many pieces and checkpoints of all workers are remembered, some 200 bytes each: caches of 25 million tokens in
# all. If the workers' caches hold more, each worker gets an equal part of this number.
MAX_PIECES = 200_000


class HeldPieces:
    """The pieces and checkpoints that one worker holds, each with its blocks, the least recently used first."""

    def __init__(self, described: WorkerCache) -> None:
        self.described = described
        self.cache: ShadowCache = shadow_cache(described.engine, described.catalog)
        # The blocks of each piece by its name, and of the checkpoint at the piece's end by a tuple with that name.
        self.entries: OrderedDict[int | tuple[int], float] = OrderedDict()
        self._blocks = 0.0

    def describe(self, described: WorkerCache) -> None:
        """Use the present description of the cache. Its parts are compared by identity: a change replaces them."""
        if described.engine is not self.described.engine or described.catalog is not self.described.catalog:
            self.described, self.cache = described, shadow_cache(described.engine, described.catalog)

    def run(self, names: Sequence[int]) -> int:
        """Return how many of a prompt's first pieces are held."""
        run = 0
        for name in names:
            if name not in self.entries:
                break
            run += 1
        return run

    def resumable(self, names: Sequence[int], run: int) -> int:
        """Return after how many pieces the prompt can be resumed, given that its first `run` pieces are held."""
        if self.cache.whole_tokens is None:
            return run
        while run and (names[run - 1],) not in self.entries:
            run -= 1
        return run

    def keep(self, key: int | tuple[int], blocks: float) -> None:
        """Hold a piece or a checkpoint, and mark it as the most recently used."""
        if key in self.entries:
            self.entries.move_to_end(key)
        else:
            self.entries[key] = blocks
            self._blocks += blocks

    def shrink(self, max_entries: int) -> None:
        """Evict the least recently used entries until the rest fits."""
        most_blocks = self.cache.blocks
        while self.entries and (
            len(self.entries) > max_entries or (most_blocks is not None and self._blocks > most_blocks)
        ):
            self._blocks -= self.entries.popitem(last=False)[1]


class RoundRobinShadow:
    """The pieces that each worker would hold."""

    def __init__(self, max_pieces: int = MAX_PIECES) -> None:
        self._max_pieces = max_pieces
        self._held: dict[WorkerKey, HeldPieces] = {}
        self._turns: dict[str, int] = {}

    def __len__(self) -> int:
        return sum(len(held.entries) for held in self._held.values())

    def sent(self, model: str, workers: Sequence[WorkerCache], names: Sequence[int], num_tokens: int) -> int:
        """Send a prompt to the worker whose turn it is, and return the tokens that it would reuse there.

        Args:
            model: The model.
            workers: Its workers, in the order of their turns; at least one.
            names: The names of the prompt's pieces, each chained over all before it.
            num_tokens: The length of the prompt.
        """
        turn = self._turns.get(model, 0)
        self._turns[model] = turn + 1
        described = workers[turn % len(workers)]
        held = self._held.get(described.worker)
        if held is None:
            held = self._held[described.worker] = HeldPieces(described)
            # The parts of all others are smaller now, and some may have no turn soon.
            for other in self._held.values():
                other.shrink(self._max_pieces // len(self._held))
        held.describe(described)
        # If only block hashes are known, pieces can be longer than PIECE_TOKENS. This is the shortest possible length.
        piece_tokens = max(PIECE_TOKENS, num_tokens // (len(names) + 1))
        run = held.run(names)
        resumed = held.resumable(names, run)
        _store(held, names, run, piece_tokens)
        held.shrink(self._max_pieces // len(self._held))
        # The last token of a prompt is always computed.
        return max(0, min(resumed * piece_tokens, num_tokens - 1))

    def keep(self, workers: set[WorkerKey]) -> None:
        """Forget all other workers, and the models that have none."""
        for worker in self._held.keys() - workers:
            del self._held[worker]
        for model in self._turns.keys() - {worker.model for worker in workers}:
            del self._turns[model]


def _store(held: HeldPieces, names: Sequence[int], run: int, piece_tokens: int) -> None:
    """Hold all pieces of a computed prompt, and its checkpoints. The first `run` pieces were held before."""
    cache = held.cache
    if cache.whole_tokens is not None and names:
        if len(names) * piece_tokens <= cache.whole_tokens:
            # The window covers the whole prompt, so checkpoints at every piece take no more blocks than one at its end.
            ends, blocks = list(range(len(names), 0, -1)), cache.checkpoint_blocks * piece_tokens / cache.whole_tokens
        else:
            # Checkpoints are at the prompt's end, and after the pieces that were held before.
            ends, blocks = [end for end in (len(names), run) if end], cache.checkpoint_blocks
        for end in ends:
            held.keep((names[end - 1],), blocks)
    # The last piece is stored first, because the end of a prompt is evicted before its start.
    piece_blocks = cache.piece_blocks * piece_tokens / PIECE_TOKENS
    for name in reversed(names):
        held.keep(name, piece_blocks)
