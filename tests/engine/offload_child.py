# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine with our offload tier in one process, driven line by line, whose tiers can be inspected.

It reads one JSON request per line and writes one JSON answer per line. `engine_forks.py` starts it, and
`offload_engine.py` is the parent's side.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

MAX_STEPS_TO_REST = 100_000
# Steps in which prompts that run at the same time end: while one waits for another engine, a step takes no time.
MAX_STEPS = 50_000
POLL_S = 0.001
# How many of the likeliest tokens are returned for each step.
LOGPROBS = 8
# vLLM's default on the CPU is 128.
BLOCK_SIZE = 32


class Child:
    """An engine whose core runs in this process, so that its scheduler and worker can be inspected between steps."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVEventsConfig, KVTransferConfig
        from vllm.platforms import current_platform

        device: dict[str, Any] = {}
        if current_platform.is_cuda():
            # The other backends have no float32; several engines share the device.
            device = {"attention_backend": "TRITON_ATTN", "gpu_memory_utilization": 0.1}
        transfer = None
        if options["offload"] is not None:
            transfer = KVTransferConfig(
                kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=options["offload"]
            )
        self.llm = LLM(
            model=options["model"],
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            block_size=options.get("block_size", BLOCK_SIZE),
            max_model_len=options["max_model_len"],
            max_num_batched_tokens=256,
            num_gpu_blocks_override=options["num_blocks"],
            enable_prefix_caching=options.get("prefix_caching", True),
            disable_log_stats=True,
            kv_transfer_config=transfer,
            **device,
            kv_events_config=KVEventsConfig(
                enable_kv_cache_events=True,
                publisher="zmq",
                endpoint=f"tcp://*:{options['events_port']}",
                replay_endpoint=f"tcp://*:{options['replay_port']}",
            ),
        )
        core = self.llm.llm_engine.engine_core.engine_core
        self.core, self.scheduler = core, core.scheduler
        self.manager: Any = None
        if options["offload"] is not None:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            self.manager = self.scheduler.connector.connector_scheduler.manager
            self.worker = get_kv_transfer_group().connector_worker.worker
        self.pulls = PullLedger(self.manager)
        self.requests = 0
        # The longest call that decides about a step or takes its results, without the model's own work, and without the
        # time for which a busy machine had no core for it.
        self.slowest_call_s = 0.0
        self.scheduler.schedule = self._timed(self.scheduler.schedule)
        self.scheduler.update_from_output = self._timed(self.scheduler.update_from_output)
        # Report the blocks found on disk before any request, as an engine core in its own process does.
        self.rest()

    def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run one prompt alone: `generate_all` has the fields of the request and of the answer."""
        return self.generate_all([request])[0]

    def generate_all(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Run prompts at the same time until the engine rests, and return an answer for each, in the order of the requests.

        A request's `tiers` lists the media that the prompt may load from; None allows all of them. `source` is the port of
        an engine on this machine from which missing chunks may be fetched, or None; with `hinted`, it is named by an
        envelope of hints. An answer's `place` is its place in the order in which the requests ended, `fetched` the number
        of chunks that came from the source, `unmet` the place, hash and counted reason of each chunk that did not come, and
        `uncounted` the number of those that did not come for no counted reason.
        """
        engine = self.llm.llm_engine
        ids = [self._add(request) for request in requests]
        ended: dict[str, Any] = {}
        for step in itertools.count():
            if len(ended) == len(ids):
                break
            assert step < MAX_STEPS, f"requests never end: {self._state()}"
            ended.update((output.request_id, output) for output in engine.step() if output.finished)
        self.rest()
        places = {request_id: place for place, request_id in enumerate(ended)}
        return [{**_answer(ended[name]), **self.pulls.take(name), "place": places[name]} for name in ids]

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            began_s = time.monotonic() - without_core_s()
            try:
                return function(*arguments, **options)
            finally:
                self.slowest_call_s = max(self.slowest_call_s, time.monotonic() - without_core_s() - began_s)

        return timed

    def _state(self) -> dict[str, Any]:
        """Return what the requests wait for."""
        tiers = None if self.manager is None else self.manager._tiering
        return {
            "requests": [
                (name, str(request.status), request.num_tokens, request.num_computed_tokens, request.num_preemptions)
                for name, request in self.scheduler.requests.items()
            ],
            "waits": tiers
            and [(wish.peer and wish.peer.presence.values(), len(wish.missing)) for wish in tiers._waiting.values()],
            "cpu": tiers and tiers._cpu.usage,
            "pulls": tiers and tiers._pulls,
            "free GPU blocks": self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        }

    def take_slowest_s(self) -> float:
        """Return the longest call of the scheduler since the last time."""
        slowest_s, self.slowest_call_s = self.slowest_call_s, 0.0
        return slowest_s

    def _add(self, request: dict[str, Any]) -> str:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        transfer: dict[str, Any] = {}
        hints: dict[str, Any] = {}
        if request["tiers"] is not None:
            transfer["kv_load_tiers"] = [{"medium": medium} for medium in request["tiers"]]
        source = request.get("source")
        if source is not None and request.get("hinted"):
            from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

            action = KvHintAction("1", "kvrouter.fetch", "1", {"host": "127.0.0.1", "port": source})
            hints["kv_hints"] = KvHintsEnvelope("1", "any", [action])
        elif source is not None:
            transfer["remote_kv_source"] = {
                "kv_request_id": "any",
                "remote_host": "127.0.0.1",
                "remote_port": source,
                "timeout_s": request.get("timeout_s"),
            }
        params = SamplingParams(
            max_tokens=request["max_tokens"],
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            logprobs=LOGPROBS,
            extra_args={"kv_transfer_params": transfer} if transfer else None,
        )
        self.requests += 1
        name = f"request {self.requests}"
        prompt = TokensPrompt(prompt_token_ids=request["token_ids"])
        self.llm.llm_engine.add_request(name, prompt, params, **hints)
        return name

    def rest(self) -> int:
        """Step until nothing is under way, and return the number of steps.

        An engine core in its own process does so by itself.
        """
        for step in range(MAX_STEPS_TO_REST):
            if not self.scheduler.has_requests():
                return step
            self.llm.llm_engine.step()
        raise AssertionError("the engine never comes to rest")

    def resident(self) -> dict[str, list[int]]:
        """Return the number of blocks of each place and the sum of their hashes modulo 2**64.

        Both are read from the objects that decide reuse.
        """
        return {place: [len(keys), sum(keys) % 2**64] for place, keys in self._places().items() if keys}

    def hashes(self) -> dict[str, list[int]]:
        """Return the hashes of the blocks of each place."""
        return {place: sorted(keys) for place, keys in self._places().items()}

    def declared(self) -> dict[str, Any]:
        """Return the catalog as the patch declared it last."""
        import msgspec

        declared: dict[str, Any] = msgspec.to_builtins(self._reporter()._declared)
        return declared

    def _places(self) -> dict[str, set[int]]:
        places: dict[str, set[int]] = {}

        def add(medium: str, keys: Iterable[bytes]) -> None:
            for key in keys:
                place, block_hash = place_of(key, medium)
                places.setdefault(place, set()).add(block_hash)

        add("GPU", self.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache)
        if self.manager is not None:
            tiers = self.manager._tiering
            add("CPU", tiers._cpu.ready_keys())
            if tiers._disk is not None:
                disk = tiers._disk
                add("STORAGE:kvrouter", list(disk._table if disk.writable else disk._held))
        return places

    def saw_all(self) -> bool:
        """Return whether this reader of another engine's folder knows what it holds now, down to each key's record."""
        from kvrouter.engine_patch.offload.disk.format.file_ops import FileOps
        from kvrouter.engine_patch.offload.disk.view import View

        reader = self.manager._tiering._disk
        view = reader._view
        now = View(view._path.parent, view._identity, FileOps()).look()
        entries = {index: entry for index, entry in now.changed if entry is not None}
        return bool(now.generation == reader._generation and entries == reader._entries)

    def last_seq(self) -> int | None:
        """Return the seq of the patch's last message once everything is reported, or None before the first message."""
        next_seq = self._reporter()._stream.next_seq
        return next_seq - 1 if next_seq else None

    def _reporter(self) -> Any:
        """Return the patch's reporter once it has sent everything."""
        reporter = self.scheduler.kv_event_publisher._kvrouter_tap.reporter
        while len(reporter._queue) or not reporter._queue._asleep:
            time.sleep(POLL_S)
        return reporter

    def ledger(self) -> dict[str, list[int]]:
        """Return the same as `resident`, as the patch reports it, once everything is reported."""
        reporter = self._reporter()
        places = {}
        for place in reporter._stream.ledger.places():
            owner = "" if place.ownership is None else f":{place.ownership}"
            if place.blocks:
                places[f"g{place.group_idx}:{place.medium}{owner}"] = [place.blocks, place.digest]
        return places

    def same_bytes(self) -> dict[str, int]:
        """Count the blocks that are on the GPU and in CPU memory under one hash, and those that differ in a byte."""
        tiers, copier, region = self.manager._tiering, self.worker._transfers._copier, self.worker._region
        slots = region.rank_tensor().numpy()
        compared = different = 0
        pool = self.scheduler.kv_cache_manager.block_pool
        for key in tiers._cpu.ready_keys():
            block = pool.cached_block_hash_to_block._cache.get(key)
            if block is None:
                continue
            blocks = list(block.values()) if isinstance(block, dict) else [block]
            group = int.from_bytes(key[-4:], "big")
            layout = copier._layout
            for ref, pages in enumerate(copier._pages[group]):
                # The key names the last block of its chunk.
                start = layout.offset(group, ref, layout.blocks_per_chunk - 1)
                for gpu_block in blocks:
                    page = page_of(pages, gpu_block.block_id)
                    compared += 1
                    different += slots[tiers._cpu.slot(key), start : start + len(page)].tobytes() != page
        return {"compared": compared, "different": different}

    def counts(self) -> dict[str, Any]:
        sample = self.manager._sample()
        return {**sample.gauges, **sample.counters}

    def evicted(self) -> int:
        """Return the number of chunks that were evicted from CPU memory."""
        return int(self.manager._tiering._cpu.evicted_total)

    def peer_facts(self) -> dict[str, Any]:
        """Return the facts that a source must share, and the sizes of this engine's slots."""
        memory = self.manager._tiering.peers._fetcher._memory
        return {"chunk_bytes": memory.chunk_bytes, "slot_bytes": memory.slot_bytes}

    def reset(self, connector: bool) -> bool:
        done = self.llm.reset_prefix_cache(reset_connector=connector)
        self.rest()
        return bool(done)


class PullLedger:
    """The chunks that each request began to fetch, noted beside the tier's own counts."""

    def __init__(self, manager: Any) -> None:
        self._requests: dict[str, dict[str, Any]] = {}
        peers = None if manager is None else manager._tiering.peers
        if peers is None:
            return
        from kvrouter.engine_patch.offload.peer.peer_miss import PeerMiss

        wanted: dict[int, set[bytes]] = {}
        finish = manager.on_request_finished

        def noting(begin: Callable[..., None]) -> Callable[..., None]:
            def noted(wish: Any, keys: Any, *slots: Any) -> None:
                wanted.setdefault(id(wish), set()).update(keys)
                begin(wish, keys, *slots)

            return noted

        def on_request_finished(req_context: Any) -> None:
            from kvrouter.engine_patch.offload.tiers.tiering import PromotionRequest

            state = req_context.get_state(PromotionRequest)
            wish = None if state is None else state.peer
            if wish is not None:
                missing = wanted.pop(id(wish), set()) - wish.pulled
                self._requests[req_context.req_id] = {
                    "fetched": len(wish.pulled),
                    "unmet": [
                        [*place_of(key, "CPU"), presence.value]
                        for key, presence in wish.presence.items()
                        if isinstance(presence, PeerMiss)
                    ],
                    "uncounted": sum(isinstance(wish.presence[key], bool) for key in missing),
                }
            finish(req_context)

        peers.pull, peers.no_room = noting(peers.pull), noting(peers.no_room)
        manager.on_request_finished = on_request_finished

    def take(self, name: str) -> dict[str, Any]:
        """Return what became of the chunks of a request. vLLM appends a suffix to the names of requests."""
        for full_name in [full_name for full_name in self._requests if full_name.startswith(f"{name}-")]:
            return self._requests.pop(full_name)
        return {"fetched": 0, "unmet": [], "uncounted": 0}


def _answer(output: Any) -> dict[str, Any]:
    answer = output.outputs[0]
    return {
        "cached": output.num_cached_tokens,
        "token_ids": list(answer.token_ids),
        "logprobs": [
            sorted((token, logprob.logprob) for token, logprob in step.items()) for step in answer.logprobs or []
        ],
    }


def without_core_s() -> float:
    """Return for how long this thread could run and had no core. Source: /proc/thread-self/schedstat (ns)."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def place_of(key: bytes, medium: str) -> tuple[str, int]:
    """Return the place of a chunk and its hash, as events have it."""
    return f"g{int.from_bytes(key[-4:], 'big')}:{medium}", int.from_bytes(key[-12:-4], "big")


def page_of(pages: Any, block_id: int) -> bytes:
    """Return the bytes of a block's page.

    Args:
        pages: The pages of one ref: an array of a CpuCopier, or a tensor and the bytes of a page of a CudaCopier.
        block_id: The block's number on the GPU.
    """
    if isinstance(pages, tuple):
        tensor, page_bytes = pages
        return bytes(tensor[block_id, :page_bytes].cpu().numpy().tobytes())
    return bytes(pages[block_id].tobytes())


def serve(options: dict[str, Any]) -> None:
    # Only answers go to stdout; the output of the engine goes to the log.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    child = Child(options)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        name = request.pop("do")
        result = child.generate(request) if name == "generate" else getattr(child, name)(**request)
        print(json.dumps(result), file=answers, flush=True)
    child.core.shutdown()
