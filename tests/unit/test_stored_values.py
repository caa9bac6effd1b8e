# SPDX-License-Identifier: Apache-2.0
"""Values in Redis: each one is a value that we write, or is refused by name."""

from __future__ import annotations

import msgspec
import pytest

from kvrouter.router.base.common.checksum import checksum
from kvrouter.router.base.common.ids import Place, WorkerKey
from kvrouter.router.base.redis_client.errors import StoredValueError
from kvrouter.router.index.store import keys, registry
from kvrouter.router.index.store.checkpoint import StoredPlace, parse_places, parse_residents
from kvrouter.router.index.store.commit import Head, LeaseValue, copies_value, head_sum, parse_copies_value
from kvrouter.router.model.workers.registration import MAX_GROUPS, CatalogSpec, GroupSpec, Registration

WORKER = WorkerKey("m", "w0", 2)
GPU_PLACE = b"g0:GPU=7=00000000"
GOOD = Registration(WORKER, events="tcp://h:1", replay="tcp://h:2", url="http://h:8000", block_size=16)


@pytest.mark.parametrize("text", [b"", b"abc", b"1_0", b" 1", b"+1", b"-1", b"1.0", b"\xd9\xa1", b"%d" % 2**64, b"1\n"])
def test_a_stored_number_has_digits_alone(text: bytes) -> None:
    with pytest.raises(ValueError):
        keys.parse_number(text)


def test_numbers_are_read() -> None:
    assert [keys.parse_number(text) for text in (b"0", b"7", b"%d" % (2**64 - 1))] == [0, 7, 2**64 - 1]


@pytest.mark.parametrize(
    "text", ["", "g0", "0:GPU", "g:GPU", "g00:GPU", "g-1:GPU", "g0:GPU:a:b", "g0:G U", "g0:%ff", "x0:GPU", "g0:%47PU"]
)
def test_a_place_must_be_written_in_its_one_form(text: str) -> None:
    with pytest.raises(ValueError):
        keys.parse_place(text)


@pytest.mark.parametrize("place", [Place(0, "GPU"), Place(None, "a b:c", ""), Place(63, "ä", "x/{}")])
def test_a_place_is_read_as_it_was_written(place: Place) -> None:
    assert keys.parse_place(keys.place_text(place)) == place


@pytest.mark.parametrize("field", [b"w9", b"w9@", b"w9@x", b"w9@01", b"w9@70000", b"\xff@0", b"a b@0", b"%zz@0"])
def test_a_registry_field_must_be_written_in_its_one_form(field: bytes) -> None:
    with pytest.raises(ValueError):
        keys.parse_registry_field("m", field)


@pytest.mark.parametrize("member", [b"\xff", b"a b", b"%e4", b"%61"])
def test_a_model_must_be_written_in_its_one_form(member: bytes) -> None:
    with pytest.raises(ValueError):
        keys.parse_model_member(member)


def read_head(
    seq: bytes = b"4",
    commits: bytes = b"5",
    places: bytes = b"",
    checkpoint: bytes = b"1",
    unreadable: bytes | None = None,
) -> Head:
    """Read a head whose checksum is right."""
    checksum = head_sum(b"e", seq, commits, places, checkpoint)
    return Head.of("k", b"e", seq, commits, places, b"3", checkpoint, checksum, unreadable=unreadable)


def test_a_head_reads_what_it_can_and_names_the_first_that_it_cannot() -> None:
    head = read_head(seq=b"abc", places=GPU_PLACE, checkpoint=b"x")
    assert (head.epoch, head.seq, head.commits, head.lease, head.checkpoint) == ("e", None, 5, 3, 0)
    assert isinstance(head.problem, StoredValueError)
    assert (head.problem.key, head.problem.field) == ("k", "seq") and "b'abc'" in str(head.problem)
    good = read_head(places=GPU_PLACE, checkpoint=b"5")
    assert good == Head("e", 4, 5, {"g0:GPU": StoredPlace(7, b"00000000")}, 3, 5, GPU_PLACE)
    assert Head.of("k", *[None] * 8) == Head(None, None, 0, {}, 0, 0, b"")
    marked = read_head(unreadable=b"another router cannot read it")
    assert marked.problem is not None and "another router cannot read it" in str(marked.problem)


FIELDS = {"epoch": b"e", "seq": b"14", "commits": b"15", "places": GPU_PLACE, "lease": b"3", "checkpoint": b"12"}


def read_fields(fields: dict[str, bytes], found: bytes) -> Head:
    epoch, seq, commits, places, lease, checkpoint = fields.values()
    return Head.of("k", epoch, seq, commits, places, lease, checkpoint, found)


@pytest.mark.parametrize("name", [name for name in FIELDS if name != "lease"])
def test_a_field_that_was_changed_to_another_good_value_is_named(name: str) -> None:
    checksum = head_sum(*(value for field, value in FIELDS.items() if field != "lease"))
    assert read_fields(FIELDS, checksum).problem is None
    changed = FIELDS | {name: FIELDS[name].replace(b"1", b"0").replace(b"e", b"f").replace(b"7", b"6")}
    problem = read_fields(changed, checksum).problem
    assert problem is not None and problem.field in ("sum", "checkpoint")


@pytest.mark.parametrize(
    "text",
    [b"g0:GPU", b"g0:GPU=", b"g0:GPU=1", b"g0:GPU=-1=0", b"=3=0", b"g0:GPU=1=0  g1:GPU=1=0", b"\xff=1=0"],
)
def test_places_must_be_written_in_their_one_form(text: bytes) -> None:
    with pytest.raises(ValueError):
        parse_places(text)


