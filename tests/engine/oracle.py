# SPDX-License-Identifier: Apache-2.0
"""vLLM's own scheduler, run without a model: it publishes real events and says how many tokens it would reuse.

Every step is the engine's: `schedule`, made-up sampled tokens, and `update_from_output`, which hands the step's KV
events to the real `ZmqEventPublisher`. Questions are put to the same objects between steps, and change nothing.

The same seed gives the same requests and steps. With an offload tier, the traces still differ a little from run to run,
because vLLM iterates over sets of byte keys there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from vllm.config import set_current_vllm_config
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler
from vllm.v1.structured_output import StructuredOutputManager

from kvrouter.engine_patch.offload.manager import HybridOffloadingManager
from tests.engine.engine_config import VOCAB_SIZE, build_kv_cache_config, build_vllm_config
from tests.engine.group_sets import GroupSet, OffloadSet, SimpleSet
from tests.engine.offload_worker import MultiOffloadWorker, OffloadWorker, SimpleOffloadWorker
from tests.engine.workload import Prompt, PromptTree

# The most tokens that four requests in five generate, so that many prompts come and go.
SHORT_OUTPUT_TOKENS = 3
# The most tokens that one request in five generates: past a block, a window's edge and a Mamba boundary.
LONG_OUTPUT_TOKENS = 50


WORKERS = {
    "OffloadingConnector": OffloadWorker,
    "SimpleCPUOffloadConnector": SimpleOffloadWorker,
    "MultiConnector": MultiOffloadWorker,
}


@dataclass
class Traffic:
    """The counts of everything that went over the wire so far: batches, clears, and hashes by kind of event."""

    batches: int = 0
    stored: int = 0
    removed: int = 0
    cpu_stored: int = 0
    cpu_removed: int = 0
    clears: int = 0

    def count(self, events: list[Any]) -> None:
        self.batches += 1
        for event in events:
            hashes = len(event.block_hashes) if isinstance(event, BlockStored | BlockRemoved) else 0
            on_gpu = getattr(event, "medium", None) == "GPU"
            self.clears += isinstance(event, AllBlocksCleared)
            if isinstance(event, BlockStored):
                self.stored += hashes if on_gpu else 0
                self.cpu_stored += 0 if on_gpu else hashes
            elif isinstance(event, BlockRemoved):
                self.removed += hashes if on_gpu else 0
                self.cpu_removed += 0 if on_gpu else hashes


@dataclass(frozen=True)
class Answer:
    """The tokens of a prompt that the engine would not compute, by the chunks that its tiers hold."""

    gpu: int
    # Includes `gpu`.
    cpu: int
    # The tokens that the engine would reuse at this moment. With a transfer, it is None if the request would wait for
    # the transfer, or tokens, which may be fewer than `cpu`. Without a transfer, it equals `cpu`.
    now: int | None
    # Whether a chunk that the engine looked up, or would load, is in transfer.
    transfer: bool = False


class Oracle:
    """One engine core: scheduler, block pools, offload tier (if any) and event publisher."""

    def __init__(
        self,
        group_set: GroupSet,
        model: Path,
        rng: Random,
        offload: dict[str, Any] | None = None,
        connector: str = "OffloadingConnector",
    ) -> None:
        self.group_set = group_set
        self.traffic = Traffic()
        self._rng = rng
        self._names = 0
        config = build_vllm_config(group_set, model, offload, connector)
        kv_cache_config = build_kv_cache_config(group_set, None if offload is None else connector)
        init_none_hash(sha256)
        with set_current_vllm_config(config):
            block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, config)
            self.scheduler = Scheduler(
                vllm_config=config,
                kv_cache_config=kv_cache_config,
                structured_output_manager=StructuredOutputManager(config),
                block_size=block_size,
                hash_block_size=hash_block_size,
            )
        self.block_size = block_size
        self.hash_block_size = hash_block_size
        self.lookahead_tokens = getattr(config, "num_hash_lookahead_tokens", 0)
        reach = (self.lookahead_tokens,) if self.lookahead_tokens else ()
        self._hasher = get_request_block_hasher(hash_block_size, sha256, *reach)
        self._worker: Any = None
        self._simple: SimpleCPUOffloadScheduler | None = None
        if offload is not None:
            self._simple = getattr(self.scheduler.connector, "scheduler_manager", None)
            self._worker = WORKERS[connector](rng)
        publisher = self.scheduler.kv_event_publisher
        endpoints = publisher.get_publisher_config()
        assert endpoints is not None
        self.endpoint: str = endpoints.endpoint
        self.replay_endpoint: str = endpoints.replay_endpoint
        self._publish = publisher.publish
        publisher.publish = self._count_and_publish

    def _count_and_publish(self, batch: Any) -> None:
        self.traffic.count(batch.events)
        self._publish(batch)

    @property
    def is_simple(self) -> bool:
        """Whether its connector is a SimpleCPUOffloadConnector."""
        return self._simple is not None

    @property
    def last_seq(self) -> int:
        """The seq of the last batch handed to the publisher; -1 before the first."""
        return self.traffic.batches - 1

    def close(self) -> None:
        self.scheduler.shutdown()

    # Requests and steps

    def _request(self, prompt: Prompt, max_tokens: int) -> Request:
        self._names += 1
        return Request(
            request_id=f"r{self._names}",
            prompt_token_ids=list(prompt.token_ids),
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            pooling_params=None,
            cache_salt=prompt.cache_salt,
            block_hasher=self._hasher,
        )

    def submit(self, prompt: Prompt) -> None:
        longest = LONG_OUTPUT_TOKENS if self._rng.random() < 0.2 else SHORT_OUTPUT_TOKENS
        self.scheduler.add_request(self._request(prompt, self._rng.randint(1, longest)))

    @property
    def unfinished(self) -> int:
        return self.scheduler.get_num_unfinished_requests()

    def abort_one(self) -> None:
        running = [request.request_id for request in self.scheduler.running]
        if running:
            self.scheduler.finish_requests([self._rng.choice(running)], RequestStatus.FINISHED_ABORTED)

    def reset(self, *, running: bool, connector: bool) -> bool:
        """Reset the caches as `POST /reset_prefix_cache` does; return False if something in use prevented that."""
        return self.scheduler.reset_prefix_cache(reset_running_requests=running, reset_connector=connector)

    def step(self, tree: PromptTree | None = None) -> bool:
        """Run one engine step, and return whether it published a batch.

        Some of the finished conversations are added to `tree`.
        """
        before = self.traffic.batches
        output = self.scheduler.schedule()
        result = self._run_model(output)
        if self._worker is not None:
            result.kv_connector_output = self._worker.run(output.kv_connector_metadata)
        running = list(self.scheduler.running)
        self.scheduler.update_from_output(output, result)
        if self.group_set.eagle:
            drafts = [r.request_id for r in self.scheduler.running]
            tokens = [[self._rng.randrange(VOCAB_SIZE)] for _ in drafts]
            self.scheduler.update_draft_token_ids(DraftTokenIds(drafts, tokens))
        if tree is not None:
            for request in running:
                if request.is_finished() and self._rng.random() < 0.3:
                    tree.adopt(tuple(request.all_token_ids), request.cache_salt)
        return self.traffic.batches > before

    def _run_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Return the output of a worker: a random token for each request whose known tokens are all computed now.

        A drafted token is accepted half of the time, and then one more token is sampled.
        """
        sampled: list[list[int]] = []
        for request_id in output.num_scheduled_tokens:
            request = self.scheduler.requests[request_id]
            drafted = output.scheduled_spec_decode_tokens.get(request_id, [])
            if request.num_computed_tokens < request.num_tokens:
                sampled.append([])  # a chunk of a prefill
                continue
            accepted = drafted if drafted and self._rng.random() < 0.5 else []
            sampled.append([*accepted, self._rng.randrange(VOCAB_SIZE)])
        names = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled)

    # Questions

    def ask(self, prompt: Prompt) -> Answer:
        """Return the tokens that would be reused if this prompt came now, by the code that decides it.

        That is the code of `Scheduler.schedule`.
        """
        request = self._request(prompt, 1)
        _, local, _ = self.scheduler.kv_cache_manager.get_computed_blocks(request)
        connector = self.scheduler.connector
        if connector is None:
            return Answer(local, local, local)
        tail = local % self.block_size

        def cpu(external: int) -> int:
            # A load supersedes a local sub-block tail only when it reaches further (scheduler.py, WAITING requests).
            return local - tail + external if external > tail else local

        if self._simple is not None:
            tokens = cpu(self._simple_external(self._simple, request, local - tail))
            return Answer(local, tokens, tokens)
        external, pending = self._external(request, local - tail)
        if external is not None and not pending:
            return Answer(local, cpu(external), cpu(external))
        held, _ = self._external(request, local - tail, settled=True)
        assert held is not None, "a chunk that is neither held nor on its way"
        return Answer(local, cpu(held), None if external is None else cpu(external), transfer=True)

    def _simple_external(self, manager: SimpleCPUOffloadScheduler, request: Request, local: int) -> int:
        """Return the tokens beyond `local` that the connector offers, without a chunk that is still in transfer.

        This neither pins the pool's blocks nor counts as a use of them.
        """
        pool: Any = manager.cpu_block_pool
        pool.touch = lambda blocks: None
        try:
            external, _ = self.scheduler.connector.get_num_new_matched_tokens(request, local)
        finally:
            del pool.touch
        manager._pending_cpu_hits.pop(request.request_id, None)
        assert external is not None
        return int(external)

    def _external(self, request: Request, local: int, settled: bool = False) -> tuple[int | None, bool]:
        """Return the tokens beyond `local` that the connector offers, and whether a looked-up chunk was being written.

        Args:
            request: The request that asks.
            local: Tokens that the GPU's cache holds.
            settled: Whether to answer from the written chunks alone, as if no transfer were under way. vLLM's own
                look-up still answers.

        Returns:
            (tokens, or None if the request has to wait; whether a chunk was being written)
        """
        offload = self.scheduler.connector.connector_scheduler
        tracker, manager, loading = offload._events_tracker, offload.manager, offload._chunks_being_loaded
        pending = False

        def lookup(key: Any, context: Any) -> LookupResult:
            nonlocal pending
            result = look_up(key, context)
            pending |= result is LookupResult.HIT_PENDING
            return LookupResult.MISS if settled and result is LookupResult.HIT_PENDING else result

        # Restore the payloads afterwards, because a look-up refills the payload of a coming event if a re-stored chunk
        # has lost it.
        payloads = dict(tracker._pending_event_metadata)
        look_up, manager.lookup = manager.lookup, lookup
        if settled:
            offload._chunks_being_loaded = set()
        try:
            self.scheduler.connector.on_new_request(request)
            external, _ = self.scheduler.connector.get_num_new_matched_tokens(request, local)
        finally:
            del manager.lookup
            offload._chunks_being_loaded = loading
        tracker._pending_event_metadata = payloads
        status = offload._req_status.pop(request.request_id)
        if isinstance(manager, HybridOffloadingManager):
            # The only effect is that the manager keeps no chunk for the question that waited for it. With vLLM's
            # manager, this call would count as a use.
            manager.on_request_finished(status.req_context)
        return external, pending

    def per_group(self, prompt: Prompt) -> str:
        """Return, for reports, the block boundaries that each group holds (`#`) or not (`.`), as the engine sees it."""
        request = self._request(prompt, 1)
        pool = self.scheduler.kv_cache_manager.block_pool
        lines = []
        for group_idx, spec in enumerate(self.group_set.specs):
            every = spec.block_size // self.hash_block_size
            fine = "".join(
                "#" if pool.get_cached_block(block_hash, [group_idx]) else "." for block_hash in request.block_hashes
            )
            lines.append(f"  g{group_idx} {type(spec).__name__} {spec.block_size}: {fine[every - 1 :: every]}")
            if every > 1:
                lines[-1] += f"   (at the hash block size: {fine})"
        return "\n".join(lines)

    def snapshot(self) -> object:
        """Return everything that a question must not change, in a form that compares equal."""
        pool = self.scheduler.kv_cache_manager.block_pool
        gpu = (
            [(block.block_id, block.ref_cnt, block.block_hash) for block in pool.blocks],
            [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
            len(pool.kv_event_queue),
        )
        if self.scheduler.connector is None:
            return gpu
        if self._simple is not None:
            cpu_pool = self._simple.cpu_block_pool
            return (
                gpu,
                [(block.block_id, block.ref_cnt, block.block_hash) for block in cpu_pool.blocks],
                [block.block_id for block in cpu_pool.free_block_queue.get_all_free_blocks()],
                len(cpu_pool.kv_event_queue),
                sorted(self._simple._pending_cpu_hits),
            )
        offload = self.scheduler.connector.connector_scheduler
        manager, tracker = offload.manager, offload._events_tracker
        policy = {name: repr(value) for name, value in vars(manager._policy).items()}
        return (
            gpu,
            policy,
            list(manager.events),
            sorted(offload._req_status),
            sorted(offload._jobs),
            sorted(offload._chunks_being_loaded),
            sorted(tracker._pending_event_metadata),
        )


@contextmanager
def running(layout: GroupSet | OffloadSet | SimpleSet, model: Path, rng: Random) -> Iterator[Oracle]:
    """Yield an oracle with the layout's groups and CPU tier, and close it."""
    if isinstance(layout, GroupSet):
        oracle = Oracle(layout, model, rng)
    elif isinstance(layout, OffloadSet):
        oracle = Oracle(layout.group_set, model, rng, layout.connector_config())
    else:
        oracle = Oracle(layout.group_set, model, rng, layout.connector_config(), layout.CONNECTOR)
    try:
        yield oracle
    finally:
        oracle.close()
