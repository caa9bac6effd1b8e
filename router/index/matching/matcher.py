# SPDX-License-Identifier: Apache-2.0
"""The path from a question to every worker's hit: hashes, one call of a judge for each hash space, and the reasons.

The matcher reads the mirror and the workers' views, and writes nothing. Hits are in tokens, cumulative by tier.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrouter.contract.hits import GroupCover, HeldRuns
from kvrouter.contract.tiers import all_on_gpu
from kvrouter.events.patch.messages import PeerAddress
from kvrouter.router.base.common.ids import Place, WorkerKey
from kvrouter.router.index.matching.exchanges import Exchanges
from kvrouter.router.index.matching.held_runs import held_runs
from kvrouter.router.index.matching.judge import Judge
from kvrouter.router.index.matching.mirror import Mirror
from kvrouter.router.index.matching.pull import Pull
from kvrouter.router.index.matching.question import Hit, Limiter, Question
from kvrouter.router.model.kvcache.block_hash import HashScheme, HashSpace
from kvrouter.router.model.kvcache.catalog import Catalog, GroupRule, SpecGroup
from kvrouter.router.model.kvcache.hit_tables import FOUND_LIMITER, GeometryBuilder
from kvrouter.router.model.kvcache.prompt_hasher import SEGMENT_BLOCKS, PromptHasher, SegmentMemory
from kvrouter.router.model.workers.stream_state import StreamState

# Stands for the number of the limiting group in a hit that no group limits.
NO_LIMITER = -1


class WorkerView(msgspec.Struct, frozen=True, eq=False):
    """The facts about a worker, besides its residency, that the matcher must know."""

    worker: WorkerKey
    url: str | None
    state: StreamState
    # Whether its known blocks count (`stream_state.py`).
    credited: bool
    reason: str
    epoch: str
    catalog: Catalog
    # None: no known scheme explains its hashes, so it can only answer questions that bring hashes.
    scheme: HashScheme | None
    lora_paths: dict[str, str]
    # Whether it has no usable events, so that only the prompts sent there are known.
    approximate: bool = False
    # The number of its engine's life, as far as `EngineLives` distinguishes them.
    life: int = 0
    # Where its engine lends blocks of its CPU tier; None if it lends none.
    peer: PeerAddress | None = None


class HashPlan(msgspec.Struct, frozen=True, eq=False):
    """The workers of one hash space, and the judge of their hits.

    A plan is valid for one version of the mirror's places.
    """

    views: tuple[WorkerView, ...]
    # The spec groups of each worker.
    spec_groups: tuple[tuple[SpecGroup, ...], ...]
    # The parts that all hits of each worker share. The states are texts, because an Enum is slow to return its text.
    workers: tuple[WorkerKey, ...]
    states: tuple[str, ...]
    reasons: tuple[str, ...]
    # For each worker, the limiter that each spec group would be, by the judge's number of the group.
    limiters: tuple[dict[int, Limiter], ...]
    judge: Judge
    # Whether no worker can reach beyond a segment of the prompt of which none holds a block.
    stops_early: bool
    # The number of blocks in such a segment.
    segment_blocks: int
    # Whether some of the workers lend each other blocks.
    has_exchanges: bool = False

    @classmethod
    def build(cls, mirror: Mirror, views: Sequence[WorkerView]) -> HashPlan:
        """Build the plan of these workers.

        They must be creditable, in the mirror's current epoch, and have catalogs without a problem. Raises ValueError
        for a worker that is not in the mirror.
        """
        exchanges = Exchanges.among((view.catalog, view.peer) for view in views)
        borrowers = set(exchanges.members.tolist())
        row_of_slot = np.full(mirror.slot_count, -1, np.int32)
        bases = np.zeros(len(views), np.int64)
        builder = GeometryBuilder()
        spec_groups: list[tuple[SpecGroup, ...]] = []
        withheld: list[str] = []
        # The first worker with each combination of catalog and places, because the replicas of a model differ in few
        # things.
        alike: dict[tuple[Catalog, tuple[tuple[Place, int], ...], bool, bool], int] = {}
        firsts: list[int] = []
        row = 0
        for i, view in enumerate(views):
            worker_slots = mirror.worker(view.worker)
            if worker_slots is None:
                raise ValueError(f"{view.worker} is not in the mirror")
            borrows = i in borrowers
            lends_disk = view.peer is not None and view.peer.lends_disk
            first = alike.setdefault((view.catalog, tuple(worker_slots.places.items()), borrows, lends_disk), i)
            firsts.append(first)
            if first == i:
                builder.add(view.catalog, worker_slots.places, borrows=borrows, lends_disk=lends_disk)
                spec_groups.append(view.catalog.spec_groups())
                withheld.append(view.catalog.offload.withheld(worker_slots.places))
            else:
                builder.repeat(first)
                spec_groups.append(spec_groups[first])
                withheld.append(withheld[first])
            bases[i] = row
            for slot in worker_slots.slots:
                row_of_slot[slot] = row
                row += 1
            if not worker_slots.slots:
                # The worker holds nothing, but the rule looks into its first row.
                row += 1
        catalogs = {catalog for catalog, *_ in alike}
        # Without full attention a prefix may be worth something although its beginning is gone.
        stops_early = all(any(group.rule is GroupRule.FULL for group in catalog.spec_groups()) for catalog in catalogs)
        segment = max([SEGMENT_BLOCKS, *map(_chunk_hashes, catalogs)])
        judge = Judge(builder.build(), bases, row_of_slot, row, exchanges)
        limiters: list[dict[int, Limiter]] = []
        for i, first in enumerate(firsts):
            start = judge.spec_start(i)
            limiters.append(limiters[first] if first < i else _limiters(spec_groups[i], start, withheld[i]))
        return cls(
            tuple(views),
            tuple(spec_groups),
            tuple(view.worker for view in views),
            tuple(view.state.value for view in views),
            tuple(view.reason for view in views),
            tuple(limiters),
            judge,
            stops_early,
            segment,
            bool(borrowers),
        )


def _chunk_hashes(catalog: Catalog) -> int:
    """Return the number of hashes in the largest block or chunk of a catalog."""
    chunk = max(group.block_size for group in catalog.cacheable) * (catalog.blocks_per_chunk or 1)
    return chunk // catalog.hash_block_size


class HashPlans(msgspec.Struct, frozen=True, eq=False):
    """All workers of a model: those that can be judged, by hash space, and the others with the reason."""

    # The workers with a known scheme, by scheme and hash block size.
    by_scheme: dict[tuple[HashScheme, int], HashPlan]
    # A plan of all workers that are not in `withheld`, for questions that bring block hashes instead of tokens. None
    # if there is no such worker.
    by_hash: HashPlan | None
    # The largest hash block size of these workers, in tokens; 0 if there is none.
    hash_block_size: int
    # The workers that get no credit at all, with the reason.
    withheld: tuple[tuple[WorkerView, str], ...]
    # The workers without a known scheme, with the reason.
    unhashable: tuple[tuple[WorkerView, str], ...]
    has_approximate: bool

    @classmethod
    def build(cls, mirror: Mirror, views: Iterable[WorkerView]) -> HashPlans:
        """Build the plans of all workers of a model."""
        spaces: dict[tuple[HashScheme, int], list[WorkerView]] = {}
        judged: list[WorkerView] = []
        withheld: list[tuple[WorkerView, str]] = []
        unhashable: list[tuple[WorkerView, str]] = []
        has_approximate = False
        for view in views:
            has_approximate = has_approximate or view.approximate
            reason = _withheld(mirror, view)
            if reason is not None:
                withheld.append((view, reason))
                continue
            judged.append(view)
            if view.scheme is None:
                unhashable.append((view, view.reason))
            else:
                spaces.setdefault((view.scheme, view.catalog.hash_block_size), []).append(view)
        by_scheme = {space: HashPlan.build(mirror, members) for space, members in spaces.items()}
        # All workers of the usual model have one hash space, whose plan then serves for both.
        common = [plan for plan in by_scheme.values() if len(plan.views) == len(judged)]
        return cls(
            by_scheme,
            common[0] if common else HashPlan.build(mirror, judged) if judged else None,
            max((view.catalog.hash_block_size for view in judged), default=0),
            tuple(withheld),
            tuple(unhashable),
            has_approximate,
        )


class HitTable(msgspec.Struct, frozen=True, eq=False):
    """The hits of all workers of a model where one plan has all workers that can be judged."""

    plan: HashPlan
    # The hits of the workers of `plan`, as `Judge.judge` returns them.
    found: NDArray[np.int64]
    # The workers without a hit, with the reason.
    none: tuple[tuple[WorkerView, str], ...]

    def hits(self) -> list[Hit]:
        """Return one hit for each worker, in no particular order."""
        return [*(_no_hit(view, reason) for view, reason in self.none), *_hits(self.plan, self.found)]


def _withheld(mirror: Mirror, view: WorkerView) -> str | None:
    """Return why a worker gets no credit at all, or None if it gets some."""
    if not view.credited and view.state is not StreamState.UNHASHABLE:
        return view.reason or f"no credit while {view.state.value}"
    if view.catalog.problem is not None:
        return view.catalog.problem
    worker_slots = mirror.worker(view.worker)
    if worker_slots is None or worker_slots.epoch != view.epoch:
        return "its new epoch is not in the index yet"
    return None


class Matcher:
    """The calculation of every worker's hit for a question, from the blocks in one mirror.

    It is not thread-safe, because all calls share the cache of hashed segments.
    """

    def __init__(self, mirror: Mirror, memory: SegmentMemory) -> None:
        self._mirror = mirror
        self._memory = memory

    def match(self, question: Question, plans: HashPlans) -> list[Hit]:
        """Return the hit of every worker of `plans`, in no particular order."""
        hits = [_no_hit(view, reason) for view, reason in plans.withheld]
        if question.block_hashes is not None:
            if plans.by_hash is not None:
                hits += self._judge(plans.by_hash, question.block_hashes, question)
            return hits
        hits += [_no_hit(view, reason) for view, reason in plans.unhashable]
        for (scheme, block_size), plan in plans.by_scheme.items():
            hits += self._match_space(question, plan, scheme, block_size)
        return hits

    def hash_steps(self, question: Question, plans: HashPlans) -> Iterator[None]:
        """Hash the prompt, one segment at each step, before a `match` of the same question.

        Changes of the mirror meanwhile do no harm: a match continues to hash from here, until no worker can reach
        further.
        """
        for (scheme, block_size), plan in plans.by_scheme.items():
            for lora in _adapters_of(question, plan):
                space = HashSpace(scheme, block_size, lora, question.cache_salt)
                hasher = question.hashers.get(space)
                if hasher is None:
                    hasher = question.hashers[space] = self._hasher(question, plan, space)
                while self._reaches(question, plan, hasher.extend()):
                    yield

    def table(self, question: Question, plans: HashPlans) -> HitTable | None:
        """Return the hits that `match` would return, without explanations, as a table.

        Return None if the hits take more than one plan, depend on more than hashes, or have pulls, which no table shows.
        """
        table = self._table(question, plans)
        if table is None or not table.plan.has_exchanges:
            return table
        pulls = table.plan.judge.pulls(table.found, question.num_tokens, 0)
        return None if len(pulls) else table

    def _table(self, question: Question, plans: HashPlans) -> HitTable | None:
        """Return the hits as a table without pulls; None as for `table`."""
        if question.block_hashes is not None:
            plan = plans.by_hash
            if plan is None:
                return None
            return HitTable(plan, self._find(plan, question.block_hashes, question), plans.withheld)
        if plans.has_approximate or len(plans.by_scheme) != 1 or question.lora_name is not None:
            return None
        (((scheme, block_size), plan),) = plans.by_scheme.items()
        hashes = self._hashes(question, plan, HashSpace(scheme, block_size, None, question.cache_salt))
        return HitTable(plan, self._find(plan, hashes, question), plans.withheld + plans.unhashable)

    def match_list(self, prompts: Sequence[Question], plans: HashPlans, *, is_last_known: bool) -> list[Hit] | None:
        """Return for each worker the sum of its hits for several prompts, without pulls.

        A request names one source for all its prompts, and the sum does not say what one source adds to each of them.
        Return None if the hits of a prompt take more than one plan or depend on more than hashes.

        Args:
            prompts: The prompts, all with the same adapter and salt.
            plans: The plans of the workers.
            is_last_known: Whether the last of these prompts is also the last one of the list.
        """
        tables: list[HitTable] = []
        for prompt in prompts:
            table = self._table(prompt, plans)
            if table is None:
                return None
            tables.append(table)
        found: NDArray[np.int64] = np.sum([table.found for table in tables], axis=0)
        # No single group limits a sum.
        found[:, FOUND_LIMITER] = NO_LIMITER
        whole = HitTable(tables[0].plan, found, tables[0].none).hits()
        return [
            msgspec.structs.replace(hit, last_tokens=last.tokens if is_last_known else None)
            for hit, last in zip(whole, tables[-1].hits(), strict=True)
        ]

    def _find(self, plan: HashPlan, hashes: NDArray[np.uint64], question: Question) -> NDArray[np.int64]:
        return plan.judge.judge(self._mirror.table, hashes, question.num_tokens)

    def _match_space(self, question: Question, plan: HashPlan, scheme: HashScheme, block_size: int) -> list[Hit]:
        if question.token_ids is None:
            raise ValueError("a question needs token_ids or block_hashes")
        if question.lora_name is None:
            hashes = self._hashes(question, plan, HashSpace(scheme, block_size, None, question.cache_salt))
            return self._judge(plan, hashes, question)
        hits: list[Hit] = []
        by_path: dict[str, list[WorkerView]] = {}
        for view in plan.views:
            path = view.lora_paths.get(question.lora_name)
            if path is None:
                hits.append(
                    _no_hit(view, f"the path of LoRA {question.lora_name!r} is part of its hashes and was not declared")
                )
            else:
                by_path.setdefault(path, []).append(view)
        for path, views in by_path.items():
            part = plan if len(views) == len(plan.views) else HashPlan.build(self._mirror, views)
            space = HashSpace(scheme, block_size, (question.lora_name, path), question.cache_salt)
            hits += self._judge(part, self._hashes(question, part, space), question)
        return hits

    def _hashes(self, question: Question, plan: HashPlan, space: HashSpace) -> NDArray[np.uint64]:
        """Hash the prompt segment by segment, until no worker can reach further."""
        hasher = question.hashers.get(space) or self._hasher(question, plan, space)
        while self._reaches(question, plan, hasher.extend()):
            pass
        return hasher.hashes

    def _hasher(self, question: Question, plan: HashPlan, space: HashSpace) -> PromptHasher:
        assert question.token_ids is not None
        return PromptHasher(space, question.token_ids, self._memory, plan.segment_blocks, question.items)

    def _reaches(self, question: Question, plan: HashPlan, segment: NDArray[np.uint64]) -> bool:
        """Return whether a worker can reach beyond this segment of the prompt; an empty one is behind the end."""
        if not len(segment):
            return False
        # A question where every block lies also wants blocks that no worker can reach.
        return not plan.stops_early or question.held or plan.judge.any_resident(self._mirror.table, segment)

    def _judge(self, plan: HashPlan, hashes: NDArray[np.uint64], question: Question) -> list[Hit]:
        numbers = self._find(plan, hashes, question)
        hits = _hits_with_pulls(plan, numbers, hashes, question) if plan.has_exchanges else _hits(plan, numbers)
        if question.explain:
            hits = [
                msgspec.structs.replace(hit, groups=tuple(_covers(plan, w, question.num_tokens)))
                for w, hit in enumerate(hits)
            ]
        if question.held:
            hits = [msgspec.structs.replace(hit, held=self._held(plan, w, question)) for w, hit in enumerate(hits)]
        return hits

    def _held(self, plan: HashPlan, w: int, question: Question) -> tuple[HeldRuns, ...]:
        """Return where the blocks of the last question lie at worker `w`."""
        view = plan.views[w]
        worker_slots = self._mirror.worker(view.worker)
        if worker_slots is None:
            return ()
        bits = plan.judge.place_bits(w, len(worker_slots.slots))
        return tuple(held_runs(view.catalog, worker_slots.places, bits, question.num_tokens))


def _adapters_of(question: Question, plan: HashPlan) -> Iterable[tuple[str, str] | None]:
    """Return name and path of the question's adapter, as they are part of its hashes at the plan's workers."""
    name = question.lora_name
    if name is None:
        return (None,)
    return {(name, path) for view in plan.views if (path := view.lora_paths.get(name)) is not None}


def _hits(plan: HashPlan, numbers: NDArray[np.int64]) -> list[Hit]:
    """Return the hits of the plan's workers from `numbers`, which are as `Judge.judge` returns them."""
    # A loop in Python would take a fifth longer (16 workers: 4.1 us in place of 3.4).
    return list(map(Hit, *_fields(plan, numbers)))


