# SPDX-License-Identifier: Apache-2.0
"""The blocks that a radix cache holds, component by component, as changes since the last look.

SGLang's own events follow full attention alone. Here every node whose values changed is read again once a step, and its
present blocks are compared with its reported ones, so the order of the many small changes within a step (splits,
tombstones, load-backs) does not matter. Full attention and windows hold each page of a node; a Mamba state stands for
the node's last page. The scheduler's thread collects changes; the reporter's thread turns hashes into numbers.
Source: SGLang 0.5.23 srt/mem_cache/unified_cache/unified_tree_core.py, components/base.py, events.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from kvrouter.engine_patch.reporter.translate import pack
from kvrouter.events.patch.messages import ReportEvent, ReportRemoved, ReportStored
from kvrouter.events.vllm.messages import GPU

# The host tier's medium; SGLang's own events call it CPU_PINNED.
HOST = "CPU"

# Attributes of a node's data whose change is a change of residency: on the device and on the host.
VALUES = {"value": GPU, "host_value": HOST}
# The attribute of a node's data with the function that is called when one of VALUES changes.
OWNER = "_kvrouter_owner"

# Hexadecimal digits of a digest that the digest's event carries.
EVENT_DIGITS = 16


class TreeGroup(NamedTuple):
    """One component of a radix cache, as a group."""

    group_idx: int
    # Index in `component_data`.
    slot: int
    # Kind of the group, as in a catalog.
    kind: str
    # Tokens of a sliding window, as in a catalog, or None.
    window: int | None
    # Whether the component is a state at the end of a node.
    ends: bool


class TreePlace(NamedTuple):
    """The group, medium and namespace of cached pages; page digests are counted separately for each combination."""

    group: TreeGroup
    medium: str
    # The seed with which hashes are hashed again, or None for most blocks.
    namespace: bytes | None


# The whole digests of one node's pages, in hexadecimal, by place.
Held: TypeAlias = dict[TreePlace, list[str]]

# How many more nodes hold each digest than before, by place. A page is on one node at a time.
Tally: TypeAlias = dict[TreePlace, dict[str, int]]


class Changes(NamedTuple):
    """Digests that came and went, by place."""

    removed: dict[TreePlace, list[str]]
    stored: dict[TreePlace, list[str]]


class TreeResidency:
    """The nodes of one radix cache as they were last reported, and those that changed since."""

    def __init__(self, groups: Iterable[TreeGroup], digests: Callable[[Any], tuple[list[str], bytes | None]]) -> None:
        """Follow no node yet.

        Args:
            groups: The cache's components.
            digests: Returns the digests of a node's pages, and their namespace.
        """
        self._groups = tuple(groups)
        self._digests = digests
        self._alive: set[int] = set()
        self._changed: dict[int, Any] = {}
        self._reported: dict[int, Held] = {}
        self._ended = False

    def add(self, node: Any) -> None:
        """Watch the values of a node of the tree from now on."""
        if self._ended:
            return
        self._alive.add(node.id)
        self._changed[node.id] = node

        def touch() -> None:
            if not self._ended:
                self._changed[node.id] = node

        for group in self._groups:
            node.component_data[group.slot].__dict__[OWNER] = touch

    def remove(self, node: Any) -> None:
        """Note that a node left the tree."""
        if not self._ended:
            self._alive.discard(node.id)
            self._changed[node.id] = node

    def clear(self) -> None:
        """Forget all blocks of a tree that was emptied, and report nothing of it."""
        self._alive.clear()
        self._changed.clear()
        self._reported.clear()

    def end(self) -> None:
        """Forget everything, and collect nothing from now on."""
        self._ended = True
        self.clear()

    def take(self) -> Changes | None:
        """Return the changes since the last call, or None if there are none."""
        if not self._changed:
            return None
        changed, self._changed = self._changed, {}
        tally: Tally = {}
        for node_id, node in changed.items():
            held = self._held(node) if node_id in self._alive else {}
            reported = self._reported.pop(node_id, {})
            if held:
                self._reported[node_id] = held
            count_changes(tally, reported, held)
        return net_changes(tally)

    def _held(self, node: Any) -> Held:
        held: Held = {}
        if node.parent is None:
            # The root holds nothing.
            return held
        digests, namespace = None, None
        for group in self._groups:
            data = node.component_data[group.slot]
            for name, medium in VALUES.items():
                if getattr(data, name) is None:
                    continue
                if digests is None:
                    digests, namespace = self._digests(node)
                held[TreePlace(group, medium, namespace)] = digests[-1:] if group.ends else digests
        return held


def count_changes(tally: Tally, before: Held, held: Held) -> None:
    """Add the difference between the blocks that one node held before and those that it holds now."""
    for was, now, change in ((before, held, -1), (held, before, 1)):
        for place, digests in was.items():
            if now.get(place) != digests:
                counts = tally.setdefault(place, {})
                for digest in digests:
                    counts[digest] = counts.get(digest, 0) + change


def net_changes(tally: Tally) -> Changes | None:
    """Return the digests that came and went, or None if there are none.

    Digests that moved from one node to another are left out.
    """
    removed, stored = (
        {
            place: digests
            for place, counts in tally.items()
            if (digests := [digest for digest, count in counts.items() if count * sign > 0])
        }
        for sign in (-1, 1)
    )
    return Changes(removed, stored) if removed or stored else None


def reports_of(changes: Changes, page_tokens: int) -> list[ReportEvent]:
    """Return the reports of changes, for the reporter's thread.

    Removals come first, because a page may move from one tier to another.
    """
    reports: list[ReportEvent] = [
        ReportRemoved(_packed(digests, place.namespace), place.group.group_idx, place.medium)
        for place, digests in changes.removed.items()
    ]
    reports += [
        ReportStored(
            _packed(digests, place.namespace),
            place.group.group_idx,
            place.medium,
            page_tokens,
            kind=place.group.kind,
            sliding_window=place.group.window,
        )
        for place, digests in changes.stored.items()
    ]
    return reports


def _packed(digests: Iterable[str], namespace: bytes | None) -> bytes:
    """Return the hashes as SGLang's events have them: the first 8 bytes, hashed again in a namespace."""
    hashes = [int(digest[:EVENT_DIGITS], 16) for digest in digests]
    if namespace is not None:
        seeded = (hashlib.sha256(namespace + block_hash.to_bytes(8, "big")).digest() for block_hash in hashes)
        hashes = [int.from_bytes(digest[:8], "big") for digest in seeded]
    return pack(hashes)


