# SPDX-License-Identifier: Apache-2.0
"""From a question to the hit of every worker: hashes, one call of a judge for each hash space, and the reasons.

Reads the mirror and the workers' views; writes nothing. Hits are in tokens, cumulative by tier.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrouter.router.base.common.ids import Place, WorkerKey
from kvrouter.router.index.matching.held_runs import HeldRuns, held_runs
from kvrouter.router.index.matching.judge import Judge
from kvrouter.router.index.matching.mirror import Mirror
from kvrouter.router.index.matching.question import GroupCover, Hit, Limiter, Question
from kvrouter.router.model.kvcache.block_hash import HashScheme, HashSpace
from kvrouter.router.model.kvcache.catalog import Catalog, GroupRule, SpecGroup
from kvrouter.router.model.kvcache.hit_tables import GeometryBuilder
from kvrouter.router.model.kvcache.prompt_hasher import SEGMENT_BLOCKS, PromptHasher, SegmentMemory
from kvrouter.router.model.workers.stream_state import StreamState


class WorkerView(msgspec.Struct, frozen=True, eq=False):
    """What the matcher must know of a worker besides its residency.

    credited: whether what is known of it counts (`stream_state.py`). scheme None: no known scheme explains its hashes,
    so only questions that bring hashes can be answered."""

    worker: WorkerKey
    url: str | None
    state: StreamState
    credited: bool
    reason: str
    epoch: str
    catalog: Catalog
    scheme: HashScheme | None
    lora_paths: dict[str, str]
    # It has no usable events: only what was sent there is known.
    approximate: bool = False
    # The number of its engine's life, as far as `EngineLives` distinguishes them.
    life: int = 0


class HashPlan(msgspec.Struct, frozen=True, eq=False):
    """Workers of one hash space, and the judge of their hits. Valid for one version of the mirror's places."""

    views: tuple[WorkerView, ...]
    # The text of each worker's state, as an Enum takes its time to say it.
    states: tuple[str, ...]
    # Of each worker: its spec groups, and by the judge's number of each, what it is as the one that limits a hit.
    spec_groups: tuple[tuple[SpecGroup, ...], ...]
    limiters: tuple[dict[int, Limiter], ...]
    judge: Judge
    stops_early: bool
    segment_blocks: int

    @classmethod
    def build(cls, mirror: Mirror, views: Sequence[WorkerView]) -> HashPlan:
        """views: creditable workers of the mirror's current epoch, catalogs without a problem."""
        row_of_slot = np.full(mirror.slot_count, -1, np.int32)
        bases = np.zeros(len(views), np.int64)
        builder = GeometryBuilder()
        spec_groups: list[tuple[SpecGroup, ...]] = []
        withheld: list[str] = []
        # The replicas of a model differ in few things: the first worker of each catalog and places.
        alike: dict[tuple[Catalog, tuple[tuple[Place, int], ...]], int] = {}
        firsts: list[int] = []
        row = 0
        for i, view in enumerate(views):
            known = mirror.worker(view.worker)
            if known is None:
                raise ValueError(f"{view.worker} is not in the mirror")
            first = alike.setdefault((view.catalog, tuple(known.places.items())), i)
            firsts.append(first)
            if first == i:
                builder.add(view.catalog, known.places)
                spec_groups.append(view.catalog.spec_groups())
                withheld.append(view.catalog.offload.withheld(known.places))
            else:
                builder.repeat(first)
                spec_groups.append(spec_groups[first])
                withheld.append(withheld[first])
            bases[i] = row
            for slot in known.slots:
                row_of_slot[slot] = row
                row += 1
            if not known.slots:
                # It holds nothing, but the rule looks into its first row.
                row += 1
        catalogs = {catalog for catalog, _ in alike}
        # Without full attention a prefix may be worth something although its beginning is gone.
        stops_early = all(any(group.rule is GroupRule.FULL for group in one.spec_groups()) for one in catalogs)
        segment = max([SEGMENT_BLOCKS, *map(_chunk_hashes, catalogs)])
        judge = Judge(builder.build(), bases, row_of_slot, row)
        limiters: list[dict[int, Limiter]] = []
        for i, first in enumerate(firsts):
            start = judge.spec_start(i)
            limiters.append(limiters[first] if first < i else _limiters(spec_groups[i], start, withheld[i]))
        states = tuple(view.state.value for view in views)
        return cls(tuple(views), states, tuple(spec_groups), tuple(limiters), judge, stops_early, segment)


def _chunk_hashes(catalog: Catalog) -> int:
    """Hashes of the largest block or chunk."""
    chunk = max(group.block_size for group in catalog.cacheable) * (catalog.blocks_per_chunk or 1)
    return chunk // catalog.hash_block_size


class HashPlans(msgspec.Struct, frozen=True, eq=False):
    """All workers of a model: those that can be judged, by hash space, and the others with the reason."""

    by_scheme: dict[tuple[HashScheme, int], HashPlan]
    by_hash: HashPlan | None
    # The largest of all workers, in tokens; 0 while no catalog is whole.
    hash_block_size: int
    withheld: tuple[tuple[WorkerView, str], ...]
    unhashable: tuple[tuple[WorkerView, str], ...]
    has_approximate: bool

    @classmethod
    def build(cls, mirror: Mirror, views: Iterable[WorkerView]) -> HashPlans:
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
        # All workers of the usual model have one hash space.
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
    """The hits of all workers of a model where one plan has all that can be judged.

    found: of each worker of `plan`, as `Judge.judge` returns it. none: the workers without a hit, with the reason."""

    plan: HashPlan
    found: NDArray[np.int64]
    none: tuple[tuple[WorkerView, str], ...]

    def hits(self) -> list[Hit]:
        """One for each worker, in no particular order."""
        return [*(_no_hit(view, reason) for view, reason in self.none), *_hits(self.plan, self.found)]


