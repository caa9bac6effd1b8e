# SPDX-License-Identifier: Apache-2.0
"""What SGLang's Rust radix core holds, component by component, as changes since the last look.

The core keeps its nodes to itself, but answers for each by its number: where it stands, the digests of its pages, and
each component's slots. So what has to be known is which nodes may have changed. Insertions and matches (which split
nodes) name a node, and the change is on its path from the root. What is given up comes as slots: of each value its first
slot is kept here, so a slot leads back to its node. At the end of a step these nodes are looked at, and what
they hold is compared with what was reported of them, as for the Python core. What leaves the host tier leads back to no
node, so a cache with one is not followed.
Source: SGLang 0.5.23 srt/mem_cache/rust_tree_core/adapter.py, unified_cache/unified_tree_core_interface.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from kvrouter.engine_patch.sglang.tree_residency import Changes, Held, TreeGroup, TreePlace, net_changes, watch_reset
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


# SGLang's number of the component that every cache has.
FULL = 0


# Of nodes below one parent, one alone begins with a page: (parent, (extra_key, cache salt), the page's digest).
Head: TypeAlias = tuple[int, tuple[str | None, str | None], str]


class Node(NamedTuple):
    """Of a node what was last read. digests: of its pages, as events have them; slots: (component, the first slot of its
    value)."""

    head: Head
    digests: list[str]
    held: Held
    slots: tuple[tuple[int, int], ...]


# The namespace of an `extra_key`; the digests of a key's pages, as events have them.
SeedOf: TypeAlias = Callable[[str | None], bytes | None]
DigestsOf: TypeAlias = Callable[[Any], list[str]]


class RustResidency:
    """Of one radix cache. components: SGLang's, by number; groups: those that are reported."""

    def __init__(
        self,
        core: Any,
        components: Mapping[int, Any],
        groups: Iterable[TreeGroup],
        seed_of: SeedOf,
        digests_of: DigestsOf,
    ) -> None:
        self._core = core
        self._components = components
        self._groups = tuple(groups)
        self._page = int(core.page_size)
        self._seed_of, self._digests_of = seed_of, digests_of
        self._nodes: dict[int, Node] = {}
        self._by_slot: dict[tuple[int, int], int] = {}
        self._heads: dict[Head, int] = {}
        # Nodes to look at, with all above them, and what was looked up or inserted there.
        self._paths: dict[int, Any] = {}
        self._key: Any = None

    # What may have changed

    def named(self, node_id: Any, key: Any = None) -> None:
        """key: its path is the beginning of it."""
        if node_id is not None:
            self._paths[int(node_id)] = key or self._paths.get(int(node_id))

    def knows(self, node_id: Any) -> bool:
        return node_id in self._nodes

    def key_of(self, name: str, given: tuple[Any, ...]) -> Any:
        """What a method looks up or inserts; None for others. An insertion may take several calls."""
        if name == "begin_insert":
            self._key = given[0].key
        if name in ("begin_insert", "resume_insert"):
            return self._key
        return given[0].key if name == "match_prefix" else None

    def freed(self, slot: int, values: Iterable[Any]) -> None:
        """values: tensors of slots that a component gave up. Those of no node were never in the tree."""
        for value in values:
            for one in value.tolist():
                # A window is given up by the places of full attention that stand for it.
                for where in {slot, FULL}:
                    self.named(self._by_slot.get((where, one)))

    def clear(self) -> None:
        """The tree is empty; nothing is reported of what it held."""
        for known in (self._nodes, self._by_slot, self._heads, self._paths):
            known.clear()

    # What has changed

    def take(self) -> Changes | None:
        """What changed since the last call; None: nothing."""
        if not self._paths:
            return None
        paths, self._paths = self._paths, {}
        removed: dict[TreePlace, list[str]] = {}
        stored: dict[TreePlace, list[str]] = {}
        seen: set[int] = set()
        # Those with a key first: it says what a node's pages are.
        for node_id, key in sorted(paths.items(), key=lambda item: item[1] is None):
            self._look_along(node_id, key, seen, removed, stored)
        return net_changes(removed, stored)

    def _look_along(
        self,
        node_id: int,
        key: Any,
        seen: set[int],
        removed: dict[TreePlace, list[str]],
        stored: dict[TreePlace, list[str]],
    ) -> None:
        if node_id in seen:
            return
        try:
            ((*path,),) = self._core.collect_path_info([node_id])
        except KeyError:
            seen.add(node_id)
            self._gone(node_id, removed)
            return
        for info in path:
            if info.node_id in seen:
                continue
            seen.add(info.node_id)
            self._look_at(info, key, seen, removed, stored)

    def _look_at(
        self,
        info: Any,
        key: Any,
        seen: set[int],
        removed: dict[TreePlace, list[str]],
        stored: dict[TreePlace, list[str]],
    ) -> None:
        before = self._nodes.get(info.node_id)
        namespace = self._core.prefetch_anchor_info(info.node_id)
        digests = self._digests(info, before, key, namespace)
        held, slots = self._held(info.node_id, digests, self._seed_of(namespace[0]))
        head = (info.parent_id, namespace, digests[0])
        # A node that is new may have been cut off another one, which is below it now.
        cut = self._heads.get(head) if before is None else None
        if before is not None and self._heads.get(before.head) == info.node_id:
            del self._heads[before.head]
        self._heads[head] = info.node_id
        if before is not None:
            for slot in before.slots:
                if self._by_slot.get(slot) == info.node_id:
                    del self._by_slot[slot]
        for slot in slots:
            self._by_slot[slot] = info.node_id
        self._nodes[info.node_id] = Node(head, digests, held, slots)
        _compare({} if before is None else before.held, held, removed, stored)
        if cut is not None and cut not in seen:
            self._look_along(cut, None, seen, removed, stored)

    def _digests(self, info: Any, before: Node | None, key: Any, namespace: tuple[str | None, str | None]) -> list[str]:
        """Of a node's pages. In a namespace, those of the core are not those of its events."""
        pages = (info.path_end - info.path_start) // self._page
        if before is not None and len(before.digests) >= pages:
            # What was cut off it went to a new node above it.
            return before.digests[len(before.digests) - pages :]
        if namespace == (None, None):
            return list(self._core.get_hash_values(info.node_id))
        if key is None:
            raise LookupError(f"nothing says what the {pages} pages of node {info.node_id} are")
        first = info.path_start // self._page
        return self._digests_of(key)[first : first + pages]

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

    def _gone(self, node_id: int, removed: dict[TreePlace, list[str]]) -> None:
        before = self._nodes.pop(node_id, None)
        if before is None:
            return
        if self._heads.get(before.head) == node_id:
            del self._heads[before.head]
        for slot in before.slots:
            if self._by_slot.get(slot) == node_id:
                del self._by_slot[slot]
        _compare(before.held, {}, removed, {})