def watch_values(data_class: Any) -> None:
    """Make every node's data call its OWNER function when one of VALUES is set. Has no effect the second time."""
    if "__setattr__" in vars(data_class):
        return

    def __setattr__(self: Any, name: str, value: Any) -> None:
        attributes: Mapping[str, Any] = self.__dict__
        self.__dict__[name] = value
        if name in VALUES and (touch := attributes.get(OWNER)) is not None:
            touch()

    data_class.__setattr__ = __setattr__


def watch_reset(core: Any, clear: Callable[[], None], cleared: Callable[[], None], failed: Callable[[], None]) -> None:
    """Call `clear` before a tree of either core is emptied, and `cleared` afterwards, even if the reset raises."""
    reset = core.reset

    def reset_tree(*args: Any, **kwargs: Any) -> Any:
        clear()
        try:
            return reset(*args, **kwargs)
        finally:
            try:
                cleared()
            except Exception:
                failed()

    core.reset = reset_tree


def watch_tree(core: Any, residency: TreeResidency, cleared: Callable[[], None], failed: Callable[[], None]) -> None:
    """Follow the nodes of the Python core's tree.

    Args:
        core: SGLang's Python core.
        residency: Collects the changes.
        cleared: Called after the tree was emptied.
        failed: Called in an `except` block if this code fails.
    """
    register, unregister = core._register_node, core._unregister_node

    def _register_node(node: Any) -> None:
        register(node)
        try:
            residency.add(node)
        except Exception:
            failed()

    def _unregister_node(node: Any) -> None:
        unregister(node)
        try:
            residency.remove(node)
        except Exception:
            failed()

    core._register_node, core._unregister_node = _register_node, _unregister_node
    watch_reset(core, residency.clear, cleared, failed)
    for node in core._node_arena.values():
        residency.add(node)
