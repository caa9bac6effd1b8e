# SPDX-License-Identifier: Apache-2.0
"""A normal form of a batch, which is equal whether the batch was read as single events or as runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvrouter.events.vllm.messages import GPU, AllBlocksCleared, BlockStored, Event
from kvrouter.router.index.ingest.event_runs import EventRun


def sections(runs: Sequence[EventRun | Event]) -> list[Any]:
    """Return the normal form of a batch, so that two readings of it can be compared.

    Clears and stores on other media stay single events, in order. The events between them are divided into sections of
    stores and of removals; a section has the sorted hashes, the number of events, and the sorted roots of each shape of
    event, in no order, because equal events may differ in bytes.
    """
    parts: list[Any] = []
    section: dict[Any, list[Any]] = {}
    stores: bool | None = None
    for run in runs:
        event = run.event if isinstance(run, EventRun) else run
        if isinstance(event, AllBlocksCleared) or (isinstance(event, BlockStored) and event.medium != GPU):
            parts.append((type(event).__name__, _plain(event)))
            section, stores = {}, None
            continue
        if isinstance(event, BlockStored) is not stores:
            stores = isinstance(event, BlockStored)
            section = {}
            parts.append((stores, section))
        fields = _plain(event)
        for name in ("block_hashes", "parent_block_hash", "session_id", "lora_name"):
            fields.pop(name, None)
        if isinstance(run, EventRun):
            hashes, count, roots = run.hashes.tolist(), run.count, run.roots.tolist()
        else:
            hashes, count = event.block_hashes.tolist(), 1
            roots = hashes[:1] if isinstance(event, BlockStored) and event.parent_block_hash is None else []
        entry = section.setdefault(str(sorted(fields.items())), [[], 0, []])
        entry[0] = sorted(entry[0] + hashes)
        entry[1] += count
        entry[2] = sorted(entry[2] + roots)
    return parts


def _plain(event: Any) -> dict[str, Any]:
    fields = msgspec.structs.asdict(event)
    if "block_hashes" in fields:
        fields["block_hashes"] = fields["block_hashes"].tolist()
    return fields
