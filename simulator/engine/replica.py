# SPDX-License-Identifier: Apache-2.0
"""One engine replica without a model: requests in, steps, tokens and cache events out.

It decides what vLLM's engine core would decide and takes no time for it: whoever drives it says how long a step lasts
(`virtual_time.py` by a clock of its own, `realtime.py` by the real one). Each step's events go out in one batch when it
is settled, as in vLLM's update_from_output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvrouter.simulator.cache.cpu_tier import CacheEvent
from kvrouter.simulator.cache.hashing import DEFAULT_SEED, root_hash
from kvrouter.simulator.cache.hit import PrefixHit
from kvrouter.simulator.cache.job import Handover, Job
from kvrouter.simulator.cache.kv_cache import KVCache
from kvrouter.simulator.cache.offload import Offload
from kvrouter.simulator.cache.pool import BlockPool
from kvrouter.simulator.cache.shapes import Geometry
from kvrouter.simulator.cache.text import Text, TokenText, next_token
from kvrouter.simulator.engine.scheduler import Scheduler, Step

# vLLM's defaults for an online server on an H100 (arg_utils.py:2894 get_batch_defaults): max_num_batched_tokens, the
# most that a step computes, and max_num_seqs.
DEFAULT_CHUNK_TOKENS = 8192
DEFAULT_MAX_RUNNING = 1024

# Llama 3.1's context; vLLM's max_model_len.
DEFAULT_MAX_TEXT_TOKENS = 131_072


class RequestRefused(ValueError):
    """This replica can never finish the request; the text says what is too large."""


class Stuck(RuntimeError):
    """Requests hold blocks, and none of them can go on: docs/reference/simulator.md says when vLLM comes to that as
    well."""

    def __init__(self, waiting: int) -> None:
        super().__init__(
            f"{waiting} requests wait for blocks that only they themselves hold; start with more blocks, "
            "so that the pool has room for several of the longest prompts"
        )


@dataclass(frozen=True, slots=True)
class Completion:
    """What came of a request. Lengths in tokens; `reused_tokens` were found in the cache and not computed again."""

    prompt_tokens: int
    reused_tokens: int
    output: tuple[int, ...]


class Replica:
    """A KV cache and the scheduler over it.

    on_step receives each step's events, never an empty list. Not thread-safe. Between `begin_step` and `end_step`
    nothing else may be called but `find` and `prepare`.
    """

    def __init__(
        self,
        geometry: Geometry,
        num_blocks: int,
        *,
        on_step: Callable[[list[CacheEvent]], None],
        cpu_chunks: int = 0,
        chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
        max_running: int = DEFAULT_MAX_RUNNING,
        max_text_tokens: int = DEFAULT_MAX_TEXT_TOKENS,
        hash_seed: str = DEFAULT_SEED,
        sample: Callable[[Sequence[int]], int] = next_token,
    ) -> None:
        """Sizes in tokens; cpu_chunks: blocks of any group that the CPU tier has room for, 0: there is none.

        Raises ValueError for a size that is too small.
        """
        self.geometry = geometry
        self.cache = KVCache(geometry, num_blocks, chunk_tokens=chunk_tokens, max_text_tokens=max_text_tokens)
        self.offload = Offload(self.cache, cpu_chunks) if cpu_chunks else None
        self.scheduler = Scheduler(self.cache, max_running=max_running, chunk_tokens=chunk_tokens, offload=self.offload)
        self.max_text_tokens = max_text_tokens
        self._on_step = on_step
        self._root = root_hash(hash_seed)
        self._sample = sample

    @property
    def pool(self) -> BlockPool:
        """The physical blocks."""
        return self.cache.pool

    @property
    def busy(self) -> bool:
        """There is something to compute, to transfer, or to look at once more."""
        return not self.scheduler.idle or (self.offload is not None and self.offload.busy)

    def text(self, tokens: Sequence[int], cache_salt: str | None = None) -> TokenText:
        """A text of token ids, hashed as this replica hashes."""
        return TokenText(
            tokens,
            hash_block_size=self.geometry.hash_block_size,
            root=self._root,
            cache_salt=cache_salt,
            sample=self._sample,
        )

    def find(self, prompt: Sequence[int] | Text, *, cache_salt: str | None = None) -> PrefixHit:
        """What a request with this prompt would reuse now. Changes nothing."""
        text = self.text(prompt, cache_salt) if isinstance(prompt, Sequence) else prompt
        return self.cache.find(text.hashes, text.num_tokens)

    def reach(self, text: Text) -> tuple[int, int]:
        """Tokens that such a request would not compute now: from the GPU alone, and with the CPU tier. Changes nothing.

        What waits for a transfer is not counted.
        """
        gpu = self.find(text).tokens
        loadable = self.offload.ask(text.hashes, text.num_tokens, gpu) if self.offload is not None else 0
        return gpu, gpu + (loadable or 0)

    def submit(self, text: Text, max_tokens: int) -> Job:
        """Queue a request. Raises RequestRefused when it is empty or can never be finished."""
        job = self.prepare(text, max_tokens)
        self.scheduler.add(job)
        return job

    def prepare(self, text: Text, max_tokens: int, *, handover: Handover = Handover.NONE) -> Job:
        """A request that is not queued yet, also during a step. Raises RequestRefused."""
        self._check(text.num_tokens, max_tokens)
        return Job(text, text.num_tokens, max_tokens, self.cache.tables(), handover=handover)

    def abort(self, job: Job) -> None:
        """Forget a request and free what it holds."""
        self.scheduler.abort(job)

    def begin_step(self) -> Step:
        """Give the next step's tokens their slots. A step without jobs has nothing to compute."""
        return self.scheduler.plan()

    def end_step(self, step: Step, ended: Iterable[int] = ()) -> None:
        """The step is computed: its tokens are sampled (`step.sampled`, `step.finished`), its events go out.

        ended: the numbers of the transfers (`step.loads`, `step.stores` of this step or of earlier ones) that are done.
        """
        self.scheduler.settle(step, ended)
        events: list[CacheEvent] = list(self.pool.take_events())
        if self.offload is not None:
            events += self.offload.take_events()
        if events:
            self._on_step(events)

    def run(self, prompt: Sequence[int], *, max_tokens: int = 1, cache_salt: str | None = None) -> Completion:
        """Serve one request to its end, and those before it. Raises RequestRefused."""
        text = self.text(prompt, cache_salt)
        job = self.submit(text, max_tokens)
        while not job.finished:
            step = self.begin_step()
            self.end_step(step, [transfer.number for transfer in (*step.loads, *step.stores)])
        return Completion(len(prompt), job.cached, text.tokens(len(prompt), text.num_tokens))

    def reset_prefix_cache(self) -> bool:
        """Forget everything cached. As in vLLM the event waits for the next step: an idle engine publishes nothing."""
        return self.pool.reset()

    def _check(self, prompt_tokens: int, max_tokens: int) -> None:
        if prompt_tokens < 1:
            raise RequestRefused("the prompt is empty; send at least one token")
        if max_tokens < 1:
            raise RequestRefused(f"max_tokens is {max_tokens}; ask for at least 1")
        if prompt_tokens + max_tokens > self.max_text_tokens:
            raise RequestRefused(
                f"{prompt_tokens} prompt tokens and {max_tokens} more exceed the context of {self.max_text_tokens}; "
                "send a shorter prompt or ask for fewer tokens"
            )
        # The last sampled token is never computed.
        needed = self.cache.peak_blocks(prompt_tokens + max_tokens - 1)
        if needed > self.pool.num_blocks - 1:
            raise RequestRefused(
                f"{prompt_tokens} prompt tokens and {max_tokens} more need up to {needed} blocks, "
                f"the pool has {self.pool.num_blocks - 1}; send a shorter prompt or start with more blocks"
            )