def _compare(before: Held, held: Held, removed: dict[TreePlace, list[str]], stored: dict[TreePlace, list[str]]) -> None:
    for place, digests in before.items():
        if held.get(place) != digests:
            removed.setdefault(place, []).extend(digests)
    for place, digests in held.items():
        if before.get(place) != digests:
            stored.setdefault(place, []).extend(digests)


def is_rust_core(core: Any) -> bool:
    names = ("collect_path_info", "get_hash_values", "prefetch_anchor_info", "get_component_device_value")
    return hasattr(core, "_binding") and all(hasattr(core, name) for name in (*names, *NAMING, *GIVEN))


def watch_rust(core: Any, residency: RustResidency, cleared: Callable[[], None], failed: Callable[[], None]) -> None:
    """Follows the nodes of a Rust core. cleared: called when it was emptied; failed: in an `except` block."""

    def wrap(name: str, then: Callable[[tuple[Any, ...], Any], None]) -> None:
        original = getattr(core, name)

        def method(*given: Any, **named: Any) -> Any:
            result = original(*given, **named)
            try:
                then(given, result)
            except Exception:
                failed()
            return result

        setattr(core, name, method)

    def follow(name: str) -> Callable[[tuple[Any, ...], Any], None]:
        paths = [path.split(".") for path in NAMING.get(name, ())]
        by_argument, frees = name in GIVEN, name in FREEING

        def then(given: tuple[Any, ...], result: Any) -> None:
            if by_argument and given:
                residency.named(given[0])
            key = residency.key_of(name, given)
            for path in paths:
                found = result
                for part in path:
                    found = getattr(found, part, None)
                # A match changes nothing but by a split, which leaves a node that is not known.
                if name != "match_prefix" or not residency.knows(found):
                    residency.named(found, key)
            if frees:
                for component, values in result.device_frees.items():
                    residency.freed(int(component), values)

        return then

    for name in dict.fromkeys((*NAMING, *GIVEN, *FREEING)):
        wrap(name, follow(name))

    def acted(_: tuple[Any, ...], action: Any) -> None:
        # Frees of no component are of full attention, and of what hangs on its slots.
        if (values := getattr(action, "indices", None)) is not None:
            residency.freed(int(getattr(action, "component_type", FULL)), values)
        for name in ("node_id", "tail_node_id", "new_node_id", "new_child_node_id", "old_node_id"):
            residency.named(getattr(action, name, None))

    wrap("_cache_action_from_tagged", acted)

    watch_reset(core, residency.clear, cleared, failed)
