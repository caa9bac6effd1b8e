# SPDX-License-Identifier: Apache-2.0
"""Keys of the store and their texts: no name, however hostile, reaches another worker's keys, and texts round-trip."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from kvrouter.router.base.common.ids import Place, WorkerKey
from kvrouter.router.base.redis_client.resp import command, long_command
from kvrouter.router.index.ingest.net_changes import ResidencyDelta
from kvrouter.router.index.store import keys
from kvrouter.router.index.store.checkpoint import pack_places, parse_places, places_text
from kvrouter.router.index.store.log_entry import EntryKind, entry_fields, parse_entry

# Surrogates are included, because they are legal in JSON strings.
NAMES = st.text(st.characters(exclude_categories=()), max_size=8) | st.sampled_from(
    ["{", "}", "a}b", "\r\n", "a:b", "a/b", "a@1"]
)
WORKERS = st.builds(WorkerKey, NAMES, NAMES, st.integers(0, 9))
PLACES = st.builds(
    Place,
    st.none() | st.integers(0, 99),
    NAMES.filter(bool),
    st.none() | NAMES,
)
HASHES = st.lists(st.integers(0, 2**64 - 1), max_size=5).map(lambda values: np.array(values, dtype=np.uint64))


def test_keys_look_as_documented() -> None:
    worker = WorkerKey("m", "w", 0)
    assert keys.meta(worker) == "kvr:3:{m/w}:meta"
    assert keys.log(worker) == "kvr:3:{m/w}:log"
    assert keys.lease(worker) == "kvr:3:{m/w}:lease"
    assert keys.copies(worker, "e1") == "kvr:3:{m/w}:e1:copies"
    assert keys.residents(worker, "e1", Place(0, "GPU")) == "kvr:3:{m/w}:e1:g0:GPU"
    assert keys.residents(worker, "e1", Place(None, "STORAGE", "fs")) == "kvr:3:{m/w}:e1:g-:STORAGE:fs"
    assert keys.meta(WorkerKey("m", "w", 3)) == "kvr:3:{m/w@3}:meta"
    assert keys.registry("m") == "kvr:3:{m}:workers"


@given(
    place=st.builds(
        Place, st.none() | st.integers(0, 9), st.sampled_from(["GPU", "CPU", "STORAGE"]), st.none() | st.just("fs-1")
    )
)
def test_an_ordinary_place_reads_as_place_text(place: Place) -> None:
    assert keys.place_text(place) == place.text


@given(one=st.tuples(WORKERS, NAMES, PLACES), other=st.tuples(WORKERS, NAMES, PLACES))
def test_different_names_have_different_keys(one: Any, other: Any) -> None:
    def all_keys(worker: WorkerKey, epoch: str, place: Place) -> tuple[str, ...]:
        return keys.residents(worker, epoch, place), keys.copies(worker, epoch), keys.meta(worker), keys.log(worker)

    assert len(set(all_keys(*one))) == 4
    assert (one == other) == (keys.residents(*one) == keys.residents(*other))
    if one[0] != other[0]:
        assert not set(all_keys(*one)) & set(all_keys(*other))


@given(worker=WORKERS, epoch=NAMES, place=PLACES)
def test_all_keys_of_a_worker_share_the_slot_of_its_tag(worker: WorkerKey, epoch: str, place: Place) -> None:
    tag = keys.meta(worker).split("{", 1)[1].split("}", 1)[0]
    expected = key_slot(tag.encode("ascii"))
    for key in (
        keys.meta(worker),
        keys.log(worker),
        keys.lease(worker),
        keys.copies(worker, epoch),
        keys.residents(worker, epoch, place),
    ):
        assert key_slot(key.encode()) == expected


@given(worker=WORKERS)
def test_registry_fields_read_back(worker: WorkerKey) -> None:
    member = keys.model_member(worker.model).encode("ascii")
    field = keys.registry_field(worker).encode("ascii")
    assert keys.parse_registry_field(keys.parse_model_member(member), field) == worker


@given(place=PLACES, block_hash=st.integers(0, 2**64 - 1))
def test_copies_fields_read_back(place: Place, block_hash: int) -> None:
    assert keys.parse_copies_field(keys.copies_field(place, block_hash)) == (place, block_hash)


@given(
    changes=st.lists(st.builds(ResidencyDelta, PLACES, HASHES, HASHES), max_size=3),
    epoch=NAMES,
    kind=st.sampled_from(EntryKind),
    seqs=st.sampled_from([None, (1, 2)]),
)
def test_log_entries_read_back(
    changes: list[ResidencyDelta], epoch: str, kind: EntryKind, seqs: tuple[int, int] | None
) -> None:
    worker = WorkerKey("m", "w")
    entry = parse_entry(worker, b"5-1", entry_fields(worker, kind, 7, epoch, seqs, changes, {"state": b"x"}))
    assert (entry.id, entry.commit, entry.epoch) == ("5-1", 7, epoch)
    assert (entry.first_seq, entry.last_seq) == (seqs or (None, None))
    assert (entry.opened_epoch, entry.meta) == (kind is EntryKind.EPOCH, {"state": b"x"})
    expected = [change for change in changes if len(change.added) or len(change.removed)]
    assert [change.place for change in entry.changes] == [change.place for change in expected]
    for parsed, wanted in zip(entry.changes, expected, strict=True):
        assert parsed.added.tolist() == wanted.added.tolist()
        assert parsed.removed.tolist() == wanted.removed.tolist()


@given(at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_no_flipped_bit_of_a_log_entry_passes(at: int, bit: int) -> None:
    worker, hashes = WorkerKey("m", "w"), np.array([1, 2, 2**64 - 1], np.uint64)
    changes = [ResidencyDelta(Place(0, "GPU"), hashes, hashes[:1])]
    fields = entry_fields(worker, EntryKind.COMMIT, 7, "e", (1, 2), changes, {"state": b"live"})
    assert parse_entry(worker, b"5-1", fields).commit == 7
    sizes = np.cumsum([len(field) for field in fields])
    index = int(np.searchsorted(sizes, at % sizes[-1], side="right"))
    damaged = bytearray(fields[index])
    damaged[at % sizes[-1] - int(sizes[index]) + len(damaged)] ^= 1 << bit
    with pytest.raises(ValueError, match="checksum"):
        parse_entry(worker, b"5-1", [*fields[:index], bytes(damaged), *fields[index + 1 :]])
    with pytest.raises(ValueError, match="checksum"):
        parse_entry(WorkerKey("m", "another"), b"5-1", fields)


@given(args=st.lists(st.binary(max_size=20) | st.text(max_size=5) | st.integers(), min_size=1))
def test_commands_are_packed_as_hiredis_packs_them(args: list[Any]) -> None:
    assert long_command(*args) == command(*args)


@given(places=st.dictionaries(PLACES, HASHES, max_size=4))
def test_places_read_back_with_their_blocks(places: dict[Place, Any]) -> None:
    stored = parse_places(places_text(pack_places(places)))
    assert {text: place.blocks for text, place in stored.items()} == {
        keys.place_text(place): len(hashes) for place, hashes in places.items()
    }
