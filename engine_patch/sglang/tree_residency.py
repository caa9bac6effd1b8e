# SPDX-License-Identifier: Apache-2.0
"""What a radix cache holds, component by component, as changes since the last look.

SGLang's own events follow full attention alone. Here every node whose values changed is looked at again once a step,
and what it holds now is compared with what was reported of it: so the order of the many small changes within a step
(splits, tombstones, load-backs) is no matter. Full attention and windows hold each page of a node; a Mamba state stands
for the node's last page. The scheduler's thread collects; hashes become numbers in the reporter's.
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
# On a node's data: what is called when one of these changes.
OWNER = "_kvrouter_owner"

# Hexadecimal digits of a digest that its event carries.
EVENT_DIGITS = 16


class TreeGroup(NamedTuple):
    """One component. slot: in `component_data`; kind, window: as in a catalog; ends: a state at the end of a node."""

    group_idx: int
    slot: int
    kind: str
    window: int | None
    ends: bool


class TreePlace(NamedTuple):
    """namespace: the seed with which hashes are hashed again, None for most."""

    group: TreeGroup
    medium: str
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
    """Of one radix cache. groups: its components. digests: of a node's pages, and their namespace."""

    def __init__(self, groups: Iterable[TreeGroup], digests: Callable[[Any], tuple[list[str], bytes | None]]) -> None:
        self._groups = tuple(groups)
        self._digests = digests
        self._alive: set[int] = set()
        self._changed: dict[int, Any] = {}
        self._reported: dict[int, Held] = {}
        self._ended = False

    def add(self, node: Any) -> None:
        """A node of the tree, whose values are watched from now on."""
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
        if not self._ended:
            self._alive.discard(node.id)
            self._changed[node.id] = node

    def clear(self) -> None:
        """The tree is empty; nothing is reported of what it held."""
        self._alive.clear()
        self._changed.clear()
        self._reported.clear()

    def end(self) -> None:
        """Forget everything, and collect nothing from now on."""
        self._ended = True
        self.clear()

    def take(self) -> Changes | None:
        """What changed since the last call; None: nothing."""
        if not self._changed:
            return None
        changed, self._changed = self._changed, {}
        tally: Tally = {}
        for number, node in changed.items():
            held = self._held(node) if number in self._alive else {}
            before = self._reported.pop(number, {})
            if held:
                self._reported[number] = held
            count_changes(tally, before, held)
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
    """Return the digests that came and went, leaving out those that moved from one node to another; None if there are
    none."""
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
    """For the reporter's thread: removals first, as a page may go from one tier to another."""
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
    """The hashes as SGLang's events have them: the first 8 bytes, hashed again in a namespace."""
    hashes = [int(digest[:EVENT_DIGITS], 16) for digest in digests]
    if namespace is not None:
        again = (hashlib.sha256(namespace + one.to_bytes(8, "big")).digest() for one in hashes)
        hashes = [int.from_bytes(digest[:8], "big") for digest in again]
    return pack(hashes)


def watch_values(data_class: Any) -> None:
    """Makes every node's data say when one of VALUES is set. Once a process."""
    if "__setattr__" in vars(data_class):
        return

    def __setattr__(self: Any, name: str, value: Any) -> None:
        held: Mapping[str, Any] = self.__dict__
        self.__dict__[name] = value
        if name in VALUES and (touch := held.get(OWNER)) is not None:
            touch()

    data_class.__setattr__ = __setattr__


def watch_reset(core: Any, clear: Callable[[], None], cleared: Callable[[], None], failed: Callable[[], None]) -> None:
    """Calls `clear` before a tree of either core is emptied, and `cleared` behind it, whether or not that raised."""
    reset = core.reset

    def reset_tree(*given: Any, **named: Any) -> Any:
        clear()
        try:
            return reset(*given, **named)
        finally:
            try:
                cleared()
            except Exception:
                failed()

    core.reset = reset_tree


def watch_tree(core: Any, residency: TreeResidency, cleared: Callable[[], None], failed: Callable[[], None]) -> None:
    """Follows the nodes of a tree, which must be the Python core's. cleared: called when it was emptied; failed: in an
    `except` block."""
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