def test_a_log_longer_than_any_is_named() -> None:
    problem = read_head(commits=b"%d" % (2**64 - 1)).problem
    assert problem is not None and problem.field == "checkpoint"


@pytest.mark.parametrize("checkpoint", [b"6", b"x"])
def test_a_checkpoint_after_the_log_is_named(checkpoint: bytes) -> None:
    problem = read_head(checkpoint=checkpoint).problem
    assert problem is not None and problem.field == "checkpoint"


@pytest.mark.parametrize("value", [None, b"", bytes(8), bytes(15), bytes(24), 7, [b"x"]])
def test_residents_that_are_not_as_many_as_meta_says_are_refused(value: object) -> None:
    place = StoredPlace(2, checksum(bytes(16)))
    with pytest.raises(StoredValueError, match="Redis holds"):
        parse_residents("k", value, place)
    assert parse_residents("k", bytes(16), place).tolist() == [0, 0]
    with pytest.raises(StoredValueError, match="another checksum"):
        parse_residents("k", bytes(15) + b"\1", place)


@pytest.mark.parametrize("value", [b"", b"2", b"3", b"2 00000000"])
def test_copies_that_were_changed_are_refused(value: bytes) -> None:
    field = keys.copies_field(Place(0, "GPU"), 7)
    assert parse_copies_value(field, copies_value(field, 2)) == 2
    with pytest.raises(ValueError, match="checksum"):
        parse_copies_value(field, value)
    with pytest.raises(ValueError, match="checksum"):
        parse_copies_value(keys.copies_field(Place(0, "GPU"), 8), copies_value(field, 2))


@pytest.mark.parametrize(
    ("value", "token"),
    [(b"t:1", "t"), (b"a:b:12", "a:b"), (b"\xff:1", None), (b"t", None), (b"t:x", None), (b":1", None), (b"", None)],
)
def test_an_invalid_lease_has_no_holder(value: bytes, token: str | None) -> None:
    assert LeaseValue.token_of(value) == token


def test_a_registration_is_read_as_it_was_written() -> None:
    assert registry.decode(WORKER, registry.encode(GOOD)) == GOOD
    catalog = CatalogSpec(hash_lookahead_tokens=0, none_hash="ab" * 16, hash_algo="xxhash_cbor")
    stated = msgspec.structs.replace(GOOD, catalog=catalog)
    assert registry.decode(WORKER, registry.encode(stated)) == stated


def test_routers_of_the_version_before_read_a_numbered_registration_and_write_one_without() -> None:
    numbered = registry.encode(registry.StoredRegistration(**msgspec.structs.asdict(GOOD), revision=7))
    # That version decodes and encodes the plain struct.
    assert msgspec.json.decode(numbered, type=Registration) == GOOD == registry.decode(WORKER, numbered)
    plain = msgspec.json.encode(GOOD)
    assert registry.decode(WORKER, plain) == GOOD
    assert not registry.is_outdated(plain, numbered) and not registry.is_outdated(numbered, plain)


@pytest.mark.parametrize("revision", [b"-1", b'"1"', b"%d" % registry.REVISION_MAX, b"1e400", b"null"])
def test_a_revision_that_no_router_writes_counts_as_none(revision: bytes) -> None:
    later = registry.encode(registry.StoredRegistration(**msgspec.structs.asdict(GOOD), revision=7))
    hostile = msgspec.json.encode(GOOD)[:-1] + b',"revision":' + revision + b"}"
    assert not registry.is_outdated(hostile, later) and not registry.is_outdated(later, hostile)


def changed(**fields: object) -> bytes:
    return registry.encode(msgspec.structs.replace(GOOD, **fields))


def group(**fields: object) -> CatalogSpec:
    return CatalogSpec(groups=(msgspec.structs.replace(GroupSpec(0, "mamba", 16), **fields),))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"\xff",
        b"[1]",
        b"[" * 100_000,
        changed(worker=WorkerKey("m", "w0", 1)),
        changed(worker=WorkerKey("n", "w0", 2)),
        changed(events="tcp://*:1"),
        changed(replay="file:///x"),
        changed(url="ftp://h"),
        changed(block_size=0),
        changed(patch="?"),
        changed(patch_key="short"),
        changed(peer="10.0.0.5"),
        changed(catalog=group(block_size=-1)),
        changed(catalog=group(group_idx=MAX_GROUPS)),
        changed(catalog=group(sliding_window=2**40)),
        changed(catalog=CatalogSpec(groups=tuple(GroupSpec(i % 9, "mamba", 16) for i in range(MAX_GROUPS + 1)))),
        changed(catalog=CatalogSpec(hash_block_size=0)),
        changed(catalog=CatalogSpec(hash_lookahead_tokens=-1)),
        changed(catalog=CatalogSpec(hash_algo="md5")),
        changed(catalog=CatalogSpec(none_hash="0x" + "ab" * 32)),
        changed(catalog=CatalogSpec(none_hash="ab" * 16)),
    ],
)
def test_a_registration_that_no_router_writes_is_refused_by_name(raw: bytes) -> None:
    with pytest.raises(StoredValueError) as caught:
        registry.decode(WORKER, raw)
    assert (caught.value.key, caught.value.field) == (keys.registry("m"), "w0@2")
    assert len(str(caught.value)) < 300