def _fields(plan: HashPlan, numbers: NDArray[np.int64]) -> tuple[Iterable[Any], ...]:
    """Return the first fields of the hits of the plan's workers."""
    *tiers, groups, full_attention = numbers.T.tolist()
    by_tier, limiters = zip(*tiers, strict=True), map(dict.get, plan.limiters, groups)
    return plan.workers, by_tier, plan.states, plan.reasons, limiters, full_attention


def _hits_with_pulls(
    plan: HashPlan, numbers: NDArray[np.int64], hashes: NDArray[np.uint64], question: Question
) -> list[Hit]:
    """Return the hits of the plan's workers, some of which lend each other blocks, with their pulls."""
    # Prompts that end differently have different sources among equal ones.
    turn = int(hashes[-1]) % len(plan.views) if len(hashes) else 0
    found = plan.judge.pulls(numbers, question.num_tokens, turn).tolist()
    if not found:
        return _hits(plan, numbers)
    pulls: list[tuple[Pull, ...]] = [()] * len(plan.workers)
    for worker, source, tokens in found:
        pulls[worker] += (Pull(plan.workers[source], tokens),)
    # The fields between the first ones and the pulls have their defaults.
    return list(map(Hit, *_fields(plan, numbers), repeat(False), repeat(()), repeat(()), repeat(None), pulls))


