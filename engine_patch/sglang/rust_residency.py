# SPDX-License-Identifier: Apache-2.0
"""The blocks that SGLang's Rust radix core holds, component by component, as changes since the last look.

The core does not list its nodes, but describes each one by its number: its position, the tokens and digests of its
pages, and the slots of each component. So this module has to know which nodes may have changed. Insertions and matches
(which split nodes) name a node, and the change is on its path from the root. An eviction names slots: the first slot of
each value is kept here, so that a slot leads back to its node. At the end of a step, and before any node is evicted
within it, these nodes are read, and their blocks are compared with the last reading. Blocks that leave the host tier
lead back to no node, so a cache with a host tier is not followed.

Source: SGLang 0.5.23 srt/mem_cache/rust_tree_core/adapter.py, unified_cache/unified_tree_core_interface.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from kvrouter.engine_patch.sglang.tree_residency import (
    Changes,
    Held,
    Tally,
    TreeGroup,
    TreePlace,
    count_changes,
    net_changes,
    watch_reset,
)
from kvrouter.events.vllm.messages import GPU

# Methods of the core whose results name nodes: the path to each may have changed.
NAMING = {
    "match_prefix": ("last_device_node", "last_host_node", "best_match_node", "last_visited_node_id"),
    "begin_insert": ("result.last_device_node",),
    "resume_insert": ("result.last_device_node",),
    "evict_device_next_node": ("node_id",),
}
# Methods whose first argument is a node.
GIVEN = (
    "evict_device_leaf",
    "demote",
    "drop_subtree_no_host",
    "finish_mamba_state_eviction",
    "finish_swa_state_eviction",
    "set_component_device_value",
    "dec_swa_lock_only",
    "dec_window_lock_only",
    "evict_excess_path_states",
)
# Methods whose results have slots that were given up.
FREEING = (
    "evict_device_next_node",
    "evict_device_leaf",
    "demote",
    "drop_subtree_no_host",
    "finish_mamba_state_eviction",
    "finish_swa_state_eviction",
    "drive_host_eviction",
    "dec_swa_lock_only",
    "dec_window_lock_only",
)
# Methods that may remove whole nodes. The nodes named before such a call are read before it: a node that an insertion
# split off another one is found only through the leaf below it, and the call may remove that leaf.
EVICTING = ("evict_device_start", "drop_subtree_no_host", "dec_swa_lock_only", "dec_window_lock_only")
# Methods that describe a node.
DESCRIBING = (
    "collect_path_info",
    "get_hash_values",
    "prefetch_anchor_info",
    "get_component_device_value",
    "snapshot_buffer_backup",
)

# SGLang's number of the component that every cache has.
FULL = 0


# (parent, (extra_key, cache salt), digest of the first page): no two nodes share all three.
Head: TypeAlias = tuple[int, tuple[str | None, str | None], str]


class Node(NamedTuple):
    """The last reading of one node."""

    head: Head
    # The digests of the node's pages, as events have them.
    digests: list[str]
    held: Held
    # (component, the first slot of its value), for each component that has a value.
    slots: tuple[tuple[int, int], ...]


# Returns the namespace of an `extra_key`.
SeedOf: TypeAlias = Callable[[str | None], bytes | None]
# Returns the digests of a key's pages that follow the page with this digest, or all of them for None.
DigestsAfter: TypeAlias = Callable[[Any, str | None], list[str]]


class RustResidency:
    """The nodes of one radix cache as they were last read, and the numbers of those that may have changed since."""

    def __init__(
        self,
        core: Any,
        components: Mapping[int, Any],
        groups: Iterable[TreeGroup],
        seed_of: SeedOf,
        digests_after: DigestsAfter,
    ) -> None:
        """Follow an empty cache.

        Args:
            core: SGLang's Rust core.
            components: SGLang's components, by number.
            groups: The components that are reported.
            seed_of: Returns the namespace of an `extra_key`.
            digests_after: Returns the digests of a key's pages behind a page with a given digest.
        """
        self._core = core
        self._components = components
        self._groups = tuple(groups)
        self._page = int(core.page_size)
        self._seed_of, self._digests_after = seed_of, digests_after
        self._nodes: dict[int, Node] = {}
        self._by_slot: dict[tuple[int, int], int] = {}
        # Node ids by head.
        self._heads: dict[Head, int] = {}
        # Nodes to read together with all nodes above them, in the order in which they were named.
        self._named: dict[int, None] = {}
        self._tally: Tally = {}
        self._ended = False

    # Nodes that may have changed

    def named(self, node_id: Any) -> None:
        """Note that the nodes on the path to this one may have changed; ignore None."""
        if node_id is not None and not self._ended:
            self._named[int(node_id)] = None

    def knows(self, node_id: Any) -> bool:
        """Return whether the node was read before."""
        return node_id in self._nodes

    def freed(self, component: int, values: Iterable[Any]) -> None:
        """Note that slots were given up.

        `values` are tensors of a component's slots, some of which were never in the tree.
        """
        for value in values:
            for slot in value.tolist():
                # A window that is given up is named by its slots of full attention.
                for owner in {component, FULL}:
                    self.named(self._by_slot.get((owner, slot)))

    def clear(self) -> None:
        """Forget all blocks of a tree that was emptied, and report nothing of it."""
        for collection in (self._nodes, self._by_slot, self._heads, self._named, self._tally):
            collection.clear()

    def end(self) -> None:
        """Forget everything, and collect nothing from now on."""
        self._ended = True
        self.clear()

    # Changes

    def take(self) -> Changes | None:
        """Return the changes since the last call, or None if there are none."""
        self.settle()
        tally, self._tally = self._tally, {}
        return net_changes(tally)

    def settle(self) -> None:
        """Read the nodes that were named so far."""
        named, self._named = self._named, {}
        seen: set[int] = set()
        for node_id in named:
            self._look_along(node_id, seen)

    def _look_along(self, node_id: int, seen: set[int]) -> None:
        if node_id in seen:
            return
        try:
            ((*path,),) = self._core.collect_path_info([node_id])
        except KeyError:
            seen.add(node_id)
            self._gone(node_id)
            return
        for info in path:
            if info.node_id not in seen:
                seen.add(info.node_id)
                self._look_at(info, seen)

    def _look_at(self, info: Any, seen: set[int]) -> None:
        before = self._nodes.get(info.node_id)
        namespace = self._core.prefetch_anchor_info(info.node_id)
        digests = self._digests(info, before, namespace)
        if not digests:
            return
        held, slots = self._held(info.node_id, digests, self._seed_of(namespace[0]))
        head = (info.parent_id, namespace, digests[0])
        # A new node may have been split off another one, which is now below it.
        split_node = self._heads.get(head) if before is None else None
        if before is not None:
            self._forget(info.node_id, before)
        self._heads[head] = info.node_id
        for slot in slots:
            self._by_slot[slot] = info.node_id
        self._nodes[info.node_id] = Node(head, digests, held, slots)
        count_changes(self._tally, {} if before is None else before.held, held)
        if split_node is not None:
            self._look_along(split_node, seen)

    def _digests(self, info: Any, before: Node | None, namespace: tuple[str | None, str | None]) -> list[str]:
        """Return the digests of a node's pages, as events have them.

        The list is empty if the core does not show the tokens: the node has nothing on the device, or the tokens of a
        node above it are not shown.
        """
        if before is not None:
            # A split moves the first pages to a new node above this one, so the last digests remain.
            return before.digests[-((info.path_end - info.path_start) // self._page) :]
        if namespace == (None, None):
            return list(self._core.get_hash_values(info.node_id))
        # In a namespace, the core's digests differ from those of its events.
        parent = self._nodes.get(info.parent_id)
        shown = self._core.snapshot_buffer_backup(info.node_id, False)
        if shown is None or (parent is None and info.path_start):
            return []
        return self._digests_after(shown.key, None if parent is None else parent.digests[-1])

    def _held(
        self, node_id: int, digests: list[str], namespace: bytes | None
    ) -> tuple[Held, tuple[tuple[int, int], ...]]:
        core = self._core
        held: Held = {}
        slots = []
        for group in self._groups:
            component = self._components[group.slot]
            value = core.get_component_device_value(node_id, component)
            if value is None or not len(value):
                continue
            slots.append((group.slot, int(value[0])))
            held[TreePlace(group, GPU, namespace)] = digests[-1:] if group.ends else digests
        return held, tuple(slots)

    def _gone(self, node_id: int) -> None:
        before = self._nodes.pop(node_id, None)
        if before is not None:
            self._forget(node_id, before)
            count_changes(self._tally, before.held, {})

    def _forget(self, node_id: int, before: Node) -> None:
        """Remove the entries that lead to a node by its last reading."""
        if self._heads.get(before.head) == node_id:
            del self._heads[before.head]
        for slot in before.slots:
            if self._by_slot.get(slot) == node_id:
                del self._by_slot[slot]


def is_rust_core(core: Any) -> bool:
    """Return whether a core is SGLang's Rust core with all methods that this module uses."""
    return hasattr(core, "_binding") and all(hasattr(core, name) for name in (*DESCRIBING, *NAMING, *GIVEN, *EVICTING))


