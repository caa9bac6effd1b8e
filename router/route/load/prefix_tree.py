# SPDX-License-Identifier: Apache-2.0
"""The beginnings of the prompts that were placed, in a tree: who computes each, and how many prompts share it. Pure.

Who computes a beginning counts for choices only, until the engine's events arrive: it keeps a burst of similar prompts
together before any event reports the first one. It is never shown as a hit. It expires soon after the first token, when
its events have arrived, or else after a short time. A beginning that many different prompts share is worth a copy.

A prefix is named by a hash chained over pieces of PIECE_TOKENS tokens; where only block hashes are known, they serve as
names. A node of the tree has consecutive pieces that the same prompts share, and every placed prompt ends at the end of a
node. So a prompt that was placed keeps its last node, and needs no name to be found again. Compiled, see `setup.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.question import Question
from kvrouter.router.model.kvcache.multimodal import named

# Smaller pieces find more of the beginnings that similar prompts share; prompts shorter than one piece share nothing.
# Larger pieces cost less to name: 8,192 tokens have 64 names here.
PIECE_TOKENS = 128
# How long a prompt without a first token counts: long enough for the prefill of a long prompt behind others.
PENDING_TTL_S = 10.0
# How long a selection without a reservation counts: it is unknown whether the request was sent to its worker.
SELECTED_TTL_S = 2.0
# From the first token until the engine's events are in the mirror: some milliseconds, a flush and a busy machine.
SETTLE_S = 0.5
# Some 110 bytes each; the names of 800 prompts of 32 k tokens.
MAX_NAMES = 200_000
# Some 600 bytes each.
MAX_NODES = 50_000
# A node looks for workers to forget whenever this number of others was added.
FORGET_EVERY = 64
# The kinds of the times in a node: of workers that compute its pieces, and of those that receive them by a hand-over.
COMPUTING, ARRIVING = 0, 1


def step_of(question: Question, hash_block_size: int) -> int:
    """Return the number of tokens between consecutive names of a prompt's prefixes."""
    if question.token_ids is not None or question.block_hashes is None:
        return PIECE_TOKENS
    return max(1, PIECE_TOKENS // hash_block_size) * hash_block_size


def names_of(question: Question, hash_block_size: int, seed: int) -> list[int]:
    """Return the names of a prompt's prefixes, one for each piece of it.

    Args:
        question: The prompt. Without token ids and block hashes it has no names.
        hash_block_size: Tokens of a block, for prompts of which only block hashes are known.
        seed: A secret of the process, so that no client can construct two prompts with the same name.
    """
    names: list[int] = []
    if question.token_ids is not None:
        space = f"{question.model}\0{question.lora_name or ''}\0{question.cache_salt or ''}"
        name = xxh3_64_intdigest(space.encode("utf-8", "surrogatepass"), seed)
        tokens = np.ascontiguousarray(question.token_ids).view(np.uint8).data
        size_bytes = PIECE_TOKENS * question.token_ids.itemsize
        for start in range(0, len(tokens) - size_bytes + 1, size_bytes):
            if question.items:
                first = start // question.token_ids.itemsize
                name = named(name, question.items, first, first + PIECE_TOKENS)
            name = xxh3_64_intdigest(tokens[start : start + size_bytes], name)
            names.append(name)
    elif question.block_hashes is not None:
        step = step_of(question, hash_block_size) // hash_block_size
        names = question.block_hashes[step - 1 :: step].tolist()
    return names


class Tail(NamedTuple):
    """The end of a prompt behind its last whole piece."""

    # The number of units (token ids or block hashes), and their digest.
    units: int
    digest: int


class PrefixNode:
    """Consecutive pieces that the same prompts share."""

    def __init__(self, parent: PrefixNode | None, names: list[int], end: int) -> None:
        # The node with the pieces before these.
        self.parent = parent
        self.names = names
        # The number of pieces from the start of a prompt to the end of this node.
        self.end = end
        # For COMPUTING and ARRIVING, the time at which the pieces expire at each worker.
        self.ends_s: tuple[dict[WorkerKey, float], dict[WorkerKey, float]] = ({}, {})
        # The number of different prompts that began with these pieces; 0 if only lists of prompts had them.
        self.count = 0
        # The tail of the last prompt that ended behind this node; None once another prompt has continued it.
        self.tail: Tail | None = None


# The nodes with the beginning of a prompt, the deepest first, each with the number of the prompt's pieces to its end.
Path = list[tuple[int, PrefixNode]]


class PromptPrefixes:
    """The prefixes of a request's prompts. The object itself identifies the request."""

    def __init__(self, prompts: Sequence[list[int]], step_tokens: int = PIECE_TOKENS) -> None:
        # The names of the prefixes of each prompt; most requests have one prompt.
        self.prompts = prompts
        # The number of tokens between consecutive names.
        self.step_tokens = step_tokens
        # The last node of each prompt, once the request was placed.
        self.nodes: list[PrefixNode] = []

    @property
    def names(self) -> list[int]:
        """The names of the only prompt's prefixes; empty if there are several prompts."""
        return self.prompts[0] if len(self.prompts) == 1 else []


class PrefixTree:
    """The nodes of all prompts, of one model or of several, because names differ between models.

    Invariants: a node is used no later than the nodes before it, so memory is taken from the ends of prompts first. Each
    worker of a node is also one of the nodes before it, until it is forgotten.

    Clients choose the block hashes that serve as names, so a name may stand in several nodes; the latest one is found.
    """

    def __init__(self, max_names: int = MAX_NAMES, max_nodes: int = MAX_NODES) -> None:
        self._max_names = max_names
        self._max_nodes = max_nodes
        self._node_of: dict[int, PrefixNode] = {}
        # All nodes, the one that was used the longest ago first.
        self._nodes: OrderedDict[PrefixNode, None] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        """Return the number of names in all nodes."""
        return self._size

    def find(self, names: list[int]) -> Path:
        """Return the path of a prompt's beginning, as far as it is known."""
        end, node = self._deepest(names)
        path: Path = []
        while node is not None:
            path.append((end, node))
            if (node := node.parent) is not None:
                end = node.end
        return path

    def sent(
        self, prefixes: PromptPrefixes, worker: WorkerKey, now: float, ttl_s: float, kind: int = COMPUTING
    ) -> None:
        """Count prompts that were sent to a worker for `ttl_s`, at most PENDING_TTL_S."""
        ends_s = now + ttl_s
        prefixes.nodes = [self._keep(names) for names in prefixes.prompts if names]
        for node in _nodes_of(prefixes):
            expiries = node.ends_s[kind]
            known_s = expiries.get(worker)
            if known_s is None and len(expiries) % FORGET_EVERY == FORGET_EVERY - 1:
                _forget(expiries, now)
            if known_s is None or known_s < ends_s:
                expiries[worker] = ends_s

    def count(self, prefixes: PromptPrefixes, tail_of: Callable[[int, int | None], Tail]) -> None:
        """Count a prompt that was sent as a new one, unless it is the next turn of a chat.

        That one continues with the tokens in which its previous prompt ended. Every other prompt that leaves a known path
        is a new one.

        Args:
            prefixes: The prompt's prefixes.
            tail_of: Returns the prompt's tail behind a number of pieces, of all units or of at most some.
        """
        path = _nodes_of(prefixes)
        if not path:
            return
        shared: PrefixNode | None = None
        for node in path:
            if node.count:
                shared = node
                break
        continues = False
        if shared is not None and shared.tail is not None:
            continues = tail_of(shared.end, shared.tail.units) == shared.tail
            if continues:
                shared.tail = None
        for node in path:
            if not (continues and node.count):
                node.count += 1
        node = path[0]
        node.tail = tail_of(node.end, None)

    def _deepest(self, names: list[int]) -> tuple[int, PrefixNode | None]:
        """Return how many of a prompt's names are known, and the node of the last of them."""
        # A prefix is known if a longer one is.
        low, high = 0, len(names)
        while low < high:
            middle = (low + high) // 2
            if names[middle] in self._node_of:
                low = middle + 1
            else:
                high = middle
        if low:
            node = self._node_of[names[low - 1]]
            place = low - 1 - (node.end - len(node.names))
            if 0 <= place < len(node.names) and node.names[place] == names[low - 1]:
                return low, node
        return 0, None

    def _keep(self, names: list[int]) -> PrefixNode:
        """Return the last node of a prompt with at least one name, which ends there. Make the nodes that are missing."""
        known, node = self._deepest(names)
        if node is not None and known < node.end:
            node = self._split(node, known)
        if node is None or known < len(names):
            node = self._add(PrefixNode(node, names[known:], len(names)))
            self._size += len(node.names)
        used: PrefixNode | None = node
        while used is not None:
            if used in self._nodes:
                self._nodes.move_to_end(used)
            used = used.parent
        while self._size > self._max_names or len(self._nodes) > self._max_nodes:
            self._drop(next(iter(self._nodes)))
        return node

    def _split(self, node: PrefixNode, end: int) -> PrefixNode:
        """Move a node's pieces up to `end` to a new node before it, and return that one."""
        length = end - (node.end - len(node.names))
        front = PrefixNode(node.parent, node.names[:length], end)
        front.count = node.count
        computing, arriving = node.ends_s
        front.ends_s = computing.copy(), arriving.copy()
        node.parent, node.names = front, node.names[length:]
        return self._add(front)

    def _add(self, node: PrefixNode) -> PrefixNode:
        """Enter a new node, and return it."""
        self._nodes[node] = None
        self._node_of.update(dict.fromkeys(node.names, node))
        return node

    def _drop(self, node: PrefixNode) -> None:
        """Forget a node. Prompts under way may still keep it, and the nodes before it."""
        del self._nodes[node]
        self._size -= len(node.names)
        for name in node.names:
            if self._node_of.get(name) is node:
                del self._node_of[name]


def settle(prefixes: PromptPrefixes, worker: WorkerKey, ends_s: float, kind: int = COMPUTING) -> None:
    """Expire prompts' prefixes at `ends_s`, after their first token: from then on the engine's events count."""
    for node in _nodes_of(prefixes):
        expiries = node.ends_s[kind]
        if expiries.get(worker, ends_s) > ends_s:
            expiries[worker] = ends_s


def tokens_at(path: Path, step_tokens: int, num_tokens: int, now: float, kind: int = COMPUTING) -> dict[WorkerKey, int]:
    """Return how many tokens of a prompt's beginning each worker is computing; absent workers compute none.

    It is at most the prompt's length less one, because the last token is always computed.
    """
    tokens: dict[WorkerKey, int] = {}
    for end, node in path:
        expiries = node.ends_s[kind]
        # A worker of a node is one of the nodes before it, so these can add workers only if they have more.
        if len(expiries) > len(tokens):
            for worker, ends_s in expiries.items():
                if ends_s > now and worker not in tokens:
                    tokens[worker] = min(end * step_tokens, num_tokens - 1)
    return tokens


def counts_of(path: Path) -> list[tuple[int, int]]:
    """Return how many different prompts shared each part of a prompt's beginning, and how many pieces the part has."""
    counts, start = [], 0
    for end, node in reversed(path):
        if not node.count:
            break
        counts.append((node.count, end - start))
        start = end
    return counts


def _nodes_of(prefixes: PromptPrefixes) -> list[PrefixNode]:
    """Return the nodes of all prompts that were sent, the last one of each prompt first."""
    path: list[PrefixNode] = []
    for last in prefixes.nodes:
        node: PrefixNode | None = last
        while node is not None:
            path.append(node)
            node = node.parent
    return path


def _forget(expiries: dict[WorkerKey, float], now: float) -> None:
    """Forget the workers at which nothing can be under way now, neither here nor in a node behind.

    What was sent to a worker, and settled here by another prompt, may be under way behind for PENDING_TTL_S.
    """
    for worker in [worker for worker, ends_s in expiries.items() if ends_s <= now - PENDING_TTL_S]:
        del expiries[worker]
