# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: which requests a step computes, and how many tokens of each.

Scheduling is synchronous and first come, first served, with chunked prefill. It covers text only, without speculative
decoding, LoRA or priorities. Requests are added and aborted only between steps. Source: vLLM 0.32.0 sched/scheduler.py.
No I/O, clock or lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvrouter.simulator.cache.job import Handover, Job
from kvrouter.simulator.cache.kv_cache import KVCache
from kvrouter.simulator.cache.offload import Offload, Transfer
from kvrouter.simulator.cache.peer import Pull


@dataclass(slots=True)
class Step:
    """One step: the work that it does and, once it is settled, its results."""

    # In the order in which they got slots.
    jobs: list[Job] = field(default_factory=list)
    # Tokens of all jobs that prefill.
    prefill_tokens: int = 0
    # Jobs that compute one token behind their prompt.
    decodes: int = 0
    # Transfers that begin with the step.
    loads: list[Transfer] = field(default_factory=list)
    stores: list[Transfer] = field(default_factory=list)
    pulls: list[Pull] = field(default_factory=list)
    # Jobs that sampled a token, and those among them that ended: empty until the step is settled.
    sampled: list[Job] = field(default_factory=list)
    finished: list[Job] = field(default_factory=list)


class Scheduler:
    """The queues of one replica. Every live job is in `waiting`, in `loading` or in `running`."""

    def __init__(self, cache: KVCache, *, max_running: int, chunk_tokens: int, offload: Offload | None = None) -> None:
        if chunk_tokens < 1:
            raise ValueError(f"a step computes at least 1 token, not {chunk_tokens}")
        if max_running < 1:
            raise ValueError(f"at least 1 request runs at a time, not {max_running}")
        self.cache = cache
        self.offload = offload
        self.waiting: deque[Job] = deque()
        # Jobs that have their blocks already and wait for a load to fill them.
        self.loading: deque[Job] = deque()
        self.running: list[Job] = []
        # Jobs that hold blocks for a text that is not fully computed: loads leave room for the rest of it.
        self._unfinished_prefills: set[Job] = set()
        # Prompts that another replica sends, by the number of their transfer. These numbers count down from -1, as
        # those of the tier count up from 0.
        self._receiving: dict[int, Transfer] = {}
        self._new_receipts: list[Transfer] = []
        self._next_receipt = -1
        self.preemptions = 0
        # Tokens looked up and found by admitted requests. As in vLLM, a preempted request's second look-up is not
        # counted.
        self.queried_tokens = 0
        self.hit_tokens = 0
        self._max_running = max_running
        self._chunk_tokens = chunk_tokens
        self._has_mamba = any(shape.kind == "mamba" for shape in cache.geometry.groups)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to compute."""
        return not (self.running or self.waiting or self.loading)

    @property
    def num_waiting(self) -> int:
        """Requests that do not run yet, or no longer run."""
        return len(self.waiting) + len(self.loading)

    def add(self, job: Job) -> None:
        """Queue a request behind the waiting ones."""
        self.waiting.append(job)

    def abort(self, job: Job) -> None:
        """Drop a request and free its blocks. Does nothing to a finished one."""
        if job.finished:
            return
        if job.running:
            self.running.remove(job)
        elif job in self.loading:
            self.loading.remove(job)
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
        for job in step.jobs:
            if job.computed >= job.text.num_tokens:
                self._unfinished_prefills.discard(job)
        if self.offload is not None:
            step.loads, step.stores = self.offload.plan(step.jobs)
            step.pulls = self.offload.plan_pulls()
        step.loads += self._new_receipts
        self._new_receipts = []
        return step

    def settle(self, step: Step, ended: Iterable[int] = ()) -> None:
        """Settle a computed step: sample a token for each job that is computed to its end, and end jobs that are done.

        `ended` are the numbers of the transfers that ended during the step.
        """
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
        for number in ended:
            self._end_transfer(number)

    def quiet_steps(self) -> int:
        """Return how many of the next steps decode one token of each running request and do nothing else.

        In these steps no request is admitted or ends, no block is taken, dropped or committed, and no event arises.
        Returns 0 if that number is unknown.
        """
        running = self.running
        if self.waiting or self.loading or self._receiving:
            return 0
        if self.offload is not None and not self.offload.is_quiet(running):
            return 0
        if not 0 < len(running) <= self._chunk_tokens:
            return 0
        steps = min(job.quiet_until - job.computed for job in running)
        if steps <= 0:
            return 0
        for job in running:
            if job.sampled == 0 or job.text.num_tokens - job.computed != 1:
                return 0
            # The step that samples the last token ends the request.
            steps = min(steps, job.max_tokens - job.sampled - 1)
        return steps

    def skip(self, steps: int) -> None:
        """Do the work of this many steps at once; `quiet_steps` must have returned at least as many."""
        self.cache.step_starts()
        for job in self.running:
            job.computed += steps
            grow = job.text.grow
            for _ in range(steps):
                job.last_token = grow()

    def _end_transfer(self, number: int) -> None:
        transfer: Transfer | None
        if number < 0:
            transfer = self._receiving.pop(number)
        else:
            assert self.offload is not None
            transfer = self.offload.end(number)
        if transfer is not None and transfer.is_load:
            transfer.job.loading = False
            if transfer.job.aborted:
                self.cache.free(transfer.job)

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
        """Get slots for a running request, if need be by preempting the requests that were admitted last.

        Returns False if the request itself had to be preempted.
        """
        while not self.cache.extend(job, tokens):
            victim = self.running.pop()
            self._preempt(victim)
            if victim is job:
                return False
        return True

    def _plan_waiting(self, step: Step, budget: int) -> None:
        """Admit requests while there is room, loaded ones first. No request overtakes one that does not fit."""
        not_yet: list[Job] = []
        still_loading: list[Job] = []
        while budget > 0 and (self.loading or self.waiting) and len(self.running) < self._max_running:
            queue = self.loading or self.waiting
            job = queue[0]
            if job.loading:
                still_loading.append(queue.popleft())
                continue
            tokens = self._resume(job, budget) if queue is self.loading else self._admit(job, budget)
            if tokens is None:
                not_yet.append(queue.popleft())
                continue
            if tokens == 0:
                break
            queue.popleft()
            if job.loading:
                still_loading.append(job)
                continue
            self.running.append(job)
            job.running = True
            if job.computed + tokens < job.text.num_tokens:
                self._unfinished_prefills.add(job)
            self._count(step, job, tokens)
            step.jobs.append(job)
            budget -= tokens
        self.loading.extendleft(reversed(still_loading))
        self.waiting.extendleft(reversed(not_yet))

    def _resume(self, job: Job, budget: int) -> int:
        """Continue a request whose load has ended. Returns the tokens to compute, 0 if it does not fit now."""
        if not job.committed:
            self.cache.commit(job, job.computed)
            job.committed = True
            # The last token is computed in any case, as the next one is sampled from it.
            job.computed = min(job.computed, job.text.num_tokens - 1)
        tokens = self._cut(job, min(job.text.num_tokens - job.computed, budget), job.computed)
        return tokens if tokens and self.cache.resume(job, tokens) else 0

    def _admit(self, job: Job, budget: int) -> int | None:
        """Begin a request, or the load of stored tokens that comes before it.

        Returns the tokens to compute, 0 if the request does not fit now, or None if another transfer must end before it
        is known what can be loaded. If a load begins, any number but 0 is returned.
        """
        total = job.text.num_tokens
        hit = self.cache.find(job.text.hashes, total)
        job.junction = hit.junction
        receives = job.handover is Handover.TAKES and not job.preemptions
        loaded: int | None = job.prompt_tokens - hit.tokens if receives else 0
        if self.offload is not None:
            loadable = self.offload.find(job, hit.tokens)
            loaded = loaded if receives else loadable
        if loaded is None:
            return None
        if loaded:
            tokens = 0
            reserved = sum(self.cache.remaining_blocks(other) for other in self._unfinished_prefills)
        else:
            tokens, reserved = self._cut(job, min(total - hit.tokens, budget), hit.tokens), 0
            if tokens == 0:
                return 0
        if not self.cache.admit(job, hit, tokens, loaded=loaded, reserved=reserved):
            return 0
        job.computed = hit.tokens + loaded
        if job.reused is None:
            job.reused, job.loaded = hit.tokens, loaded
            self.queried_tokens += total
            self.hit_tokens += hit.tokens
        if not loaded:
            return tokens
        if receives:
            self._receive(job, loaded)
        else:
            assert self.offload is not None
            self.offload.begin_load(job, loaded)
        job.loading, job.committed = True, False
        self._unfinished_prefills.add(job)
        return loaded

    def _receive(self, job: Job, tokens: int) -> None:
        transfer = Transfer(self._next_receipt, job, (), tokens)
        self._next_receipt -= 1
        self._receiving[transfer.number] = transfer
        self._new_receipts.append(transfer)

    @staticmethod
    def _count(step: Step, job: Job, tokens: int) -> None:
        if job.computed >= job.prompt_tokens and tokens == 1:
            step.decodes += 1
        else:
            step.prefill_tokens += tokens
        job.computed += tokens

    def _cut(self, job: Job, tokens: int, start: int) -> int:
        """Shorten a prefill chunk so that it ends where a Mamba state can be kept. Returns 0 if no token fits now.

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
        self._unfinished_prefills.discard(job)
        job.computed = 0
        job.running = False
        job.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(job)

    def _finish(self, job: Job) -> None:
        job.finished = True
        job.running = False
        self._unfinished_prefills.discard(job)
        if self.offload is not None:
            self.cache.drop_skipped(job)
            self.offload.ended(job)
        if job.handover is Handover.GIVES and not job.aborted:
            null = self.cache.pool.null
            job.given_blocks = [[block.block_id for block in table.blocks if block is not null] for table in job.tables]
        if not job.loading:
            # If a load is under way, it still writes into the blocks.
            self.cache.free(job)
