# SPDX-License-Identifier: Apache-2.0
"""Transfers between a replica's GPU and its CPU tier, as the scheduler side of vLLM's OffloadingConnector plans them.

Prompts are stored as their blocks become full, and loaded where the tier reaches further than the GPU's cache. Chunks that
neither holds are fetched into the tier first, from the replica that the request names as its source (`peer.py`). Chunks
have one block, and only prompts are stored (vLLM's defaults, without EAGLE). A prompt that is aborted during its
prefill keeps no shorter tail. Source: vLLM 0.32.0 kv_connector/v1/offloading/scheduler.py. No I/O or clock: the caller
reports when a transfer has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile

from kvrouter.simulator.cache.cpu_tier import CacheEvent, CpuTier, Uses
from kvrouter.simulator.cache.job import Job
from kvrouter.simulator.cache.kv_cache import KVCache
from kvrouter.simulator.cache.peer import Lender, PeerCounts, PeerMiss, PeerWish, Pull
from kvrouter.simulator.cache.pool import Block, Key
from kvrouter.simulator.cache.shapes import FULL_KINDS, WINDOW_KINDS, GroupShape

# Whether a chunk can be loaded, by its key; None while that is not certain yet.
LookUp = Callable[[Key], bool | None]


@dataclass(frozen=True, slots=True)
class Transfer:
    """A load or a store of chunks that is under way."""

    number: int
    job: Job
    keys: tuple[Key, ...]
    # How much of the text a load brings, in tokens; 0 for a store.
    tokens: int = 0

    @property
    def is_load(self) -> bool:
        """Whether the transfer goes from the tier to the GPU."""
        return self.tokens > 0


@dataclass(slots=True)
class _Request:
    """The offloading state of one request."""

    # By group, in the order of allocation; None for the null block and for one that another request has taken since.
    blocks: list[list[Block | None]]
    # By group, the first block that has not been offered to the tier.
    next_stored: list[int]
    uses: Uses = field(default_factory=Uses)
    transfers: set[int] = field(default_factory=set)
    # The length of the hit on the GPU, in tokens.
    local_tokens: int = 0
    # Whether the whole prompt has been offered, so that nothing more of it is stored.
    offered: bool = False


class Offload:
    """The decisions on stores and loads. Every live job has a `_Request` from its first look-up to its end."""

    def __init__(self, cache: KVCache, num_chunks: int) -> None:
        self.tier = CpuTier(num_chunks)
        self.lender = Lender(self.tier)
        self.peer_counts = PeerCounts()
        self._cache = cache
        self._shapes = cache.geometry.groups
        full = [g for g, shape in enumerate(self._shapes) if shape.kind in FULL_KINDS]
        sparse = [g for g, shape in enumerate(self._shapes) if shape.kind not in FULL_KINDS]
        # The largest window comes first, as it is the most likely to shorten a hit.
        self._sparse = sorted(sparse, key=lambda g: -self._window_chunks(self._shapes[g]))
        self._order = full + self._sparse
        self._mamba_size = next((shape.block_size for shape in self._shapes if shape.kind == "mamba"), None)
        sizes = {self._shapes[g].block_size for g in full}
        # Every load ends at a multiple of this many tokens, so a chunk that no load can use is not stored. None: groups
        # of full attention have different block sizes, so there is no such single number.
        self._align = sizes.pop() if len(sizes) == 1 else None
        if not full:
            self._align = max(shape.block_size for shape in self._shapes)
        self._requests: dict[Job, _Request] = {}
        self._transfers: dict[int, Transfer] = {}
        self._loading: set[Key] = set()
        self._ended: list[Job] = []
        self._allocated: set[Block] = set()
        self._new_loads: list[Transfer] = []
        self._next_number = 0
        # Requests that wait for chunks of other replicas.
        self._waiting: dict[Job, PeerWish] = {}
        self._pulls: dict[int, Pull] = {}
        # Chunks that arrive too late for the requests for which they are fetched.
        self._overdue: set[Key] = set()

    @property
    def busy(self) -> bool:
        """Whether transfers are under way, or chunks of an ended request are still to be offered."""
        return bool(self._transfers or self._ended or self._pulls)

    def is_quiet(self, jobs: Iterable[Job]) -> bool:
        """Return whether steps that decode these jobs and take no block would transfer nothing: answers are not stored."""
        return not self.busy and all(self._requests[job].offered for job in jobs)

    def find(self, job: Job, local_tokens: int) -> int | None:
        """Return the tokens that can be loaded beyond `local_tokens`, or None if a transfer must end first.

        After None, the caller tries again in the next step.
        """
        request = self._requests.get(job)
        if request is None:
            groups = len(self._shapes)
            request = self._requests[job] = _Request([[] for _ in range(groups)], [0] * groups)
        request.blocks = [[] for _ in self._shapes]
        if request.transfers:
            return None
        request.local_tokens = local_tokens
        wish = job.peer
        if wish is None:
            return self.ask(job.text.hashes, job.text.num_tokens, local_tokens)
        wish.needed.clear()
        wish.missing.clear()
        loadable = self._ask(job.text.hashes, job.text.num_tokens, local_tokens, partial(self._look_up, wish))
        if loadable is None or wish.missing:
            # As in the engine, chunks that the look-up met are fetched, also for a request that does not wait for them.
            self._waiting[job] = wish
        else:
            self._waiting.pop(job, None)
        return loadable

    def begin_load(self, job: Job, loaded_tokens: int) -> None:
        """Begin the load of `loaded_tokens` tokens behind the hit on the GPU; the job has its blocks already."""
        request = self._requests[job]
        reached = request.local_tokens + loaded_tokens
        keys: dict[Key, int] = {}
        for g, (shape, table) in enumerate(zip(self._shapes, job.tables, strict=True)):
            self._allocated.update(block for block in table.blocks if block is not self._cache.pool.null)
            size = shape.block_size
            end = -(-reached // size)
            first = -(-request.local_tokens // size)
            while first < end and (table.blocks[first] is self._cache.pool.null or table.blocks[first].keys):
                first += 1
            keys |= {self._key(job.text.hashes, g, i): (i + 1) * size for i in range(first, end)}
            request.next_stored[g] = end
        self.tier.begin_load(keys)
        self._waiting.pop(job, None)
        request.uses.ends |= keys
        self._loading.update(keys)
        self._new_loads.append(self._transfer(job, keys, loaded_tokens))

    def ended(self, job: Job) -> None:
        """Note that a request has ended, finished or aborted."""
        if job in self._requests:
            self._ended.append(job)

    def plan(self, jobs: Sequence[Job]) -> tuple[list[Transfer], list[Transfer]]:
        """Return the loads and the stores that begin with a step that computes these jobs."""
        if self._waiting or self.tier.awaited:
            self.tier.awaited = frozenset().union(*(wish.needed for wish in self._waiting.values()))
        self._note_blocks(jobs)
        stores = self._store_states()
        for job in (*jobs, *self._ended):
            store = self._store(job)
            if store is not None:
                stores.append(store)
        for job in self._ended:
            self.tier.used(self._requests[job].uses)
            del self._requests[job]
            self._waiting.pop(job, None)
        self._ended.clear()
        self._allocated.clear()
        loads, self._new_loads = self._new_loads, []
        return loads, stores

    def plan_pulls(self) -> list[Pull]:
        """Return the fetches from other replicas that begin with the step."""
        if not self._waiting:
            return []
        for wish in self._waiting.values():
            self.query(wish)
        pulls = [pull for wish in self._waiting.values() if wish.missing and (pull := self._pull(wish))]
        self._waiting = {job: wish for job, wish in self._waiting.items() if job.reused is None}
        return pulls

    def end(self, number: int) -> Transfer | None:
        """End a transfer, and return it; None if it came from another replica."""
        if number in self._pulls:
            self._end_pull(self._pulls[number])
            return None
        transfer = self._transfers.pop(number)
        if transfer.is_load:
            self.tier.end_load(transfer.keys)
            self._loading.difference_update(transfer.keys)
        else:
            self.tier.end_store(transfer.keys)
        if transfer.job in self._requests:
            self._requests[transfer.job].transfers.discard(number)
        return transfer

    def take_events(self) -> list[CacheEvent]:
        """Return the chunks that arrived in the tier and left it since the last call."""
        return self.tier.take_events()

    # Look-ups

    def ask(self, hashes: Sequence[bytes], num_tokens: int, local_tokens: int) -> int | None:
        """Return what `find` would return for such a prompt. Changes nothing.

        Requests that name a source are left aside.
        """
        return self._ask(hashes, num_tokens, local_tokens, self.tier.lookup)

    def reach(self, hashes: Sequence[bytes], num_tokens: int, local_tokens: int, look_up: LookUp) -> int:
        """Return the tokens that could be loaded beyond `local_tokens` if the chunks were those that `look_up` finds."""
        return self._ask(hashes, num_tokens, local_tokens, look_up, waits=False) or 0

    def _ask(
        self, hashes: Sequence[bytes], num_tokens: int, local_tokens: int, look_up: LookUp, waits: bool = True
    ) -> int | None:
        """Return the tokens that can be loaded beyond `local_tokens`, or None if a transfer must end first.

        The groups shorten the hit in turn until it no longer changes. Source: _lookup_complete_chunks.
        """
        limit = num_tokens
        if self._sparse:
            limit -= 1
            if self._mamba_size:
                limit -= limit % self._mamba_size
        hit, deferred = 0, False
        groups: Sequence[int] = self._order
        while groups:
            looked_at_sparse = False
            turn, groups = groups, ()
            for g in turn:
                shape = self._shapes[g]
                size, chunks = shape.block_size, num_tokens // shape.block_size
                limit = min(limit, chunks * size)
                if limit - local_tokens < size:
                    return 0
                start, end = local_tokens // size, min(-(-limit // size), chunks)
                run = self._run(hashes, g, start, end, limit, look_up)
                if run == 0:
                    return 0
                if run is None:
                    deferred = True
                else:
                    limit = min(limit, size * (start + run))
                new = limit - local_tokens
                if new < size:
                    return 0
                if new < hit:
                    if deferred:
                        deferred, groups = False, self._order
                    elif looked_at_sparse and not groups:
                        groups = self._sparse
                looked_at_sparse |= shape.kind not in FULL_KINDS
                hit = new
        if deferred or (waits and self._waits_for_load(hashes, local_tokens, hit)):
            return None
        return hit

    def _run(self, hashes: Sequence[bytes], g: int, start: int, end: int, limit: int, look_up: LookUp) -> int | None:
        shape = self._shapes[g]
        # No more chunks are looked up than the engine does, as a look-up may fetch them.
        if shape.kind in FULL_KINDS:
            lookups = map(look_up, (self._key(hashes, g, i) for i in range(start, end)))
            found = list(takewhile(lambda lookup: lookup is not False, lookups))
            return None if None in found else len(found)
        window = self._window_chunks(shape)
        required = self._load_window(shape, min(limit, end * shape.block_size))
        run, pending = 0, False
        for i in range(end - 1, start - 1, -1):
            lookup = look_up(self._key(hashes, g, i))
            if lookup is False:
                run, pending, required = 0, False, window
            else:
                run += 1
                pending |= lookup is None
            if run == required:
                return None if pending else i - start + required
        return None if pending else run

    def _waits_for_load(self, hashes: Sequence[bytes], local_tokens: int, hit: int) -> bool:
        """Return whether another request is loading the same chunks: then this one waits and finds them on the GPU."""
        if not self._loading:
            return False
        for g, shape in enumerate(self._shapes):
            size = shape.block_size
            start, end = local_tokens // size, min(-(-(local_tokens + hit) // size), len(hashes) // self._units(g))
            if shape.kind not in FULL_KINDS:
                start = max(start, end - self._load_window(shape, local_tokens + hit))
            if any(self._key(hashes, g, i) in self._loading for i in range(start, end)):
                return True
        return False

    # Chunks of other replicas

    def _look_up(self, wish: PeerWish, key: Key) -> bool | None:
        """Return whether a chunk can be loaded; None if it is being written, or will be fetched from the source."""
        held = self.tier.lookup(key)
        if held is False:
            if not self._can_fetch(wish, key):
                return False
            held = wish.missing[key] = None
        elif held is None and (key in self._overdue or wish.is_late):
            self._miss(wish, key, PeerMiss.DEADLINE)
            return False
        wish.needed.add(key)
        return held

    def _can_fetch(self, wish: PeerWish, key: Key) -> bool:
        if key in wish.missed:
            return False
        if wish.source.gone:
            self._miss(wish, key, PeerMiss.GONE)
        elif wish.is_late:
            self._miss(wish, key, PeerMiss.DEADLINE)
        elif wish.source.tier.lookup(key) is not True:
            self._miss(wish, key, PeerMiss.ABSENT)
        else:
            if key not in wish.queried:
                wish.queried.add(key)
                wish.unqueried.append(key)
            return True
        return False

    def query(self, wish: PeerWish) -> None:
        """Count the chunks that were looked up since the last call as used at the source, which is queried for them."""
        held = [key for key in wish.unqueried if wish.source.tier.lookup(key)]
        wish.source.tier.touch(held)
        wish.unqueried.clear()

    def _miss(self, wish: PeerWish, key: Key, miss: PeerMiss) -> None:
        """Note why a chunk does not come; the first reason counts."""
        if key not in wish.missed:
            wish.missed[key] = miss
            self.peer_counts.missed[miss] += 1

    def _pull(self, wish: PeerWish) -> Pull | None:
        """Begin to fetch the chunks that a request misses, as far as there is room."""
        wanted = [key for key in wish.missing if self.tier.lookup(key) is False and self._can_fetch(wish, key)]
        keys = []
        for number, key in enumerate(wanted):
            # The position in the text does not matter: the request's own `Uses` are noted when it loads the chunk.
            if not self.tier.begin_store({key: 0}, Uses()):
                for refused in wanted[number:]:
                    self._miss(wish, refused, PeerMiss.NO_ROOM)
                break
            keys.append(key)
        if not keys:
            return None
        wish.source.tier.lend(keys)
        pull = Pull(self._next_number, wish, tuple(keys))
        self._next_number += 1
        self._pulls[pull.number] = pull
        return pull

    def _end_pull(self, pull: Pull) -> None:
        wish = pull.wish
        if pull.arrives_late and not pull.given_up:
            pull.given_up = wish.is_late = True
            self._overdue.update(pull.keys)
            for key in pull.keys:
                self._miss(wish, key, PeerMiss.DEADLINE)
            return
        del self._pulls[pull.number]
        self._overdue.difference_update(pull.keys)
        if wish.source.gone:
            self.tier.abandon(pull.keys)
            for key in pull.keys:
                self._miss(wish, key, PeerMiss.GONE)
            return
        wish.source.tier.end_load(pull.keys)
        self.tier.end_store(pull.keys)
        self.peer_counts.pulled += len(pull.keys)
        wish.pulled.update(pull.keys)

    @staticmethod
    def _window_chunks(shape: GroupShape) -> int:
        """Return how many chunks of a sparse group a hit needs."""
        reach = shape.sliding_window or shape.attention_chunk or 1
        return 1 if shape.kind == "mamba" else -(-reach // shape.block_size)

    def _load_window(self, shape: GroupShape, tokens: int) -> int:
        """Return how many chunks a hit of this many tokens needs, as it may end inside a chunk."""
        window = self._window_chunks(shape)
        if shape.kind in WINDOW_KINDS:
            assert shape.sliding_window is not None
            size = shape.block_size
            window = max(window, -(-(shape.sliding_window - 1 + -tokens % size) // size))
        return window

    # Stores

    def _note_blocks(self, jobs: Sequence[Job]) -> None:
        """Record the blocks that the step allocated, and drop them from the requests that had them before.

        Source: _update_req_states.
        """
        null = self._cache.pool.null
        before: dict[Job, list[int]] = {}
        for job in jobs:
            request = self._requests[job]
            before[job] = [len(blocks) for blocks in request.blocks]
            for blocks, table in zip(request.blocks, job.tables, strict=True):
                for block in table.blocks[len(blocks) :]:
                    blocks.append(None if block is null else block)
                    if block is not null:
                        self._allocated.add(block)
        if not self._allocated:
            return
        for job, request in self._requests.items():
            for g in self._sparse:
                blocks = request.blocks[g]
                end = before[job][g] if job in before else len(blocks)
                for i in range(request.next_stored[g], end):
                    if blocks[i] in self._allocated:
                        blocks[i] = None

    def _store_states(self) -> list[Transfer]:
        """Store Mamba states one by one, each under the boundary at which it was cached."""
        by_job: dict[Job, list[tuple[int, int]]] = {}
        for g, group in enumerate(self._cache.groups):
            for job, boundary in group.take_states():
                by_job.setdefault(job, []).append((g, boundary))
        stores = []
        for job, states in by_job.items():
            request = self._requests.get(job)
            if request is None:
                continue
            for g, boundary in states:
                if boundary > job.prompt_tokens:
                    continue
                key = self._key(job.text.hashes, g, boundary // self._shapes[g].block_size - 1)
                if self.tier.begin_store({key: boundary}, request.uses):
                    stores.append(self._transfer(job, [key]))
        return stores

    def _store(self, job: Job) -> Transfer | None:
        """Offer the tier a request's chunks that have become full. Source: _build_store_jobs."""
        request = self._requests[job]
        if request.offered:
            return None
        offered = min(job.computed if not job.finished or job.aborted else job.prompt_tokens, job.prompt_tokens)
        ends = [
            min(offered // shape.block_size, len(blocks))
            for shape, blocks in zip(self._shapes, request.blocks, strict=True)
        ]
        chunks = {key: at for g, end in enumerate(ends) for key, at in self._offer(job, request, g, end)}
        new = self.tier.begin_store(chunks, request.uses) if chunks else []
        if new is None:
            return None
        request.offered = offered == job.prompt_tokens
        request.next_stored = [max(old, end) for old, end in zip(request.next_stored, ends, strict=True)]
        return self._transfer(job, new) if new else None

    def _offer(self, job: Job, request: _Request, g: int, end: int) -> Iterator[tuple[Key, int]]:
        start, shape = request.next_stored[g], self._shapes[g]
        if shape.kind == "mamba" or end <= start:
            return
        boundaries = [job.prompt_tokens - 1]
        if job.junction:
            boundaries.append(job.junction)
        last = end if job.finished else max(end, job.prompt_tokens // shape.block_size)
        dense = self._cache.geometry.retention_interval is None
        mask = self._cache.groups[g].store_mask(start, end, boundaries, self._align, last if dense else None)
        for i in range(start, end):
            if request.blocks[g][i] is not None and (mask is None or mask[i - start]):
                yield self._key(job.text.hashes, g, i), (i + 1) * shape.block_size

    def _transfer(self, job: Job, keys: Iterable[Key], tokens: int = 0) -> Transfer:
        transfer = Transfer(self._next_number, job, tuple(keys), tokens)
        self._next_number += 1
        self._transfers[transfer.number] = transfer
        self._requests[job].transfers.add(transfer.number)
        return transfer

    # Keys

    def _units(self, g: int) -> int:
        return self._shapes[g].block_size // self._cache.geometry.hash_block_size

    def _key(self, hashes: Sequence[bytes], g: int, chunk: int) -> Key:
        return Key(g, hashes[(chunk + 1) * self._units(g) - 1])
