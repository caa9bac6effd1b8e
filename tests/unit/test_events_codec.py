# SPDX-License-Identifier: Apache-2.0
"""Decoded and encoded batches, byte by byte, in both layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvrouter.events.vllm.codec import BatchDecoder, CodecError, encode_batch
from kvrouter.events.vllm.messages import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from kvrouter.events.vllm.wire import WireCleared, WireEvent, WireRemoved, WireStored

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "events_vllm_0_32.json").read_text())
WIRE_TYPES = {"BlockStored": WireStored, "BlockRemoved": WireRemoved, "AllBlocksCleared": WireCleared}
BIG = 0xF123_4567_89AB_CDEF

pack = msgspec.msgpack.Encoder().encode


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return bytes.fromhex(value["hex"])
    return [plain(item) for item in value] if isinstance(value, list) else value


def wire_events(case: dict[str, Any]) -> list[Any]:
    return [
        WIRE_TYPES[event["type"]](**{name: plain(value) for name, value in event.items() if name != "type"})
        for event in case["events"]
    ]


def low64(value: Any) -> int:
    return int.from_bytes(value[-8:], "big") if isinstance(value, bytes) else value


def frozen(value: Any) -> Any:
    return tuple(frozen(item) for item in value) if isinstance(value, list) else value


def stored(**changes: Any) -> WireStored:
    fields: dict[str, Any] = {
        "block_hashes": [BIG],
        "parent_block_hash": None,
        "token_ids": [1, 2],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return WireStored(**(fields | changes))


def decode(payload: bytes, **options: Any) -> EventBatch:
    return BatchDecoder().decode(payload, **options)


def only(payload: bytes, **options: Any) -> Any:
    batch = decode(payload, **options)
    assert (batch.broken, batch.unknown) == ([], 0)
    (event,) = batch.events
    return event


@pytest.mark.parametrize("case", GOLDEN, ids=[case["name"] for case in GOLDEN])
class TestGoldenBytesOfVllm:
    def test_we_write_the_same_bytes(self, case: dict[str, Any]) -> None:
        form = {"sha256_bytes": "bytes32", "xxhash_bytes": "bytes16"}.get(case["name"], "int")
        ours = encode_batch(case["ts"], wire_events(case), case["dp_rank"], hash_form=form)  # type: ignore[arg-type]
        assert ours.hex() == case["payload"]

    @pytest.mark.parametrize("with_tokens", [False, True])
    def test_we_read_every_field(self, case: dict[str, Any], with_tokens: bool) -> None:
        batch = decode(bytes.fromhex(case["payload"]), with_tokens=with_tokens)
        assert (batch.ts, batch.dp_rank, batch.broken, batch.unknown) == (case["ts"], case["dp_rank"], [], 0)
        assert len(batch.events) == len(case["events"])
        for event, fields in zip(batch.events, case["events"], strict=True):
            assert type(event).__name__ == fields["type"]
            if isinstance(event, AllBlocksCleared):
                assert event == AllBlocksCleared()
                continue
            assert event.block_hashes.dtype == np.uint64
            assert event.block_hashes.tolist() == [low64(plain(value)) for value in fields["block_hashes"]]
            assert event.medium == (fields["medium"] or "GPU")
            assert event.group_idx == fields.get("group_idx")
            assert (event.locality, event.ownership) == (fields.get("locality"), fields.get("ownership"))
            if isinstance(event, BlockStored):
                parent = fields["parent_block_hash"]
                assert event.parent_block_hash == (None if parent is None else low64(plain(parent)))
                assert event.block_size == fields["block_size"]
                assert event.kind == fields.get("kv_cache_spec_kind")
                assert event.sliding_window == fields.get("kv_cache_spec_sliding_window")
                assert event.lora_name == fields["lora_name"]
                assert event.session_id == fields.get("session_id")
                if with_tokens:
                    assert event.token_ids is not None
                    assert event.token_ids.tolist() == fields["token_ids"]
                    assert event.extra_keys == frozen(plain(fields.get("extra_keys")))
                else:
                    assert (event.token_ids, event.extra_keys) == (None, None)


class OldBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class OldStored(msgspec.Struct, array_like=True, omit_defaults=True, tag="BlockStored"):
    """BlockStored event as vLLM 0.23 declares it."""

    block_hashes: list[Any]
    parent_block_hash: Any
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class OldRemoved(msgspec.Struct, array_like=True, omit_defaults=True, tag="BlockRemoved"):
    block_hashes: list[Any]
    medium: str | None
    group_idx: int | None = None


class OldCleared(msgspec.Struct, array_like=True, omit_defaults=True, tag="AllBlocksCleared"):
    pass


class TestArrayLayout:
    def test_bytes_are_those_of_the_array_structs(self) -> None:
        old = [
            OldStored([BIG], 7, [1, 2], 2, None, "GPU", "a", None, 1, "sliding_window", 64),
            OldRemoved([BIG], "CPU", 2),
            OldCleared(),
        ]
        ours: list[WireEvent] = [
            stored(
                parent_block_hash=7,
                lora_name="a",
                group_idx=1,
                kv_cache_spec_kind="sliding_window",
                kv_cache_spec_sliding_window=64,
            ),
            WireRemoved([BIG], "CPU", 2),
            WireCleared(),
        ]
        assert encode_batch(1.5, ours, 0, layout="array") == pack(OldBatch(1.5, old, 0))

    def test_fields_land_where_the_map_layout_puts_them(self) -> None:
        events = [stored(group_idx=1, kv_cache_spec_kind="mamba", lora_name="a", extra_keys=[("x",)])]
        maps = only(encode_batch(1.0, events), with_tokens=True)
        arrays = only(encode_batch(1.0, events, layout="array"), with_tokens=True)
        for name in BlockStored.__struct_fields__:
            assert np.array_equal(getattr(maps, name), getattr(arrays, name)), name

    @pytest.mark.parametrize("fields", range(2, 8))
    def test_older_versions_send_fewer_fields(self, fields: int) -> None:
        event_fields = ["BlockStored", [BIG], 7, [1, 2], 2, None, "CPU"]
        event = only(pack([1.0, [event_fields[:fields]]]), with_tokens=True)
        assert event.block_hashes.tolist() == [BIG]
        assert event.medium == ("CPU" if fields == 7 else "GPU")

    def test_fields_appended_later_are_skipped(self) -> None:
        event = ["BlockRemoved", [BIG], "GPU", 3, None, None, {"new": [1]}, "more"]
        assert only(pack([1.0, [event], 0, "more"])).group_idx == 3

    def test_one_decoder_follows_a_change_of_layout(self) -> None:
        decoder = BatchDecoder()
        for layout in ("map", "array", "array", "map"):
            batch = decoder.decode(encode_batch(1.0, [stored()], layout=layout))  # type: ignore[arg-type]
            assert len(batch.events) == 1

    def test_both_layouts_may_share_a_batch(self) -> None:
        batch = decode(pack([1.0, [["BlockRemoved", [BIG]], {"type": "BlockRemoved", "block_hashes": [BIG]}]]))
        assert len(batch.events) == 2


class TestHashes:
    @pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 300, 70_000])
    @pytest.mark.parametrize("form", ["int", "bytes32", "bytes16"])
    def test_any_number_of_hashes_is_read_in_each_form(self, count: int, form: Any) -> None:
        hashes = [BIG - number for number in range(count)]
        event = only(encode_batch(1.0, [WireRemoved(list(hashes), "GPU")], hash_form=form))
        assert event.block_hashes.tolist() == hashes

    @pytest.mark.parametrize(
        ("sent", "read"),
        [
            (0, 0),
            (127, 127),
            (1 << 32, 1 << 32),
            ((1 << 64) - 1, (1 << 64) - 1),
            (-1, (1 << 64) - 1),
            (-(1 << 63), 1 << 63),
            (b"\xff" * 24 + b"\x00" * 7 + b"\x05", 5),
            (b"\xff" * 56 + b"\x80" + b"\x00" * 7, 1 << 63),
            (b"\x00" * 7 + b"\x09", 9),
        ],
    )
    def test_a_hash_is_its_low_64_bits(self, sent: Any, read: int) -> None:
        for more_hashes in ([], [BIG], [b"\x01" * 32], [-(1 << 40)]):
            event = only(
                pack([1.0, [{"type": "BlockStored", "block_hashes": [sent, *more_hashes], "parent_block_hash": sent}]])
            )
            assert event.block_hashes.tolist()[0] == read
            assert (event.parent_block_hash, len(event.block_hashes)) == (read, 1 + len(more_hashes))

    def test_events_of_one_batch_keep_their_own_hashes(self) -> None:
        events = [WireRemoved([BIG + number] * (number % 3), "GPU") for number in range(40)]
        batch = decode(encode_batch(1.0, events))
        assert [event.block_hashes.tolist() for event in batch.events] == [event.block_hashes for event in events]  # type: ignore[union-attr]

    def test_hashes_outlive_the_payload(self) -> None:
        payload = bytearray(encode_batch(1.0, [WireRemoved([BIG], "GPU")]))
        event = only(memoryview(payload))  # type: ignore[arg-type]
        payload[:] = bytes(len(payload))
        assert event.block_hashes.tolist() == [BIG]
        assert event.block_hashes.dtype.isnative

    @pytest.mark.parametrize("bad", [None, "text", 5, {}, [None], ["x"], [1.5], [[1]], [True], [b"short"], [BIG, None]])
    def test_a_value_that_is_no_hash_breaks_its_event_only(self, bad: Any) -> None:
        batch = decode(pack([1.0, [{"type": "BlockRemoved", "block_hashes": bad}, ["BlockRemoved", [BIG]]]]))
        assert [broken.tag for broken in batch.broken] == ["BlockRemoved"]
        assert len(batch.events) == 1


class TestTolerance:
    @pytest.mark.parametrize(("sent", "read"), [("gpu", "GPU"), ("Cpu", "CPU"), ("FS", "FS"), (None, "GPU")])
    def test_medium_is_upper_case_and_gpu_when_absent(self, sent: str | None, read: str) -> None:
        assert only(encode_batch(1.0, [WireRemoved([BIG], sent)])).medium == read

    def test_kind_is_lower_case_and_locality_upper(self) -> None:
        event = only(encode_batch(1.0, [stored(kv_cache_spec_kind="Full_Attention", locality="remote")]))
        assert (event.kind, event.locality) == ("full_attention", "REMOTE")

    def test_the_unnamed_group_is_not_group_0(self) -> None:
        batch = decode(encode_batch(1.0, [WireRemoved([BIG], "GPU"), WireRemoved([BIG], "GPU", 0)]))
        assert [event.group_idx for event in batch.events] == [None, 0]  # type: ignore[union-attr]

    def test_clears_may_name_medium_and_group(self) -> None:
        assert only(encode_batch(1.0, [WireCleared("cpu", 2)])) == AllBlocksCleared("CPU", 2)
        assert only(encode_batch(1.0, [WireCleared("cpu", 2)], layout="array")) == AllBlocksCleared("CPU", 2)
        assert only(encode_batch(1.0, [WireCleared()])) == AllBlocksCleared(None, None)

    @pytest.mark.parametrize(("tail", "rank"), [([], None), ([None], None), ([0], 0), ([7], 7)])
    def test_rank_may_be_missing(self, tail: list[Any], rank: int | None) -> None:
        assert decode(pack([1, [], *tail])).dp_rank == rank

    def test_unknown_fields_are_skipped(self) -> None:
        event = msgspec.to_builtins(stored()) | {"lookahead_token_ids": [[1, 2]], "new": {"deep": [1]}}
        assert only(pack([1.0, [event], 0, "later"])).block_hashes.tolist() == [BIG]

    @pytest.mark.parametrize("event", [{"type": "BlockMoved", "x": 1}, ["BlockMoved", 1], ["BlockMoved"]])
    def test_unknown_events_are_counted(self, event: Any) -> None:
        batch = decode(pack([1.0, [msgspec.to_builtins(stored()), event, event]]))
        assert (len(batch.events), batch.unknown, batch.broken) == (1, 2, [])

    @pytest.mark.parametrize(
        ("event", "tag"),
        [
            ({"type": "BlockRemoved"}, "BlockRemoved"),
            ({"type": "BlockRemoved", "block_hashes": [BIG], "medium": 3}, "BlockRemoved"),
            ({"type": "BlockRemoved", "block_hashes": [BIG], "medium": ""}, "BlockRemoved"),
            ({"type": "BlockRemoved", "block_hashes": [BIG], "group_idx": -1}, "BlockRemoved"),
            ({"type": "BlockStored", "block_hashes": [BIG], "block_size": "16"}, "BlockStored"),
            ({"type": "BlockStored", "block_hashes": [BIG], "parent_block_hash": b"x"}, "BlockStored"),
            (["BlockStored"], "BlockStored"),
            (["AllBlocksCleared", 5], "AllBlocksCleared"),
            ({"block_hashes": [BIG]}, None),
            ({"type": 5}, None),
            ([], None),
            ([[]], None),
            (None, None),
            ("BlockStored", None),
            (5, None),
        ],
    )
    def test_a_broken_event_costs_only_itself(self, event: Any, tag: str | None) -> None:
        intact = msgspec.to_builtins(stored())
        batch = decode(pack([1.0, [intact, event, intact], 4]))
        assert (len(batch.events), batch.dp_rank, batch.unknown) == (2, 4, 0)
        assert [broken.tag for broken in batch.broken] == [tag]
        assert 0 < len(batch.broken[0].error) <= 200

    def test_text_that_is_not_utf_8_breaks_its_event_only(self) -> None:
        payload = encode_batch(1.0, [stored(lora_name="??"), stored()]).replace(b"\xa2??", b"\xa2\xff\xff")
        batch = decode(payload)
        assert ([broken.tag for broken in batch.broken], len(batch.events)) == (["BlockStored"], 1)

    @pytest.mark.parametrize("tokens", [["x"], "x", [1 << 63], [-1.5], {"a": 1}])
    def test_bad_tokens_break_the_event_only_where_tokens_are_read(self, tokens: Any) -> None:
        payload = pack([1.0, [{"type": "BlockStored", "block_hashes": [BIG], "token_ids": tokens}]])
        assert len(decode(payload).events) == 1
        assert [broken.tag for broken in decode(payload, with_tokens=True).broken] == ["BlockStored"]

    @pytest.mark.parametrize(
        "payload",
        [
            b"",
            b"\xc1",
            b"\xc0",
            pack({}),
            pack([]),
            pack([1.0]),
            pack(["x", []]),
            pack([1.0, {}]),
            pack([1.0, [], "rank"]),
            pack([1.0, []])[:-1],
            encode_batch(1.0, [WireRemoved([BIG], "GPU")])[:-1],
            encode_batch(1.0, []) + b"\x00",
            b"\x92\x01\xdd\xff\xff\xff\xff",
            b"\x92\x01\x91\xc6\xff\xff\xff\xff",
            b"\x92\x01" + b"\x91" * 100_000 + b"\x90",
        ],
        ids=repr,
    )
    def test_a_payload_that_is_no_batch_is_a_codec_error(self, payload: bytes) -> None:
        for with_tokens in (False, True):
            with pytest.raises(CodecError):
                decode(payload, with_tokens=with_tokens)

    def test_deep_nesting_in_keys_is_contained(self) -> None:
        deep = b"\x91" * 900 + b"\xc0"
        body = (
            b"\x83"
            + pack("type")
            + pack("BlockStored")
            + pack("block_hashes")
            + pack([BIG])
            + pack("extra_keys")
            + deep
        )
        batch = decode(b"\x92\x01\x91" + body, with_tokens=True)
        assert len(batch.events) + len(batch.broken) == 1


class TestEncoding:
    def test_digests_become_integers_as_in_vllm(self) -> None:
        event = only(encode_batch(1.0, [stored(block_hashes=[b"\x01" * 32], parent_block_hash=b"\x02" * 16)]))
        assert event.block_hashes.tolist() == [0x0101010101010101]
        assert event.parent_block_hash == 0x0202020202020202

    @pytest.mark.parametrize(("form", "length"), [("bytes32", 32), ("bytes16", 16)])
    def test_integers_become_digests_that_reduce_to_them(self, form: Any, length: int) -> None:
        payload = encode_batch(1.0, [stored(parent_block_hash=-1)], hash_form=form)
        (event,) = msgspec.msgpack.decode(payload)[1]
        assert [len(event["block_hashes"][0]), len(event["parent_block_hash"])] == [length, length]
        assert only(payload).block_hashes.tolist() == [BIG]
        assert only(payload).parent_block_hash == (1 << 64) - 1

    def test_the_senders_events_are_left_as_they_are(self) -> None:
        event = stored(block_hashes=[BIG])
        encode_batch(1.0, [event], hash_form="bytes32")
        assert event.block_hashes == [BIG]


def test_removed_has_no_field_that_stored_lacks() -> None:
    assert set(BlockRemoved.__struct_fields__) < set(BlockStored.__struct_fields__)