def sum_of(of_prompts: Sequence[Sequence[Hit]], *, is_last_known: bool) -> list[Hit]:
    """Return for each worker the sum of its hits for several prompts. No single group limits it, and it has no pulls.

    Args:
        of_prompts: The hits of each prompt, all in the same order of workers.
        is_last_known: Whether the last hits are those of the list's last prompt.
    """
    return [
        msgspec.structs.replace(
            hits[-1],
            by_tier=tuple(map(sum, zip(*[hit.by_tier for hit in hits], strict=True))),
            full_attention=sum([hit.full_attention for hit in hits]),
            limiter=None,
            groups=(),
            pulls=(),
            last_tokens=hits[-1].tokens if is_last_known else None,
        )
        for hits in zip(*of_prompts, strict=True)
    ]


def _no_hit(view: WorkerView, reason: str) -> Hit:
    return Hit(view.worker, all_on_gpu(0), view.state.value, reason)


def _covers(plan: HashPlan, w: int, num_tokens: int) -> Iterable[GroupCover]:
    """Yield how far each group alone would let worker `w` reach in the last question."""
    for s, spec_group in enumerate(plan.spec_groups[w], plan.judge.spec_start(w)):
        covered = plan.judge.cover(w, s, num_tokens)
        for group in spec_group.members:
            yield GroupCover(group.group_idx, group.kind, covered)


def _limiters(spec_groups: Sequence[SpecGroup], start: int, withheld: str) -> dict[int, Limiter]:
    """Return the limiters of a worker by the judge's numbers of its spec groups, of which `start` is the first."""
    limiters = {}
    for number, spec_group in enumerate(spec_groups, start):
        group = spec_group.first
        span_tokens = (
            group.attention_chunk_size if spec_group.rule is GroupRule.CHUNKED_LOCAL else group.sliding_window
        ) or 0
        limiters[number] = Limiter(group.group_idx, group.kind, spec_group.rule, span_tokens, withheld)
    return limiters
