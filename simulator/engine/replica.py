# SPDX-License-Identifier: Apache-2.0
"""One engine replica without a model: requests in, steps, tokens and cache events out.

A replica decides as vLLM's engine core does and takes no time for it: its driver says how long a step lasts
(`virtual_time.py` by a clock that it advances, `realtime.py` by the real one). Each step's events go out in one batch
when the step is settled, as in vLLM's update_from_output.
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
from kvrouter.simulator.cache.peer import PeerWish
from kvrouter.simulator.cache.pool import BlockPool
from kvrouter.simulator.cache.shapes import Geometry
from kvrouter.simulator.cache.text import Text, TokenText, next_token
from kvrouter.simulator.engine.scheduler import Scheduler, Step

# vLLM's defaults for an online server on an H100 (arg_utils.py:2894 get_batch_defaults): max_num_batched_tokens, which
# is the most that a step computes, and max_num_seqs.
DEFAULT_CHUNK_TOKENS = 8192
DEFAULT_MAX_RUNNING = 1024

# The context of Llama 3.1, as vLLM's max_model_len.
DEFAULT_MAX_TEXT_TOKENS = 131_072


class RequestRefused(ValueError):
    """A request that this replica can never finish; the error's text says what is too large."""


class Stuck(RuntimeError):
    """A state in which requests hold blocks and none of them can continue.

    docs/reference/simulator.md says when vLLM gets there as well.
    """

    def __init__(self, waiting: int) -> None:
        super().__init__(
            f"{waiting} requests wait for blocks that only they themselves hold; start with more blocks, "
            "so that the pool has room for several of the longest prompts"
        )


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of a request. Lengths in tokens; `reused_tokens` were found in the cache and not computed again."""

    prompt_tokens: int
    reused_tokens: int
    output: tuple[int, ...]


class Replica:
    """A KV cache and the scheduler over it.

    Not thread-safe. Between `begin_step` and `end_step`, only `find` and `prepare` may be called.
    """

    def __init__(
        self,
        geometry: Geometry,
        num_blocks: int,
        *,
        # Receives each step's events, never an empty list.
        on_step: Callable[[list[CacheEvent]], None],
        # Blocks of any group that fit in the CPU tier; 0 for no tier.
        cpu_chunks: int = 0,
        chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
        max_running: int = DEFAULT_MAX_RUNNING,
        max_text_tokens: int = DEFAULT_MAX_TEXT_TOKENS,
        hash_seed: str = DEFAULT_SEED,
        # Whether later requests can reuse blocks, as with vLLM's --enable-prefix-caching.
        prefix_caching: bool = True,
        sample: Callable[[Sequence[int]], int] = next_token,
    ) -> None:
        """Create an idle replica. Raises ValueError for a size that is too small, or a CPU tier without caching."""
        if cpu_chunks and not prefix_caching:
            raise ValueError("a CPU tier needs prefix caching; leave out one of the two flags")
        self.geometry = geometry
        self.cache = KVCache(
            geometry,
            num_blocks,
            chunk_tokens=chunk_tokens,
            max_text_tokens=max_text_tokens,
            keeps_blocks=prefix_caching,
        )
        self.offload = Offload(self.cache, cpu_chunks) if cpu_chunks else None
        self.scheduler = Scheduler(self.cache, max_running=max_running, chunk_tokens=chunk_tokens, offload=self.offload)
        self.max_text_tokens = max_text_tokens
        self._on_step = on_step
        self._root = root_hash(hash_seed)
        self._sample = sample

    @property
    def pool(self) -> BlockPool:
        """Physical blocks of the GPU."""
        return self.cache.pool

    @property
    def busy(self) -> bool:
        """Whether there is something to compute, to transfer, or to offer to the CPU tier."""
        return not self.scheduler.idle or (self.offload is not None and self.offload.busy)

    def text(self, tokens: Sequence[int], cache_salt: str | None = None) -> TokenText:
        """Return a text of token ids, hashed as this replica hashes."""
        return TokenText(
            tokens,
            hash_block_size=self.geometry.hash_block_size,
            root=self._root,
            cache_salt=cache_salt,
            sample=self._sample,
        )

    def find(self, prompt: Sequence[int] | Text, *, cache_salt: str | None = None) -> PrefixHit:
        """Find the prefix that a request with this prompt would reuse now. Changes nothing."""
        text = self.text(prompt, cache_salt) if isinstance(prompt, Sequence) else prompt
        return self.cache.find(text.hashes, text.num_tokens)

    def reach(self, text: Text) -> tuple[int, int]:
        """Return the tokens that such a request would not compute now: from the GPU alone, and with the CPU tier.

        Changes nothing. Chunks that wait for a transfer are not counted.
        """
        gpu = self.find(text).tokens
        loadable = self.offload.ask(text.hashes, text.num_tokens, gpu) if self.offload is not None else 0
        return gpu, gpu + (loadable or 0)

    def submit(self, text: Text, max_tokens: int, *, peer: PeerWish | None = None) -> Job:
        """Queue a request. Raises RequestRefused if it is empty or can never be finished."""
        job = self.prepare(text, max_tokens, peer=peer)
        self.scheduler.add(job)
        return job

    def prepare(
        self, text: Text, max_tokens: int, *, handover: Handover = Handover.NONE, peer: PeerWish | None = None
    ) -> Job:
        """Create a request without queueing it, which is also allowed during a step. Raises RequestRefused.

        A replica without a CPU tier ignores `peer`, the request's source.
        """
        self._check(text.num_tokens, max_tokens)
        return Job(text, text.num_tokens, max_tokens, self.cache.tables(), handover=handover, peer=peer)

    def abort(self, job: Job) -> None:
        """Drop a request and free its blocks."""
        self.scheduler.abort(job)

    def begin_step(self) -> Step:
        """Give the next step's tokens their slots. A step without jobs has nothing to compute."""
        return self.scheduler.plan()

    def end_step(self, step: Step, ended: Iterable[int] = ()) -> None:
        """End a computed step: sample its tokens (`step.sampled`, `step.finished`) and publish its events.

        `ended` are the numbers of the transfers that are done, among `step.loads` and `step.stores` of this step and of
        earlier ones.
        """
        self.scheduler.settle(step, ended)
        events: list[CacheEvent] = list(self.pool.take_events())
        if self.offload is not None:
            events += self.offload.take_events()
        if events:
            self._on_step(events)

    def run(self, prompt: Sequence[int], *, max_tokens: int = 1, cache_salt: str | None = None) -> Completion:
        """Serve one request to its end, and all requests before it. Raises RequestRefused."""
        text = self.text(prompt, cache_salt)
        job = self.submit(text, max_tokens)
        while not job.finished:
            step = self.begin_step()
            numbers = [transfer.number for transfer in (*step.loads, *step.stores)]
            self.end_step(step, numbers + [pull.number for pull in step.pulls])
        return Completion(len(prompt), job.cached, text.tokens(len(prompt), text.num_tokens))

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks. Returns False while a request holds a block.

        As in vLLM, the event waits for the next step, so an idle engine publishes nothing.
        """
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
