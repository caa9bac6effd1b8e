# SPDX-License-Identifier: Apache-2.0
"""SGLang's own radix cache under a made-up workload of prompts that share beginnings and of constant evictions.

Every component is evicted all the time. Allocators, pools and cache are SGLang's, built by SGLang's own kit of
fixtures. The oracle calls what SGLang's scheduler calls (`match_prefix`, with one token less than the prompt).
"""

from __future__ import annotations

import sys
import types
from array import array
from collections.abc import Callable, Iterable
from random import Random
from typing import Any, NamedTuple

import sglang.test.kits.unified_radix_cache.fixtures as kit
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.rust_tree_core import adapter
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.mixins import UnifiedRadixCacheFixtures

from kvrouter.engine_patch.sglang.tree_catalog import adapters_of
from kvrouter.engine_patch.sglang.tree_tap import TreeTap
from tests.sglang.tree_layouts import TreeLayout

# There is no accelerator to detect.
kit.get_device = lambda: "cpu"

VOCABULARY = 30_000
# The most pages of a prompt, and the pages that the cache holds. A page of fewer than 4 tokens counts as 4 tokens here.
PAGES, KV_PAGES = 16, 60
STATES, HOST_STATES = 24, 400


class TreePrompt(NamedTuple):
    tokens: list[int]
    salt: str | None
    lora: str | None


# The kit's Rust core is a build for inspection, which the wheel lacks. The core that engines run takes its place here.
RUST_INSPECTOR = "sglang.test.kits.unified_radix_cache.rust_unified_tree_core_inspector"


def stand_in_for_inspector() -> None:
    if RUST_INSPECTOR not in sys.modules:
        module: Any = types.ModuleType(RUST_INSPECTOR)
        module.RustUnifiedTreeCoreInspector = adapter.RustUnifiedTreeCore
        kit.UnifiedTreeCoreInspectionInterface.register(adapter.RustUnifiedTreeCore)
        sys.modules[RUST_INSPECTOR] = module


