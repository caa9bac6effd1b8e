# SPDX-License-Identifier: Apache-2.0
"""vLLM's events of any version become our topic's events; stand-ins have the names and fields of vLLM's own."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from kvrouter.engine_patch.hooks.offload_events import ChunkTable, chunk_sizes, partial_chunk, whole_chunk
from kvrouter.engine_patch.hooks.positions import MAX_NOTES, note, position_of
from kvrouter.engine_patch.reporter.translate import (
    Chunk,
    Notes,
    OffloadGroup,
    Position,
    medium_name,
    merge_runs,
    pack,
    short_hash,
    translate,
    translate_offloaded,
)
from kvrouter.engine_patch.setup.features import parse_version
from kvrouter.events.patch.messages import ReportCleared, ReportRemoved, ReportStored, unpack_hashes


def event(name: str, **fields: Any) -> Any:
    return type(name, (), {})() if not fields else _with(type(name, (), {})(), fields)


def _with(made: Any, fields: dict[str, Any]) -> Any:
    vars(made).update(fields)
    return made


def stored(hashes: list[Any], **changes: Any) -> Any:
    fields = {
        "block_hashes": hashes,
        "parent_block_hash": None,
        "token_ids": list(range(16 * len(hashes))),
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return event("BlockStored", **(fields | changes))


def removed(hashes: list[Any], group_idx: int | None = 0, medium: str | None = "GPU", **more: Any) -> Any:
    return event("BlockRemoved", block_hashes=hashes, medium=medium, group_idx=group_idx, **more)


def told(report: Any) -> Any:
    """Return a report's type and its fields, with its hashes as numbers."""
    fields = {name: getattr(report, name) for name in report.__struct_fields__}
    if "hashes" in fields:
        fields["hashes"] = unpack_hashes(fields["hashes"]).tolist()
    return type(report), fields


def same(reports: list[Any], expected: list[Any]) -> None:
    assert [told(report) for report in reports] == [told(report) for report in expected]


DIGEST = bytes(range(32))
SHORT = int.from_bytes(DIGEST[-8:], "big")


@pytest.mark.parametrize(
    ("given", "short"),
    [(5, 5), (2**64 - 1, 2**64 - 1), (-1, 2**64 - 1), (2**200 + 7, 7), (DIGEST, SHORT), (DIGEST[-16:], SHORT)],
)
def test_a_hash_of_any_form_is_its_last_eight_bytes(given: Any, short: int) -> None:
    assert short_hash(given) == short
    assert unpack_hashes(pack([given, 1])).tolist() == [short, 1]


class Medium(Enum):
    CPU = "CPU"


@pytest.mark.parametrize(
    ("given", "name"), [(None, "GPU"), ("GPU", "GPU"), ("cpu", "CPU"), (Medium.CPU, "CPU"), ("STORAGE", "STORAGE")]
)
def test_each_medium_has_its_name(given: Any, name: str) -> None:
    assert medium_name(given) == name


def test_a_stored_event_of_020_has_no_kind() -> None:
    same(
        translate([stored([1, DIGEST], group_idx=3)], {}),
        [ReportStored(pack([1, SHORT]), 3, "GPU", block_size=16)],
    )


def test_a_stored_event_of_032_in_full() -> None:
    event = stored(
        [1],
        parent_block_hash=9,
        group_idx=2,
        kv_cache_spec_kind=SimpleNamespace(value="sliding_window"),
        kv_cache_spec_sliding_window=128,
        locality="LOCAL",
        ownership="disk",
        lora_name="a",
        medium="storage",
    )
    same(
        translate([event], {}),
        [
            ReportStored(
                pack([1]),
                2,
                "STORAGE",
                block_size=16,
                parent_hash=9,
                kind="sliding_window",
                sliding_window=128,
                ownership="disk",
                locality="LOCAL",
                lora_name="a",
            )
        ],
    )


def test_positions_come_from_the_note_about_the_very_event() -> None:
    first, unnoted = stored([1, 2]), stored([3])
    notes: Notes = {}
    note(notes, first, Position([(32, 1), (96, 1)], 7))
    # A number that belonged to another object has no meaning here.
    notes[id(unnoted)] = (object(), Position([(16, 1)], None))
    same(
        translate([first, unnoted], notes),
        [
            ReportStored(pack([1, 2]), None, "GPU", block_size=16, runs=[(32, 1), (96, 1)], parent_hash=7),
            ReportStored(pack([3]), None, "GPU", block_size=16),
        ],
    )
    assert notes == {}


