# SPDX-License-Identifier: Apache-2.0
"""Prompts that an engine will schedule before the next one, and what the next one will find of them. Pure.

`pending_prefixes.py` says how far a prompt's beginning is on its way to each worker, in coarse steps, for the choice.
This says how much of that the chosen worker's engine will let it reuse, to the token: engines schedule prompts in the
order in which they come, and look a prompt up when they schedule it, so those ahead are computed by then. Only an
expectation follows from it, never a hit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.question import Question
from kvrouter.router.model.kvcache.resume_rule import ResumeRule
from kvrouter.router.route.load.pending_prefixes import step_of

# Prompts that begin alike are found by these first tokens; prompts that share less have no block in common.
HEAD_TOKENS = 16
# Siblings that one look compares, the latest first. Each hands on the checkpoints that it will use itself, so the
# latest know those of all before them.
LOOKED_AT = 8
# Checkpoints that a prompt hands on: the deepest ones.
MAX_CHECKPOINTS = 4
# A queue longer than a minute is saturated long before; a client that never reports a first token ends here.
AHEAD_TTL_S = 60.0
# From a first token until the events of its prompt are in the mirror, some 5 ms, on a machine that is ten times slower.
# From then on the hit itself says what is there, also what was evicted again.
ARRIVAL_S = 0.05
# Some 400 bytes each besides their tokens.
MAX_PROMPTS = 16_384
# Token ids of all of them: 32 MiB. The oldest go first, as they are computed first.
MAX_UNITS = 4 * 1024**2


class Coming(NamedTuple):
    """The parts of a prompt that those ahead of it will have left when it is scheduled, in its tokens."""

    # The longest prefix that an engine will let it reuse by its rule.
    resumable: int
    # The longest prefix that will be computed, whether its windows and states are kept or not.
    computed: int
    # Where windows and states will be kept, of those that the prompt shares.
    checkpoints: tuple[int, ...]


NOTHING = Coming(0, 0, ())


class PromptAhead:
    """One prompt as others are compared with it."""

    __slots__ = (
        "checkpoints",
        "ends_s",
        "key",
        "names",
        "new_tokens",
        "num_tokens",
        "step_tokens",
        "unit_tokens",
        "units",
        "worker",
    )

    def __init__(self, question: Question, names: list[int], hash_block_size: int) -> None:
        """names: as `names_of` returns them. Only they are compared of a prompt with images."""
        self.names = names
        self.step_tokens = step_of(question, hash_block_size)
        self.num_tokens = question.num_tokens
        # Its tokens that the worker which computes it neither has nor is just computing.
        self.new_tokens = question.num_tokens
        self.checkpoints: tuple[int, ...] = ()
        self.ends_s = 0.0
        self.worker: WorkerKey | None = None
        self.units: NDArray[np.int64] | NDArray[np.uint64] | None
        if question.token_ids is not None:
            self.units, self.unit_tokens = question.token_ids, 1
            head = question.token_ids[:HEAD_TOKENS].tobytes()
            start = xxh3_64_intdigest(head) if question.num_tokens > HEAD_TOKENS else None
        else:
            hashes = question.block_hashes
            self.units, self.unit_tokens = hashes, hash_block_size
            start = int(hashes[0]) if hashes is not None and len(hashes) else None
        if question.items:
            self.units = None
        # Prompts that can share anything have the same key; None: this one shares with no other.
        self.key = None if start is None else (question.lora_name, question.cache_salt, start)

    def common_tokens(self, other: PromptAhead) -> int:
        """Return how many tokens from the start on are the same, as far as both are known."""
        depth = _common_names(self.names, other.names) if self.step_tokens == other.step_tokens else 0
        known = depth * self.step_tokens
        if self.units is None or other.units is None or self.unit_tokens != other.unit_tokens:
            return known
        start = known // self.unit_tokens
        # Behind the last name that is the same, the next one differs or is not whole.
        stop = start + self.step_tokens // self.unit_tokens
        stop = min(stop, len(self.units), len(other.units))
        different = self.units[start:stop] != other.units[start:stop]
        first = different.tobytes().find(1)
        return (stop if first < 0 else start + first) * self.unit_tokens


def _common_names(some: Sequence[int], others: Sequence[int]) -> int:
    """Return how many names are the same. A name covers all before it, so halving finds the last of them."""
    low, high = 0, min(len(some), len(others))
    while low < high:
        middle = (low + high + 1) // 2
        if some[middle - 1] == others[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


class PromptsAhead:
    """The prompts that each worker has not computed yet, by how they begin. A prompt is identified by its list of
    names, which its placement keeps."""

    def __init__(self, max_prompts: int = MAX_PROMPTS, max_units: int = MAX_UNITS) -> None:
        self._max_prompts = max_prompts
        self._max_units = max_units
        self._prompts: dict[int, PromptAhead] = {}
        self._siblings: dict[tuple[object, ...], dict[int, PromptAhead]] = {}
        self._units = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, worker: WorkerKey, prompt: PromptAhead, ends_s: float) -> None:
        """Count a prompt that was sent there, until then."""
        self.drop(prompt.names)
        if prompt.key is None:
            return
        prompt.worker, prompt.ends_s = worker, ends_s
        self._prompts[id(prompt.names)] = prompt
        self._siblings.setdefault((worker, *prompt.key), {})[id(prompt.names)] = prompt
        self._units += _size(prompt)
        while len(self._prompts) > self._max_prompts or self._units > self._max_units:
            self.drop(next(iter(self._prompts.values())).names)

    def drop(self, names: Sequence[int]) -> None:
        """Forget a prompt: it failed, or is counted elsewhere."""
        prompt = self._prompts.pop(id(names), None)
        if prompt is None or prompt.key is None:
            return
        self._units -= _size(prompt)
        key = (prompt.worker, *prompt.key)
        siblings = self._siblings[key]
        del siblings[id(names)]
        if not siblings:
            del self._siblings[key]

    def move(self, worker: WorkerKey, names: Sequence[int], ends_s: float) -> None:
        """Count a prompt at this worker from now on."""
        prompt = self._prompts.get(id(names))
        if prompt is not None:
            self.add(worker, prompt, ends_s)

    def settle(self, worker: WorkerKey, names: Sequence[int], ends_s: float) -> None:
        """End a prompt at this time: it is computed, and the engine's events take over."""
        prompt = self._prompts.get(id(names))
        if prompt is not None and prompt.worker == worker:
            prompt.ends_s = min(prompt.ends_s, ends_s)

    def expire(self, now: float) -> None:
        """Drop what has ended."""
        for prompt in [prompt for prompt in self._prompts.values() if prompt.ends_s <= now]:
            self.drop(prompt.names)

    def coming(self, worker: WorkerKey, prompt: PromptAhead, rule: ResumeRule, now: float) -> Coming:
        """Return what this prompt will find of those ahead of it."""
        siblings = self._siblings.get((worker, *prompt.key)) if prompt.key is not None else None
        if not siblings:
            return NOTHING
        resumable = computed = 0
        most = rule.align(prompt.num_tokens - 1)
        checkpoints: set[int] = set()
        ended: list[PromptAhead] = []
        looked_at = 0
        for sibling in reversed(siblings.values()):
            if sibling.ends_s <= now:
                ended.append(sibling)
                continue
            common = min(prompt.common_tokens(sibling), prompt.num_tokens - 1)
            resumable = max(resumable, rule.resumable_tokens(sibling.num_tokens, sibling.checkpoints, common))
            computed = max(computed, rule.align(common))
            if sibling.checkpoints:
                checkpoints.update(tokens for tokens in sibling.checkpoints if tokens <= common)
            looked_at += 1
            if looked_at == LOOKED_AT or resumable == most:
                break
        # Each is met once: a look stays short however many have come and gone.
        for sibling in ended:
            self.drop(sibling.names)
        return Coming(resumable, computed, tuple(sorted(checkpoints)[-MAX_CHECKPOINTS:]))


def _size(prompt: PromptAhead) -> int:
    return 0 if prompt.units is None else len(prompt.units)
