# SPDX-License-Identifier: Apache-2.0
"""A request's body in any pieces, with any marks of its end: the picker reads the same request."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.router.base.common.errors import BadQuestion, CutBody
from kvrouter.router.route.tokens.client_body import read_client_body
from kvrouter.router.serve.gateway.messages import Incoming, Part, Reply
from kvrouter.router.serve.gateway.process_stream import ProcessStream, Route

PATH = "/v1/chat/completions"

values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.text(), values, min_size=1, max_size=4)


def body_of(value: dict[str, Any], plain: bool, tail: str) -> bytes:
    return (json.dumps(value, ensure_ascii=plain) + tail).encode("utf-8", "surrogatepass")


bodies = st.builds(body_of, objects, st.booleans(), st.sampled_from(["", " ", "\n", "\r\n"])).filter(
    # Lone surrogates are no UTF-8, which the engine reports.
    lambda body: b"\xed" not in body
)


def received(stream: ProcessStream, messages: list[Incoming]) -> tuple[list[bytes], list[Reply]]:
    """Return the bodies that were sent on, and all replies, as `GatewayServer` has them."""
    sent: list[bytes] = []
    replies: list[Reply] = []
    for message in messages:
        replies += stream.receive(message)
        if stream.request is None:
            continue
        try:
            read_client_body(PATH, stream.request.body)
        except CutBody:
            assert stream.request.may_go_on
            stream.wait_for_rest()
        else:
            sent.append(stream.request.body)
            replies += stream.send_on(Route(None))
    return sent, replies


def head(body: bytes, *, has_length: bool) -> Incoming:
    headers = [(b":method", b"POST"), (b":path", PATH.encode())]
    return Incoming(Part.REQUEST_HEADERS, [*headers, (b"content-length", b"%d" % len(body))] if has_length else headers)


@given(bodies, st.data(), st.booleans())
def test_every_cut_and_repetition_of_pieces_is_the_same_request(body: bytes, data: st.DataObject, length: bool) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=6)))
    ends = [0, *cuts, len(body)]
    pieces = [body[start:end] for start, end in pairwise(ends)]
    # Any piece may be marked as the last one, and the last one is.
    marks = data.draw(st.lists(st.booleans(), min_size=len(pieces), max_size=len(pieces)))
    marks[-1] = True
    messages = [Incoming(Part.REQUEST_BODY, data=piece, ends=mark) for piece, mark in zip(pieces, marks, strict=True)]
    last = next(piece for piece in reversed(pieces) if piece)
    behind = data.draw(st.lists(st.tuples(st.sampled_from([last, b""]), st.booleans()), max_size=4))
    messages += [Incoming(Part.REQUEST_BODY, data=piece, ends=mark) for piece, mark in behind]
    stream = ProcessStream(1_000_000)
    sent, replies = received(stream, [head(body, has_length=length), *messages])
    assert [msgspec.json.decode(request) for request in sent] == [msgspec.json.decode(body)]
    assert b"".join(getattr(reply, "data", b"") for reply in replies) == sent[0]
    assert sum(getattr(reply, "ends", False) for reply in replies) == 1


@given(bodies, st.integers(1))
def test_the_beginning_of_a_json_object_is_cut(body: bytes, at: int) -> None:
    with pytest.raises(CutBody):
        read_client_body(PATH, body[: at % len(body.rstrip())])


python_values = st.recursive(
    st.none() | st.integers() | st.floats() | st.text(st.characters() | st.characters(categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
python_names = st.text(st.characters() | st.characters(categories=["Cs"]))
CODECS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be")


@given(
    st.dictionaries(python_names, python_values, min_size=1, max_size=3),
    st.booleans(),
    st.sampled_from(CODECS),
    st.integers(0),
)
def test_the_beginning_of_an_object_that_python_reads_is_cut(
    value: dict[str, Any], plain: bool, codec: str, at: int
) -> None:
    body = json.dumps(value, ensure_ascii=plain).encode(codec, "surrogatepass")
    with pytest.raises(CutBody):
        read_client_body(PATH, body[: at % len(body)])
    # The whole body is not: a client that sends what nobody reads gets its answer at once.
    with pytest.raises(BadQuestion) as error:
        read_client_body(PATH, (json.dumps(value, ensure_ascii=plain) + "]").encode(codec, "surrogatepass"))
    assert not isinstance(error.value, CutBody)