def test_the_parent_of_a_range_is_not_that_of_a_sparse_event() -> None:
    """Leave the parent out: without a note, it is not known which of the range's blocks is the first."""
    sparse = stored([1], parent_block_hash=9, token_ids=list(range(64)))
    same(translate([sparse], {}), [ReportStored(pack([1]), None, "GPU", block_size=16)])


def test_events_reported_elsewhere_are_left_out() -> None:
    void, handed, kept = stored([1]), removed([2]), stored([3])
    notes: Notes = {}
    note(notes, void, None)
    note(notes, handed, Position([], None))
    same(translate([void, handed, kept], notes, {id(handed)}), [ReportStored(pack([3]), None, "GPU", block_size=16)])
    assert notes == {}


def test_empty_and_unknown_events_say_nothing() -> None:
    assert translate([stored([]), event("BlockMoved", block_hashes=[1])], {}) == []


def test_removals_are_merged_by_place_up_to_the_next_other_event() -> None:
    events = [
        removed([1]),
        removed([2], 1),
        removed([3]),
        removed([4], 0, "CPU"),
        removed([5], 0, None),
        stored([1]),
        removed([1]),
        event("AllBlocksCleared"),
        removed([6], ownership="disk", locality="REMOTE"),
        event("BlockRemoved", block_hashes=[7], medium="GPU"),
    ]
    same(
        translate(events, {}),
        [
            ReportRemoved(pack([1, 3, 5]), 0, "GPU"),
            ReportRemoved(pack([2]), 1, "GPU"),
            ReportRemoved(pack([4]), 0, "CPU"),
            ReportStored(pack([1]), None, "GPU", block_size=16),
            ReportRemoved(pack([1]), 0, "GPU"),
            ReportCleared("GPU", "prefix cache reset"),
            ReportRemoved(pack([6]), 0, "GPU", "disk", "REMOTE"),
            ReportRemoved(pack([7]), None, "GPU"),
        ],
    )


def test_a_broken_event_is_not_hidden() -> None:
    with pytest.raises(AttributeError):
        translate([event("BlockRemoved", medium="GPU")], {})


def test_notes_are_bounded() -> None:
    notes: Notes = {}
    objects = [object() for _ in range(MAX_NOTES + 1)]
    for noted in objects:
        note(notes, noted, None)
        assert len(notes) <= MAX_NOTES
    assert notes[id(objects[-1])] == (objects[-1], None)


# Positions


def blocks(pattern: str) -> list[Any]:
    return [SimpleNamespace(is_null=letter == "0") for letter in pattern]


REQUEST = SimpleNamespace(block_hashes=[bytes([i]) * 32 for i in range(1, 20)], lora_request=None)


