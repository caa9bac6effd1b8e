# SPDX-License-Identifier: Apache-2.0
"""Prompts that an engine schedules before the next one, and the tokens that they will leave for it to reuse. Pure.

For the choice, `prefix_tree.py` says in coarse steps how far a prompt's beginning is on its way to each worker.
This module says, to the token, how much of that the chosen worker's engine will reuse. Engines schedule prompts in the
order of arrival and look a prompt up when they schedule it, so the prompts ahead are computed by then. The result is
only an expectation, never a hit. Compiled, see `setup.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.question import Question
from kvrouter.router.model.kvcache.resume_rule import ResumeRule
from kvrouter.router.route.load.prefix_tree import PromptPrefixes, Tail

# Prompts with a common beginning are found by these first tokens; prompts that share fewer have no block in common.
HEAD_TOKENS = 16
# The number of waiting prompts with a common beginning that are compared with a prompt, the latest first. Each takes over
# the checkpoints that it will use itself, so the latest ones have those of all before them.
LOOKED_AT = 8
# The number of checkpoints that a prompt hands on; these are the deepest ones.
MAX_CHECKPOINTS = 4
# How long a prompt without a first token counts. A worker with a queue of more than a minute is saturated long before,
# and some clients never report a first token.
AHEAD_TTL_S = 60.0
# How long a prompt counts after its first token: the 5 ms until its events are in the mirror, on a machine that is ten
# times slower. After that the hit itself is up to date, even if blocks were evicted again.
ARRIVAL_S = 0.05
# Some 400 bytes each, besides their tokens.
MAX_PROMPTS = 16_384
# Token ids of all prompts together: 32 MiB. The oldest prompts are dropped first, because they are computed first.
MAX_UNITS = 4 * 1024**2


class Coming(NamedTuple):
    """The parts of a prompt that the prompts ahead of it will have put into the cache once it is scheduled, in tokens."""

    # The longest prefix that the engine's rule will let it reuse.
    resumable: int
    # The longest prefix that will be computed, whether or not its windows and states are kept.
    computed: int
    # Where windows and states will be kept within the shared beginning.
    checkpoints: tuple[int, ...]


NOTHING = Coming(0, 0, ())


class PromptAhead:
    """A prompt in the form in which it is compared with others."""

    def __init__(self, question: Question, prefixes: PromptPrefixes, hash_block_size: int) -> None:
        """Prepare a prompt for comparisons.

        Args:
            question: The prompt.
            prefixes: The prompt's prefixes. A prompt with images is compared by their names alone.
            hash_block_size: Tokens of a block.
        """
        self.prefixes = prefixes
        self._names = prefixes.names
        self.step_tokens = prefixes.step_tokens
        self.num_tokens = question.num_tokens
        # Tokens of the prompt that the worker that computes it neither holds nor is computing.
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
        # The same units for the comparison; the sign of a hash does not matter there.
        self._compared = None if self.units is None else self.units.view(np.int64)
        # Prompts that can share a beginning have the same key; None if this prompt can share with no other.
        self.key = None if start is None else (question.lora_name, question.cache_salt, start)

    def common_tokens(self, other: PromptAhead) -> int:
        """Return how many tokens both prompts have in common from the start, as far as both are known."""
        depth = _common_names(self._names, other._names) if self.step_tokens == other.step_tokens else 0
        known_tokens = depth * self.step_tokens
        if self._compared is None or other._compared is None or self.unit_tokens != other.unit_tokens:
            return known_tokens
        at = known_tokens // self.unit_tokens
        # Behind the last common name, the next piece differs or is incomplete in one of the prompts.
        stop = at + self.step_tokens // self.unit_tokens
        stop = min(stop, self._compared.shape[0], other._compared.shape[0])
        while at < stop and self._compared[at] == other._compared[at]:
            at += 1
        return at * self.unit_tokens

    def tail(self, pieces: int, units: int | None = None) -> Tail:
        """Return the units of the prompt behind its first pieces as a tail; empty if its tokens are not compared.

        Args:
            pieces: The number of pieces before the tail.
            units: The largest number of units in the tail, or None for all.
        """
        if self.units is None:
            return Tail(0, 0)
        first = pieces * self.prefixes.step_tokens // self.unit_tokens
        rest = self.units[first : None if units is None else first + units]
        return Tail(len(rest), xxh3_64_intdigest(rest.tobytes()))


def _common_names(names: list[int], other_names: list[int]) -> int:
    """Return how many leading names are equal.

    A name covers all names before it, so a binary search finds the last equal one.
    """
    low, high = 0, min(len(names), len(other_names))
    while low < high:
        middle = (low + high + 1) // 2
        if names[middle - 1] == other_names[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


class PromptsAhead:
    """The prompts that each worker has not computed yet, by their beginnings."""

    def __init__(self, max_prompts: int = MAX_PROMPTS, max_units: int = MAX_UNITS) -> None:
        self._max_prompts = max_prompts
        self._max_units = max_units
        self._prompts: dict[PromptPrefixes, PromptAhead] = {}
        self._siblings: dict[tuple[object, ...], dict[PromptPrefixes, PromptAhead]] = {}
        self._units = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, worker: WorkerKey, prompt: PromptAhead, ends_s: float) -> None:
        """Count a prompt that was sent to a worker, until `ends_s`."""
        self.drop(prompt.prefixes)
        if prompt.key is None:
            return
        prompt.worker, prompt.ends_s = worker, ends_s
        self._prompts[prompt.prefixes] = prompt
        self._siblings.setdefault((worker, *prompt.key), {})[prompt.prefixes] = prompt
        self._units += _size(prompt)
        while len(self._prompts) > self._max_prompts or self._units > self._max_units:
            self.drop(next(iter(self._prompts)))

    def drop(self, prefixes: PromptPrefixes) -> None:
        """Forget a prompt, because it failed or is counted elsewhere."""
        prompt = self._prompts.pop(prefixes, None)
        if prompt is None or prompt.key is None:
            return
        self._units -= _size(prompt)
        key = (prompt.worker, *prompt.key)
        siblings = self._siblings[key]
        del siblings[prefixes]
        if not siblings:
            del self._siblings[key]

    def move(self, worker: WorkerKey, prefixes: PromptPrefixes, ends_s: float) -> None:
        """Count a known prompt at this worker from now on."""
        prompt = self._prompts.get(prefixes)
        if prompt is not None:
            self.add(worker, prompt, ends_s)

    def settle(self, worker: WorkerKey, prefixes: PromptPrefixes, ends_s: float) -> None:
        """Stop counting a prompt at `ends_s`, because it is computed and the engine's events take over."""
        prompt = self._prompts.get(prefixes)
        if prompt is not None and prompt.worker == worker:
            prompt.ends_s = min(prompt.ends_s, ends_s)

    def expire(self, now: float) -> None:
        """Drop the prompts that have ended."""
        for prompt in [prompt for prompt in self._prompts.values() if prompt.ends_s <= now]:
            self.drop(prompt.prefixes)

    def coming(self, worker: WorkerKey, prompt: PromptAhead, rule: ResumeRule, now: float) -> Coming:
        """Return the tokens that the prompts ahead of this one at a worker will leave for it."""
        siblings = self._siblings.get((worker, *prompt.key)) if prompt.key is not None else None
        if not siblings:
            return NOTHING
        resumable = computed = 0
        align_tokens = rule.align_tokens
        max_tokens = rule.align(prompt.num_tokens - 1)
        checkpoints: set[int] = set()
        expired: list[PromptAhead] = []
        looked_at = 0
        for sibling in reversed(siblings.values()):
            if sibling.ends_s <= now:
                expired.append(sibling)
                continue
            common = min(prompt.common_tokens(sibling), prompt.num_tokens - 1)
            # The rule never returns more than the common tokens.
            if common > resumable:
                resumable = max(resumable, rule.resumable_tokens(sibling.num_tokens, sibling.checkpoints, common))
            computed = max(computed, common - common % align_tokens)
            if sibling.checkpoints:
                checkpoints.update([tokens for tokens in sibling.checkpoints if tokens <= common])
            looked_at += 1
            if looked_at == LOOKED_AT or resumable == max_tokens:
                break
        # Drop expired siblings here, so that each is met only once and looks stay short.
        for sibling in expired:
            self.drop(sibling.prefixes)
        return Coming(resumable, computed, tuple(sorted(checkpoints)[-MAX_CHECKPOINTS:]))


def _size(prompt: PromptAhead) -> int:
    """Return the number of units that are kept of a prompt."""
    return 0 if prompt.units is None else len(prompt.units)
