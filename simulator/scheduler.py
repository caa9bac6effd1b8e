# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: which requests a step computes, and how many tokens of each.

Synchronous, first come first served, chunked prefill; text only, no speculative decoding, LoRA or priorities. Requests
are added and aborted between steps only. Source: vLLM 0.32.0 sched/scheduler.py. No I/O, clock or lock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvrouter.simulator.job import Job
from kvrouter.simulator.kv_cache import KVCache


@dataclass(slots=True)
class Step:
    """One step: what it computes, and after it what came of it. `jobs` is in the order in which slots were given.

    decodes: how many of the jobs compute one token behind their prompt; the others prefill, `prefill_tokens` together.
    sampled and finished: filled in when it is settled.
    """

    jobs: list[Job] = field(default_factory=list)
    prefill_tokens: int = 0
    decodes: int = 0
    sampled: list[Job] = field(default_factory=list)
    finished: list[Job] = field(default_factory=list)


class Scheduler:
    """The queues of one replica. Every live job is in `waiting` or in `running`."""

    def __init__(self, cache: KVCache, *, max_running: int, chunk_tokens: int) -> None:
        if chunk_tokens < 1:
            raise ValueError(f"a step computes at least 1 token, not {chunk_tokens}")
        if max_running < 1:
            raise ValueError(f"at least 1 request runs at a time, not {max_running}")
        self.cache = cache
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.preemptions = 0
        # Tokens looked up and found by admitted requests, as vLLM counts them: a preempted one's second look-up is not.
        self.queried_tokens = 0
        self.hit_tokens = 0
        self._max_running = max_running
        self._chunk_tokens = chunk_tokens
        self._has_mamba = any(shape.kind == "mamba" for shape in cache.geometry.groups)

    @property
    def idle(self) -> bool:
        """Nothing to compute."""
        return not (self.running or self.waiting)

    def add(self, job: Job) -> None:
        """Queue a request behind those that wait."""
        self.waiting.append(job)

    def abort(self, job: Job) -> None:
        """Forget a request and free what it holds. Nothing happens to one that is finished."""
        if job.finished:
            return
        if job.running:
            self.running.remove(job)
        else:
            self.waiting.remove(job)
        job.aborted = True
        self._finish(job)

    def plan(self) -> Step:
        """Choose the next step's tokens and give them slots: running requests first, then waiting ones."""
        self.cache.step_starts()
        step = Step()
        before = self.preemptions
        budget = self._plan_running(step, self._chunk_tokens)
        if self.preemptions == before:
            self._plan_waiting(step, budget)
        return step

    def settle(self, step: Step) -> None:
        """The step is computed: requests that have all their tokens done sample one more, and some have enough."""
        for job in step.jobs:
            if job.finished or job.computed < job.text.num_tokens:
                continue
            job.last_token = job.text.grow()
            step.sampled.append(job)
            if job.sampled >= job.max_tokens:
                step.finished.append(job)
                self._finish(job)
        if step.finished:
            self.running = [job for job in self.running if not job.finished]

    def _plan_running(self, step: Step, budget: int) -> int:
        running, jobs = self.running, step.jobs
        n = 0
        while n < len(running) and budget > 0:
            job = running[n]
            n += 1
            missing = job.text.num_tokens - job.computed
            if missing == 1 and job.computed < job.quiet_until:
                tokens = 1
            else:
                tokens = self._cut(job, min(missing, budget), job.computed)
                if tokens == 0:
                    continue
                if not self._make_room(job, tokens):
                    break
            self._count(step, job, tokens)
            jobs.append(job)
            budget -= tokens
        return budget

    def _make_room(self, job: Job, tokens: int) -> bool:
        """Slots for a running request, at the cost of those that were admitted last. False: it was itself the last."""
        while not self.cache.extend(job, tokens):
            victim = self.running.pop()
            self._preempt(victim)
            if victim is job:
                return False
        return True

    def _plan_waiting(self, step: Step, budget: int) -> None:
        while budget > 0 and self.waiting and len(self.running) < self._max_running:
            job = self.waiting[0]
            total = job.text.num_tokens
            hit = self.cache.find(job.text.hashes, total)
            job.junction = hit.junction
            tokens = self._cut(job, min(total - hit.tokens, budget), hit.tokens)
            if tokens == 0 or not self.cache.admit(job, hit, tokens):
                return
            self.waiting.popleft()
            self.running.append(job)
            job.running = True
            job.computed = hit.tokens
            if job.reused is None:
                job.reused = hit.tokens
                self.queried_tokens += total
                self.hit_tokens += hit.tokens
            self._count(step, job, tokens)
            step.jobs.append(job)
            budget -= tokens

    @staticmethod
    def _count(step: Step, job: Job, tokens: int) -> None:
        if job.computed >= job.prompt_tokens and tokens == 1:
            step.decodes += 1
        else:
            step.prefill_tokens += tokens
        job.computed += tokens

    def _cut(self, job: Job, tokens: int, start: int) -> int:
        """Shorten a prefill chunk so that it ends where a Mamba state can be kept; 0: no token fits now.

        Source: scheduler.py:443 _mamba_block_aligned_split; no EAGLE, no hits inside a block, no internal checkpoints.
        """
        if not self._has_mamba or start >= job.prefill_end:
            return tokens
        size = self.cache.geometry.scheduler_block_size
        end = start + tokens
        if end < job.prefill_end:
            aligned = end // size * size
            # A block wider than a chunk is filled by several of them.
            if aligned > start or size <= self._chunk_tokens:
                end = aligned
        stops = [(job.text.num_tokens - 1) // size * size]
        if start % size:
            stops.append((start // size + 1) * size)
        if start < job.junction < end:
            stops.append(start + (job.junction - start) // size * size)
        return max(min((stop for stop in stops if start < stop < end), default=end) - start, 0)

    def _preempt(self, job: Job) -> None:
        self.cache.free(job)
        job.computed = 0
        job.running = False
        job.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(job)

    def _finish(self, job: Job) -> None:
        job.finished = True
        job.running = False
        self.cache.free(job)