def hash_at(end: int, hash_block_size: int) -> int:
    return int.from_bytes(REQUEST.block_hashes[end // hash_block_size - 1][-8:], "big")


@pytest.mark.parametrize(
    ("pattern", "mask", "first", "hashes", "runs", "before"),
    [
        ("xxxx", None, 0, 4, [(16, 4)], 0),
        ("xxxx", None, 2, 2, [(48, 2)], 32),
        ("00xx", None, 0, 2, [(48, 2)], 32),
        ("x0xx", None, 0, 3, [(16, 1), (48, 2)], 0),
        ("x0x0", None, 1, 1, [(48, 1)], 32),
        ("xxxx", [False, True, False, True], 0, 2, [(32, 1), (64, 1)], 16),
        ("xx0x", [True, True, True], 1, 2, [(32, 1), (64, 1)], 16),
        ("0000", None, 0, 0, [], 0),
    ],
)
def test_positions_of_kept_blocks_are_found(
    pattern: str, mask: list[bool] | None, first: int, hashes: int, runs: Any, before: int
) -> None:
    parent = hash_at(first * 16, 16) if first else None
    event = stored([1] * hashes, parent_block_hash=parent)
    position = position_of(event, REQUEST, blocks(pattern), mask, first, len(pattern), 16, 16)
    assert position == Position(runs, hash_at(before, 16) if before else None)


def test_positions_count_in_group_blocks_over_smaller_hash_blocks() -> None:
    position = position_of(stored([1]), REQUEST, blocks("0x"), None, 0, 2, 64, 16)
    assert position == Position([(128, 1)], hash_at(64, 16))


def test_an_event_that_does_not_fit_its_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="3 hashes for 2 cached blocks"):
        position_of(stored([1, 2, 3]), REQUEST, blocks("00xx"), None, 0, 4, 16, 16)


def test_neighbouring_positions_are_merged_into_runs() -> None:
    assert merge_runs([], 16) == []
    assert merge_runs([16, 32, 48, 96, 112, 160], 16) == [(16, 3), (96, 2), (160, 1)]
    assert merge_runs([64, 128], 16) == [(64, 1), (128, 1)]


# Offloading


def key(number: int, group_idx: int = 0) -> bytes:
    return number.to_bytes(32, "big") + group_idx.to_bytes(4, "big")


def raw(keys: list[bytes], gone: bool = False, **more: Any) -> Any:
    return SimpleNamespace(keys=keys, medium=Medium.CPU, removed=gone, **more)


GROUPS = {0: OffloadGroup(16, "full_attention", None), 1: OffloadGroup(32, "sliding_window", 128)}


def test_raw_events_before_024_keep_their_group() -> None:
    """These versions report a key alone, and the medium as a plain string."""
    events = [
        SimpleNamespace(keys=[key(1), key(2, 1), key(3)], medium="CPU", removed=False),
        SimpleNamespace(keys=[key(2, 1), key(1)], medium="CPU", removed=True),
    ]
    same(
        translate_offloaded(events, GROUPS, lambda _: None),
        [
            ReportStored(pack([1, 3]), 0, "CPU", block_size=16, kind="full_attention"),
            ReportStored(pack([2]), 1, "CPU", block_size=32, kind="sliding_window", sliding_window=128),
            ReportRemoved(pack([2]), 1, "CPU"),
            ReportRemoved(pack([1]), 0, "CPU"),
        ],
    )


def test_blocks_of_a_failed_transfer_were_never_held() -> None:
    """From vLLM 0.33 on, the removal of such a chunk stays within vLLM."""
    events = [raw([key(1)], True, metadata_only=True), raw([key(2)], True, metadata_only=False)]
    same(translate_offloaded(events, GROUPS, lambda _: None), [ReportRemoved(pack([2]), 0, "CPU")])


def test_stored_chunks_are_reported_in_the_order_of_their_positions() -> None:
    chunks = {
        key(1): Chunk(48, 16, 32, None),
        key(2): Chunk(16, 16, None, None),
        key(3): Chunk(64, 16, 48, None),
        key(5): Chunk(40, 8, 7, "a"),
    }
    events = [raw([key(1), key(2), key(3), key(4), key(5)], locality=SimpleNamespace(value="LOCAL"), ownership="disk")]
    place: dict[str, Any] = {"kind": "full_attention", "ownership": "disk", "locality": "LOCAL"}
    same(
        translate_offloaded(events, GROUPS, chunks.get),
        [
            ReportStored(pack([4]), 0, "CPU", block_size=16, **place),
            ReportStored(pack([2, 1, 3]), 0, "CPU", block_size=16, runs=[(16, 1), (48, 2)], **place),
            ReportStored(pack([5]), 0, "CPU", block_size=8, runs=[(40, 1)], parent_hash=7, lora_name="a", **place),
        ],
    )


def test_a_group_that_nobody_declared_is_reported_all_the_same() -> None:
    same(translate_offloaded([raw([key(1, 9)])], {}, lambda _: None), [ReportStored(pack([1]), 9, "CPU")])


@pytest.mark.parametrize(
    "config",
    [
        SimpleNamespace(tokens_per_chunk=96, hashes_per_chunk=6, tokens_per_block=32),
        SimpleNamespace(offloaded_block_size=96, hash_block_size_factor=6, gpu_block_size=32),
    ],
    ids=["0.26 and later", "before"],
)
def test_chunks_by_their_index(config: Any) -> None:
    """The last block of a chunk ends it, and the block before that one is its parent."""
    sizes = chunk_sizes(config)
    assert whole_chunk(REQUEST, sizes, 0) == Chunk(96, 32, hash_at(64, 16), None)
    assert whole_chunk(REQUEST, sizes, 1) == Chunk(192, 32, hash_at(160, 16), None)
    assert partial_chunk(REQUEST, sizes, 112) == Chunk(112, 16, hash_at(96, 16), None)
    assert partial_chunk(REQUEST, sizes, 16) == Chunk(16, 16, None, None)


def test_a_chunk_table_forgets_the_older_half() -> None:
    table = ChunkTable(3)
    for number in range(7):
        table.add(key(number), Chunk(number, 1, None, None))
    assert [number for number in range(7) if table.get(key(number)) is not None] == [3, 4, 5, 6]


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("0.32.0", (0, 32)),
        ("0.31.1.dev5+g12", (0, 31)),
        ("v1.2", (1, 2)),
        ("0.19.2rc1", (0, 19)),
        ("0.1.dev1+g9", None),
        ("x", None),
    ],
)
def test_versions_are_parsed(text: str, parsed: Any) -> None:
    assert parse_version(text) == parsed