class TreeOracle:
    """One cache and its workload.

    Args:
        layout: The layout of the cache.
        rng: The source of the workload.
        has_host: Whether its nodes may be on the host too. They are put there without SGLang's controller, so no state
            is given up for one.
        core: "python" or "rust".
        most_actions: The most insertions, matches and evictions in one step of the scheduler.
    """

    def __init__(
        self,
        layout: TreeLayout,
        rng: Random,
        *,
        has_host: bool = False,
        core: str = "python",
        most_actions: int = 1,
    ) -> None:
        self.layout, self._rng = layout, rng
        self._most_actions = most_actions
        self._has_host = has_host
        self._unit = max(layout.page, 4)
        size = KV_PAGES * self._unit
        more: dict[str, Any] = {}
        if layout.window is not None:
            more["sliding_window_size"] = layout.window
        if "MAMBA" in layout.components:
            more |= {
                "mamba_cache_size": HOST_STATES if has_host else STATES,
                "enable_mamba_extra_buffer": layout.page > 1,
            }
        self._config = CacheConfig(
            page_size=layout.page,
            components=tuple(ComponentType[name] for name in layout.components),
            num_layers=2,
            full_attention_layer_ids=(0,),
            head_num=1,
            head_dim=8,
            kv_size=size,
            max_context_len=size,
            is_eagle=layout.eagle,
            **more,
        )
        if core == "rust":
            stand_in_for_inspector()
        self.cache, self._allocator, self._pool = kit.build_fixture(
            self._config, enable_kv_cache_events=True, tree_core_backend=core
        )
        for lora in layout.loras:
            if lora is not None:
                # The scheduler registers an adapter in the same way, with a request.
                adapters_of(self.cache.tree_core)[lora] = f"name of {lora}"  # type: ignore[index]
        self._fixtures = UnifiedRadixCacheFixtures()
        self._fixtures.cfg = self._config
        if has_host:
            self.cache.tree_core.set_hicache_enabled()
            # Keep SGLang from putting nodes on the host by itself.
            self.cache._execute_and_commit_kv_backup = lambda *args: 0
        self._known: list[TreePrompt] = []
        # Follows the cache; None: nothing follows it.
        self.tap: TreeTap | None = None
        # Receives SGLang's own events after each step that has any.
        self.publish: Callable[[list[Any]], None] = lambda events: None

    @property
    def is_bigram(self) -> bool:
        """Whether keys are pairs of tokens; Mamba turns this off."""
        return bool(self.cache.tree_core.is_eagle)

    def key(self, prompt: TreePrompt, limit: int | None = None) -> Any:
        return RadixKey(
            array("q", prompt.tokens[:limit]),
            prompt.lora,
            is_bigram=self.is_bigram,
            cache_salt=prompt.salt,
        )

    def prompt(self) -> TreePrompt:
        """Return a random prompt, which often continues the beginning of a former one."""
        rng = self._rng
        longest = PAGES * self._unit
        beginning: list[int] = []
        salt, lora = rng.choice(self.layout.salts), rng.choice(self.layout.loras)
        if self._known and rng.random() < 0.9:
            former = rng.choice(self._known[-8:])
            # Cut where it is likely to matter: at its end, at pages, around them, anywhere.
            cut = len(former.tokens) if rng.random() < 0.5 else rng.randrange(len(former.tokens) + 1)
            if rng.random() < 0.4:
                cut = cut // self.layout.page * self.layout.page + rng.choice((0, 0, 1, -1))
            beginning = former.tokens[: max(0, cut)]
            if rng.random() < 0.9:
                salt, lora = former.salt, former.lora
        room = max(1, longest - len(beginning))
        own = [rng.randrange(1, VOCABULARY) for _ in range(rng.randrange(room) // 2 + (not beginning))]
        return TreePrompt((beginning + own)[:longest], salt, lora)

    def step(self) -> None:
        """Insert or evict at random, as often as one step of the scheduler may, and end the step."""
        for _ in range(1 if self._most_actions == 1 else self._rng.randint(1, self._most_actions)):
            self._act()
        self.end_step()

    def _act(self) -> None:
        rng = self._rng
        if self._most_actions > 1 and rng.random() < 0.2:
            # A match splits nodes too.
            self.reused(self.prompt())
        if rng.random() < 0.25:
            tokens, window_tokens = (rng.randrange(2 * self._unit) * (rng.random() < 0.5) for _ in range(2))
            self.evict(tokens, window_tokens, rng.randrange(2))
        else:
            self.insert(self.prompt())
        if self._has_host:
            self._move_on_host()
        elif rng.random() < 0.004:
            self.cache.reset()
            self._allocator.clear()
            if "MAMBA" in self.layout.components:
                self._pool.mamba_allocator.clear()

    def end_step(self) -> None:
        if events := self.cache.take_events():
            self.publish(events)
        if self.tap is not None:
            self.tap.step()

    def insert(self, prompt: TreePrompt) -> None:
        key = self.key(prompt).page_aligned(self.layout.page)
        if not len(key):
            return
        value = self._allocated(len(key))
        params = InsertParams(key=key, value=value)
        if "MAMBA" in self.layout.components:
            params.mamba_value = self._state()
        result = self.cache.insert(params)
        if params.mamba_value is not None and result.mamba_exist:
            self._pool.mamba_allocator.free(params.mamba_value)
        self._known.append(prompt)

    def _allocated(self, count: int) -> Any:
        """Return slots of the pools, for which the cache evicts others if needed."""
        return self._until(lambda: self._fixtures._alloc(self._allocator, count), count, count, 0)

    def _state(self) -> Any:
        return self._until(lambda: self._pool.mamba_allocator.alloc(1), 0, 0, 1)

    def _until(self, allocate: Callable[[], Any], tokens: int, window_tokens: int, states: int) -> Any:
        for _ in range(20):
            allocation = allocate()
            if allocation is not None:
                return allocation
            self.evict(tokens, window_tokens, states)
        raise AssertionError("the cache gives nothing up")

    def evict(self, tokens: int, window_tokens: int = 0, states: int = 0) -> None:
        has = self.layout.components
        self.cache.evict(
            EvictParams(
                num_tokens=tokens,
                swa_num_tokens=window_tokens if "SWA" in has else 0,
                mamba_num=states if "MAMBA" in has and not self._has_host else 0,
            )
        )

    def _move_on_host(self) -> None:
        """Back a path up to the host, evict tokens from the device for it, and evict some from the host."""
        rng, core = self._rng, self.cache.tree_core
        nodes = [node.id for node in core._node_arena.values() if node.parent is not None]
        if nodes and rng.random() < 0.6:
            self._fixtures._simulate_backup(self.cache, rng.choice(nodes))
            self.evict(rng.randrange(6 * self._unit), 0, 0)
        if rng.random() < 0.2:
            result = core.drive_host_eviction(ComponentType.FULL, rng.randrange(1, 4 * self._unit))
            # The freed places on the host do not belong to the host's pool.
            result.host_frees.clear()
            self.cache._drain_device_frees(result.device_frees)
            self.cache._apply_cache_actions(result.cache_actions)
            result.device_frees.clear()
            result.cache_actions.clear()

    def matched(self, prompt: TreePrompt) -> tuple[int, int]:
        """Return the tokens of the longest match on the device, and of the longest match on device or host."""
        match = self.cache.match_prefix(MatchPrefixParams(key=self.key(prompt, len(prompt.tokens) - 1)))
        node, tokens = self.cache.tree_core.node_by_id(match.best_match_node), 0
        while node.parent is not None:
            tokens += len(node.key)
            node = node.parent
        return int(match.device_prefix_len), tokens

    def reused(self, prompt: TreePrompt) -> int:
        """Return the tokens that a request with this prompt would not compute."""
        match = self.cache.match_prefix(MatchPrefixParams(key=self.key(prompt, len(prompt.tokens) - 1)))
        return int(match.device_prefix_len)

    def probes(self, count: int) -> Iterable[TreePrompt]:
        for _ in range(count):
            yield self.prompt()