def watch_rust(core: Any, residency: RustResidency, cleared: Callable[[], None], failed: Callable[[], None]) -> None:
    """Follow the nodes of a Rust core by wrapping its methods on the instance.

    Args:
        core: SGLang's Rust core.
        residency: Collects the changes.
        cleared: Called after the core was emptied.
        failed: Called in an `except` block if this code fails.
    """

    def wrap(name: str, then: Callable[[tuple[Any, ...], Any], None]) -> None:
        original = getattr(core, name)
        evicts = name in EVICTING

        def method(*args: Any, **kwargs: Any) -> Any:
            if evicts:
                try:
                    residency.settle()
                except Exception:
                    failed()
            result = original(*args, **kwargs)
            try:
                then(args, result)
            except Exception:
                failed()
            return result

        setattr(core, name, method)

    def follow(name: str) -> Callable[[tuple[Any, ...], Any], None]:
        paths = [path.split(".") for path in NAMING.get(name, ())]
        by_argument, frees = name in GIVEN, name in FREEING

        def then(args: tuple[Any, ...], result: Any) -> None:
            if by_argument and args:
                residency.named(args[0])
            for path in paths:
                value = result
                for part in path:
                    value = getattr(value, part, None)
                # A match changes nodes only by a split, which leaves a node that was not read before.
                if name != "match_prefix" or not residency.knows(value):
                    residency.named(value)
            if frees:
                for component, values in result.device_frees.items():
                    residency.freed(int(component), values)

        return then

    for name in dict.fromkeys((*NAMING, *GIVEN, *FREEING, *EVICTING)):
        wrap(name, follow(name))

    def acted(_: tuple[Any, ...], action: Any) -> None:
        # Frees that name no component are of full attention, and of the components that are tied to its slots.
        if (values := getattr(action, "indices", None)) is not None:
            residency.freed(int(getattr(action, "component_type", FULL)), values)
        for name in ("node_id", "tail_node_id", "new_node_id", "new_child_node_id", "old_node_id"):
            residency.named(getattr(action, name, None))

    wrap("_cache_action_from_tagged", acted)

    watch_reset(core, residency.clear, cleared, failed)