def _withheld(mirror: Mirror, view: WorkerView) -> str | None:
    """Why this worker gets no credit at all, None when it does."""
    if not view.credited and view.state is not StreamState.UNHASHABLE:
        return view.reason or f"no credit while {view.state.value}"
    if view.catalog.problem is not None:
        return view.catalog.problem
    known = mirror.worker(view.worker)
    if known is None or known.epoch != view.epoch:
        return "its new epoch is not in the index yet"
    return None


class Matcher:
    """Answers questions from a mirror. Not thread-safe: the segment memory is shared."""

    def __init__(self, mirror: Mirror, memory: SegmentMemory) -> None:
        self._mirror = mirror
        self._memory = memory

    def match(self, question: Question, plans: HashPlans) -> list[Hit]:
        """The hit of every worker of `plans`, in no particular order."""
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
        """Hashes the prompt, a segment a step, for a `match` of the same question. What changes in the mirror meanwhile
        is no matter: a match hashes on from here, until no worker can reach further."""
        for (scheme, block_size), plan in plans.by_scheme.items():
            for lora in _adapters_of(question, plan):
                space = HashSpace(scheme, block_size, lora, question.cache_salt)
                hasher = question.hashers.get(space)
                if hasher is None:
                    hasher = question.hashers[space] = self._hasher(question, plan, space)
                while self._reaches(question, plan, hasher.extend()):
                    yield

    def table(self, question: Question, plans: HashPlans) -> HitTable | None:
        """The same hits, without an explanation. None where they take more than one plan or hang on more than hashes."""
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
        """Whether a worker can reach beyond this segment of the prompt; an empty one is behind its end."""
        if not len(segment):
            return False
        # A question for every block also wants blocks that no worker can reach.
        return not plan.stops_early or question.held or plan.judge.any_resident(self._mirror.table, segment)

    def _judge(self, plan: HashPlan, hashes: NDArray[np.uint64], question: Question) -> list[Hit]:
        found = self._find(plan, hashes, question)
        hits = _hits(plan, found)
        if question.explain:
            hits = [
                msgspec.structs.replace(hit, groups=tuple(_covers(plan, w, question.num_tokens)))
                for w, hit in enumerate(hits)
            ]
        if question.held:
            hits = [msgspec.structs.replace(hit, held=self._held(plan, w, question)) for w, hit in enumerate(hits)]
        return hits

    def _held(self, plan: HashPlan, w: int, question: Question) -> tuple[HeldRuns, ...]:
        """Where the blocks of the question judged last lie at worker `w`."""
        view = plan.views[w]
        known = self._mirror.worker(view.worker)
        if known is None:
            return ()
        bits = plan.judge.place_bits(w, len(known.slots))
        return tuple(held_runs(view.catalog, known.places, bits, question.num_tokens))


def _adapters_of(question: Question, plan: HashPlan) -> Iterable[tuple[str, str] | None]:
    """Name and path of the question's adapter, as they are part of its hashes at the plan's workers."""
    name = question.lora_name
    if name is None:
        return (None,)
    return {(name, path) for view in plan.views if (path := view.lora_paths.get(name)) is not None}


def _hits(plan: HashPlan, found: NDArray[np.int64]) -> list[Hit]:
    """found: of each worker of the plan, as `Judge.judge` returns it."""
    return [
        Hit(view.worker, gpu, cpu, disk, state, view.reason, (), limiters.get(limiter), False, covered)
        for view, state, limiters, (gpu, cpu, disk, limiter, covered) in zip(
            plan.views, plan.states, plan.limiters, found.tolist(), strict=True
        )
    ]


def _no_hit(view: WorkerView, reason: str) -> Hit:
    return Hit(view.worker, 0, 0, 0, view.state.value, reason)


def _covers(plan: HashPlan, w: int, num_tokens: int) -> Iterable[GroupCover]:
    """How far each group alone would let worker `w` reach, in the question judged last."""
    for s, spec_group in enumerate(plan.spec_groups[w], plan.judge.spec_start(w)):
        covered = plan.judge.cover(w, s, num_tokens)
        for group in spec_group.members:
            yield GroupCover(group.group_idx, group.kind, covered)


def _limiters(spec_groups: Sequence[SpecGroup], start: int, withheld: str) -> dict[int, Limiter]:
    """By the judge's numbers of a worker's spec groups, of which `start` is the first."""
    found = {}
    for number, spec_group in enumerate(spec_groups, start):
        one = spec_group.first
        span_tokens = (
            one.attention_chunk_size if spec_group.rule is GroupRule.CHUNKED_LOCAL else one.sliding_window
        ) or 0
        found[number] = Limiter(one.group_idx, one.kind, spec_group.rule, span_tokens, withheld)
    return found
