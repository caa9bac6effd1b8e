# SPDX-License-Identifier: Apache-2.0
"""The endpoint picker's protobuf messages, encoded as Envoy's definitions say, and arbitrary bytes."""

from __future__ import annotations

import pytest
from google.protobuf import struct_pb2
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.router.serve.gateway.messages import (
    BodyReply,
    HeadersReply,
    Incoming,
    KeptBody,
    Modes,
    Part,
    ProtocolError,
    Refusal,
    TrailersReply,
)
from kvrouter.router.serve.gateway.wire import decode, encode, health_answer, health_service


def field(number: int, content: bytes) -> bytes:
    """Encode a length-delimited field, as protobuf writes it."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def flag(number: int, value: int) -> bytes:
    return varint(number << 3) + varint(value)


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def header(name: bytes, value: bytes, number: int = 3) -> bytes:
    return field(1, field(1, name) + field(number, value))


def metadata(namespace: str, **fields: object) -> bytes:
    struct = struct_pb2.Struct()
    struct.update(fields)
    return field(1, field(1, namespace.encode()) + field(2, struct.SerializeToString()))


def test_headers_are_decoded_with_all_that_is_read() -> None:
    name = "x-gateway-destination-endpoint-subset"
    content = field(1, header(b":path", b"/x") + header(b"odd", b"\xff") + header(b"old", b"v", 2)) + flag(3, 1)
    raw = (
        field(2, content)
        + field(8, metadata("envoy.lb.subset_hint", **{name: ["10.0.0.1:80"]}))
        + field(11, flag(1, 4) + flag(2, 1) + flag(99, 1))
        + field(200, b"later")
    )
    assert decode(raw) == Incoming(
        Part.REQUEST_HEADERS,
        [(b":path", b"/x"), (b"odd", b"\xff"), (b"old", b"v")],
        ends=True,
        modes=Modes(4, 1),
        subset=("10.0.0.1:80",),
    )


def test_names_of_headers_are_read_in_any_case() -> None:
    names = (b"X-Session-ID", b"x-kvrouter-worker", b"X-REQUEST-ID", b":Path")
    for number, part in ((2, Part.REQUEST_HEADERS), (3, Part.RESPONSE_HEADERS)):
        content = field(1, b"".join(header(name, b"Value") for name in names))
        assert decode(field(number, content)) == Incoming(part, [(name.lower(), b"Value") for name in names])


def test_who_served_is_in_metadata_or_in_an_attribute() -> None:
    content = field(3, field(1, header(b":status", b"200")))
    attribute = struct_pb2.Struct()
    attribute.update({"upstream.address": "10.0.0.2:80"})
    attributes = field(9, field(1, b"envoy.filters.http.ext_proc") + field(2, attribute.SerializeToString()))
    metadata_ = field(8, metadata("envoy.lb", **{"x-gateway-destination-endpoint-served": "10.0.0.1:80"}))
    assert decode(content).served is None
    assert decode(content + attributes).served == "10.0.0.2:80"
    assert decode(content + attributes + metadata_).served == "10.0.0.1:80"


def test_bodies_and_trailers_are_decoded() -> None:
    assert decode(field(4, field(1, b"ab"))) == Incoming(Part.REQUEST_BODY, data=b"ab")
    assert decode(field(5, flag(2, 1))) == Incoming(Part.RESPONSE_BODY, ends=True)
    assert decode(field(6, b"")) == Incoming(Part.REQUEST_TRAILERS, ends=True)


def test_replies_are_encoded_as_the_protocol_wants() -> None:
    option = field(1, field(1, b"n") + field(3, b"v")) + flag(3, 2)
    mutation = field(1, option)
    struct = struct_pb2.Struct()
    struct.get_or_create_struct("envoy.lb")["x-gateway-destination-endpoint"] = "e:1"
    point = field(8, struct.SerializeToString())
    assert encode(HeadersReply(Part.REQUEST_HEADERS, [(b"n", b"v")], (b"z",), "e:1")) == (
        field(1, field(1, field(2, mutation + field(2, b"z")))) + point
    )
    assert encode(HeadersReply(Part.RESPONSE_HEADERS)) == field(2, field(1, b""))
    streamed = field(3, field(1, b"ab") + flag(2, 1))
    assert encode(BodyReply(Part.REQUEST_BODY, b"ab", ends=True)) == field(3, field(1, field(3, streamed)))
    assert encode(BodyReply(Part.RESPONSE_BODY, b"", ends=False)) == field(4, field(1, field(3, field(3, b""))))
    assert encode(KeptBody(Part.RESPONSE_BODY)) == field(4, field(1, b""))
    assert (
        encode(KeptBody(Part.REQUEST_BODY, b"x", endpoint="e:1"))
        == field(3, field(1, field(3, field(1, b"x")))) + point
    )
    assert encode(TrailersReply(Part.RESPONSE_TRAILERS)) == field(6, b"")
    assert encode(Refusal(503, [(b"n", b"v")], b"{}")) == field(
        7, field(1, flag(1, 503)) + field(2, mutation) + field(3, b"{}")
    )


def test_the_health_service_is_decoded_and_answered() -> None:
    assert health_service(b"") == ""
    assert health_service(field(1, b"liveness")) == "liveness"
    assert (health_answer(serves=True), health_answer(serves=False)) == (flag(1, 1), flag(1, 2))
    with pytest.raises(ProtocolError):
        health_service(b"\xff")


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    for number in range(2, 8):
        try:
            decode(field(number, raw) + raw)
        except ProtocolError:
            continue
