# SPDX-License-Identifier: Apache-2.0
"""State of one Process stream: its messages and their order, without gRPC and without an engine."""

from __future__ import annotations

import pytest

from kvrouter.router.base.common.errors import TooLarge
from kvrouter.router.serve.gateway.messages import (
    BodyMode,
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
from kvrouter.router.serve.gateway.process_stream import PIECE_BYTES, GatewayRequest, ProcessStream, Route
from kvrouter.router.serve.proxy.headers import Headers

HEADERS = [(b":method", b"POST"), (b":path", b"/v1/completions?x=1"), (b"x-session-id", b"s")]
STATUS = [(b":status", b"200"), (b"content-type", b"application/json")]
ENDPOINT = "10.0.0.1:8000"


class Follower:
    """Observer that records its calls."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def begins(self, status: int, headers: Headers, served: str | None) -> Headers:
        self.told.append((status, served))
        return [(b"x-kvrouter-worker", b"w0")]

    def takes(self, data: bytes) -> None:
        self.told.append(data)

    def ends(self) -> None:
        self.told.append("whole")

    def close(self) -> None:
        self.told.append("cut")


@pytest.mark.parametrize(
    ("path", "known"),
    [
        ("/v1/responses/resp_1", "/v1/responses/resp_1"),
        ("/team/v1/responses/resp_1/cancel", "/v1/responses/resp_1/cancel"),
        ("/v1/responses/x/v1/responses/resp_1/input_items", "/v1/responses/resp_1/input_items"),
        # An id that ends like another path.
        ("/team/v1/responses/tokenize", "/v1/responses/tokenize"),
        ("/team/v1/responses", "/v1/responses"),
        ("/team/v1/responses/", "/team/v1/responses/"),
        ("/v1/responses/resp_1/other", "/v1/responses/resp_1/other"),
    ],
)
def test_a_stored_response_is_known_below_a_prefix(path: str, known: str) -> None:
    request = GatewayRequest([(b":method", b"GET"), (b":path", path.encode() + b"?stream=true")], b"", None)
    assert (request.path, request.url) == (known, known.encode() + b"?stream=true")


def headers(*, ends: bool = False, modes: Modes | None = None, observes: bool = False) -> Incoming:
    return Incoming(Part.REQUEST_HEADERS, HEADERS, ends=ends, modes=modes, observes=observes, subset=("1.2.3.4:5",))


def body(data: bytes, *, ends: bool = False) -> Incoming:
    return Incoming(Part.REQUEST_BODY, data=data, ends=ends)


def answer(data: bytes, *, ends: bool = False) -> Incoming:
    return Incoming(Part.RESPONSE_BODY, data=data, ends=ends)


def begun(*messages: Incoming) -> ProcessStream:
    """Return a stream that received these messages."""
    stream = ProcessStream(1_000)
    for message in messages:
        stream.receive(message)
    return stream


def sent(route: Route | None = None, modes: Modes | None = None) -> ProcessStream:
    """Return a stream whose request has been sent on."""
    stream = begun(headers(modes=modes), body(b"ab", ends=True))
    stream.send_on(route or Route(ENDPOINT))
    return stream


def test_nothing_continues_before_the_request_is_whole() -> None:
    stream = ProcessStream(1_000)
    assert stream.receive(headers()) == stream.receive(body(b"ab")) == stream.receive(body(b"c")) == []
    assert stream.request is None
    assert stream.receive(body(b"", ends=True)) == []
    request = stream.request
    assert request is not None
    assert (request.path, request.url, request.method) == ("/v1/completions", b"/v1/completions?x=1", b"POST")
    assert request.headers == [(b"x-session-id", b"s")]
    assert (request.body, request.subset) == (b"abc", ("1.2.3.4:5",))


@pytest.mark.parametrize(
    ("given", "path"),
    [
        (b"/v1/rerank", "/v1/rerank"),
        (b"/team/model/v1/chat/completions", "/v1/chat/completions"),
        (b"/team/v1/rerank", "/v1/rerank"),
        (b"/v1/models", "/v1/models"),
        (b"/xv1/messages", "/xv1/messages"),
        (b"/team/inference/v1/generate", "/inference/v1/generate"),
        # Without a version, a prefix would make any program's path an engine's.
        (b"/generate", "/generate"),
        (b"/pooling", "/pooling"),
        (b"/reports/generate", "/reports/generate"),
        (b"/api/v1/generate", "/api/v1/generate"),
        (b"/v1/classify", "/v1/classify"),
        (b"/mail/classify", "/mail/classify"),
        (b"/pool/pooling", "/pool/pooling"),
        (b"/game/score", "/game/score"),
        (b"/team/tokenize", "/team/tokenize"),
    ],
)
def test_a_routes_prefix_is_not_part_of_the_path(given: bytes, path: str) -> None:
    request = GatewayRequest([(b":path", given + b"?a=b")], b"", None)
    assert (request.path, request.url) == (path, path.encode() + b"?a=b")


def test_pieces_continue_as_they_came_behind_the_headers() -> None:
    stream = begun(headers(), body(b"ab"), body(b"c", ends=True))
    added = [(b"x", b"y")]
    assert stream.send_on(Route(ENDPOINT, added, (b"z",))) == [
        HeadersReply(Part.REQUEST_HEADERS, [*added, (b"content-length", b"3")], (b"z",), ENDPOINT),
        BodyReply(Part.REQUEST_BODY, b"ab", ends=False),
        BodyReply(Part.REQUEST_BODY, b"c", ends=True),
    ]
    assert stream.request is None


def test_a_body_ends_with_its_trailers_where_it_has_some() -> None:
    stream = begun(headers(), body(b"ab"), Incoming(Part.REQUEST_TRAILERS, ends=True))
    assert stream.send_on(Route(ENDPOINT)) == [
        HeadersReply(Part.REQUEST_HEADERS, endpoint=ENDPOINT),
        BodyReply(Part.REQUEST_BODY, b"ab", ends=False),
        TrailersReply(Part.REQUEST_TRAILERS),
    ]


@pytest.mark.parametrize("ends", [False, True])
def test_the_one_message_of_a_buffered_body_is_the_whole_body(ends: bool) -> None:
    stream = begun(headers(modes=Modes(BodyMode.BUFFERED, BodyMode.STREAMED)))
    assert stream.receive(body(b"abc", ends=ends)) == []
    assert stream.request is not None and stream.request.body == b"abc"
    assert stream.send_on(Route(ENDPOINT)) == [KeptBody(Part.REQUEST_BODY, endpoint=ENDPOINT)]
    if not ends:
        # The request may end with trailers, if the gateway shows them.
        assert stream.receive(Incoming(Part.REQUEST_TRAILERS, ends=True)) == [TrailersReply(Part.REQUEST_TRAILERS)]
    assert stream.receive(body(b"abc", ends=ends)) == [KeptBody(Part.REQUEST_BODY)]
    with pytest.raises(ProtocolError, match="1 bytes came after the end of the request's body, which had 3 bytes"):
        stream.receive(body(b"d", ends=True))


def test_trailers_without_a_body_continue_behind_the_headers() -> None:
    for modes, expected in (
        (None, [HeadersReply(Part.REQUEST_HEADERS, endpoint=ENDPOINT), TrailersReply(Part.REQUEST_TRAILERS)]),
        (Modes(BodyMode.BUFFERED, BodyMode.STREAMED), [TrailersReply(Part.REQUEST_TRAILERS)]),
    ):
        stream = begun(headers(modes=modes), Incoming(Part.REQUEST_TRAILERS, ends=True))
        assert stream.request is not None and stream.request.body == b""
        assert stream.send_on(Route(ENDPOINT)) == expected


def test_the_one_message_of_a_buffered_answer_ends_it() -> None:
    follower = Follower()
    stream = sent(Route(ENDPOINT, observer=follower), Modes(BodyMode.BUFFERED, BodyMode.BUFFERED))
    stream.receive(Incoming(Part.RESPONSE_HEADERS, STATUS))
    assert stream.receive(answer(b"one")) == [KeptBody(Part.RESPONSE_BODY)]
    stream.close()
    assert follower.told == [(200, None), b"one", "whole"]


def test_trailers_behind_an_ended_body_continue() -> None:
    assert sent().receive(Incoming(Part.REQUEST_TRAILERS)) == [TrailersReply(Part.REQUEST_TRAILERS)]


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES])
def test_a_changed_body_is_cut_into_pieces(size: int) -> None:
    stream = begun(headers(), body(b"ab", ends=True))
    replies = [reply for reply in stream.send_on(Route(ENDPOINT, body=b"x" * size)) if isinstance(reply, BodyReply)]
    assert b"".join(reply.data for reply in replies) == b"x" * size
    assert max(len(reply.data) for reply in replies) <= PIECE_BYTES
    assert [reply.ends for reply in replies] == [False] * (len(replies) - 1) + [True]


def test_a_request_without_a_body_is_whole_with_its_headers() -> None:
    stream = begun(headers(ends=True))
    assert stream.request is not None and stream.request.body == b""
    assert stream.send_on(Route(ENDPOINT)) == [HeadersReply(Part.REQUEST_HEADERS, endpoint=ENDPOINT)]


def test_a_buffered_body_gets_its_endpoint_with_its_one_answer() -> None:
    stream = ProcessStream(1_000)
    assert stream.receive(headers(modes=Modes(BodyMode.BUFFERED, BodyMode.STREAMED))) == [
        HeadersReply(Part.REQUEST_HEADERS)
    ]
    stream.receive(body(b"abc", ends=True))
    added = [(b"x", b"y")]
    assert stream.send_on(Route(ENDPOINT, added, (b"z",))) == [
        KeptBody(Part.REQUEST_BODY, None, added, (b"z",), ENDPOINT)
    ]
    stream.receive(Incoming(Part.RESPONSE_HEADERS, STATUS))
    assert stream.receive(answer(b"one")) == [KeptBody(Part.RESPONSE_BODY)]


def test_a_changed_buffered_body_has_its_own_length() -> None:
    stream = begun(headers(modes=Modes(BodyMode.BUFFERED, BodyMode.STREAMED)), body(b"abc", ends=True))
    (reply,) = stream.send_on(Route(ENDPOINT, body=b"abcd"))
    assert reply == KeptBody(Part.REQUEST_BODY, b"abcd", [(b"content-length", b"4")], endpoint=ENDPOINT)


@pytest.mark.parametrize("mode", [BodyMode.NONE, BodyMode.STREAMED, BodyMode.BUFFERED_PARTIAL, 5, 77])
def test_a_mode_without_the_whole_body_is_refused_with_its_fix(mode: int) -> None:
    with pytest.raises(ProtocolError, match="FULL_DUPLEX_STREAMED"):
        ProcessStream(1_000).receive(headers(modes=Modes(mode)))


def test_a_gateway_in_observability_mode_is_refused() -> None:
    with pytest.raises(ProtocolError, match="observability_mode"):
        ProcessStream(1_000).receive(headers(observes=True))


def test_a_body_over_the_limit_is_refused_as_soon_as_it_is() -> None:
    stream = ProcessStream(4)
    stream.receive(headers())
    stream.receive(body(b"abcd"))
    with pytest.raises(TooLarge):
        stream.receive(body(b"e"))
    assert not stream.is_refused
    assert stream.refuse(413, [], b"{}") == [Refusal(413, [], b"{}")]
    assert stream.is_refused


@pytest.mark.parametrize("mode", [BodyMode.BUFFERED, BodyMode.FULL_DUPLEX_STREAMED])
def test_a_body_that_will_be_over_the_limit_is_refused_before_it_comes(mode: BodyMode) -> None:
    modes = Modes(mode, BodyMode.STREAMED)
    for length, refused in ((b"4", False), (b"5", True), (b"9" * 40, True), (b"-5", False), (b"", False)):
        message = Incoming(Part.REQUEST_HEADERS, [*HEADERS, (b"content-length", length)], modes=modes)
        if refused:
            with pytest.raises(TooLarge):
                ProcessStream(4).receive(message)
        else:
            ProcessStream(4).receive(message)


def test_every_piece_of_an_answer_continues_at_once_and_is_followed() -> None:
    follower = Follower()
    stream = sent(Route(ENDPOINT, observer=follower))
    head = Incoming(Part.RESPONSE_HEADERS, [*STATUS, (b"x-kvrouter-trick", b"1")], served="10.0.0.2:8000")
    assert stream.receive(head) == [
        HeadersReply(Part.RESPONSE_HEADERS, [(b"x-kvrouter-worker", b"w0")], (b"x-kvrouter-trick",))
    ]
    assert stream.receive(answer(b"one")) == [BodyReply(Part.RESPONSE_BODY, b"one", ends=False)]
    assert stream.receive(answer(b"", ends=True)) == [BodyReply(Part.RESPONSE_BODY, b"", ends=True)]
    stream.close()
    assert follower.told == [(200, "10.0.0.2:8000"), b"one", "whole"]


def test_an_answer_may_end_with_its_headers_or_its_trailers() -> None:
    for last in (Incoming(Part.RESPONSE_HEADERS, STATUS, ends=True), None):
        follower = Follower()
        stream = sent(Route(ENDPOINT, observer=follower))
        if last is None:
            stream.receive(Incoming(Part.RESPONSE_HEADERS, STATUS))
            assert stream.receive(Incoming(Part.RESPONSE_TRAILERS)) == [TrailersReply(Part.RESPONSE_TRAILERS)]
        else:
            stream.receive(last)
        stream.close()
        assert follower.told == [(200, None), "whole"]


@pytest.mark.parametrize("pieces", [0, 1, 2])
def test_a_stream_that_ends_early_ends_its_answer_once(pieces: int) -> None:
    follower = Follower()
    stream = sent(Route(ENDPOINT, observer=follower))
    if pieces:
        stream.receive(Incoming(Part.RESPONSE_HEADERS, STATUS))
    if pieces > 1:
        stream.receive(answer(b"one"))
    stream.close()
    stream.close()
    assert follower.told.count("cut") == 1 and "whole" not in follower.told


def test_without_the_answers_body_a_stream_that_ends_is_whole() -> None:
    follower = Follower()
    stream = sent(Route(ENDPOINT, observer=follower), Modes(BodyMode.FULL_DUPLEX_STREAMED, BodyMode.NONE))
    stream.receive(Incoming(Part.RESPONSE_HEADERS, STATUS))
    stream.close()
    assert follower.told[-1] == "whole"


@pytest.mark.parametrize("part", [part for part in Part if part is not Part.REQUEST_HEADERS])
def test_a_stream_begins_with_the_requests_headers(part: Part) -> None:
    with pytest.raises(ProtocolError, match="REQUEST_HEADERS was to come"):
        ProcessStream(1_000).receive(Incoming(part))


@pytest.mark.parametrize("part", [Part.REQUEST_HEADERS, Part.RESPONSE_BODY, Part.RESPONSE_TRAILERS])
def test_a_request_that_has_gone_on_waits_for_its_answers_headers(part: Part) -> None:
    with pytest.raises(ProtocolError, match="RESPONSE_HEADERS was to come"):
        sent().receive(Incoming(part))


@pytest.mark.parametrize("answering", [False, True])
def test_pieces_behind_the_end_that_add_nothing_are_passed_over(answering: bool) -> None:
    stream = begun(headers(), body(b"{"), body(b"}", ends=True))
    stream.send_on(Route(ENDPOINT))
    if answering:
        stream.receive(Incoming(Part.RESPONSE_HEADERS, STATUS))
    for data in (b"}", b"", b"}", b" \n"):
        assert stream.receive(body(data, ends=True)) == []
    assert stream.repeated_pieces == 4
    if answering:
        assert stream.receive(answer(b"one", ends=True)) == [BodyReply(Part.RESPONSE_BODY, b"one", ends=True)]


@pytest.mark.parametrize("data", [b"{}", b"x", b"{"])
def test_other_data_behind_the_end_is_an_error_that_says_so(data: bytes) -> None:
    stream = begun(headers(), body(b"{"), body(b"}", ends=True))
    stream.send_on(Route(ENDPOINT))
    with pytest.raises(ProtocolError, match=f"{len(data)} bytes came after the end of the request's body"):
        stream.receive(body(data, ends=True))


def test_white_space_behind_an_unknown_body_is_data() -> None:
    unknown = Incoming(Part.REQUEST_HEADERS, [(b":method", b"POST"), (b":path", b"/files")])
    stream = begun(unknown, body(b"x", ends=True))
    stream.send_on(Route(ENDPOINT))
    with pytest.raises(ProtocolError, match="1 bytes came after the end"):
        stream.receive(body(b"\n"))


def test_a_body_marked_as_whole_too_early_is_completed() -> None:
    stream = begun(headers(), body(b"{", ends=True))
    assert stream.request is not None and stream.request.may_go_on
    stream.wait_for_rest()
    assert stream.receive(body(b"", ends=True)) == [] and stream.request is None
    stream.receive(body(b"}", ends=True))
    assert stream.request is not None and stream.request.body == b"{}"
    assert [reply for reply in stream.send_on(Route(ENDPOINT)) if isinstance(reply, BodyReply)] == [
        BodyReply(Part.REQUEST_BODY, b"{", ends=False),
        BodyReply(Part.REQUEST_BODY, b"}", ends=True),
    ]
    assert (stream.was_repaired, stream.repeated_pieces, stream.is_cut) == (True, 1, False)


@pytest.mark.parametrize("length", [None, b"1", b"2"])
def test_a_body_of_its_announced_length_has_no_rest(length: bytes | None) -> None:
    named = HEADERS if length is None else [*HEADERS, (b"content-length", length)]
    stream = begun(Incoming(Part.REQUEST_HEADERS, named), body(b"{", ends=True))
    assert stream.request is not None and stream.request.may_go_on == (length != b"1")


def test_a_cut_body_whose_rest_does_not_come_is_offered_as_it_is() -> None:
    for last in (None, Incoming(Part.REQUEST_TRAILERS, ends=True)):
        stream = begun(headers(), body(b"{", ends=True))
        stream.wait_for_rest()
        assert (stream.end_cut() if last is None else stream.receive(last)) == []
        assert stream.request is not None and stream.request.body == b"{" and not stream.request.may_go_on


def test_the_gateways_own_answer_to_half_a_request_passes() -> None:
    stream = begun(headers(), body(b"ab"))
    assert stream.receive(Incoming(Part.RESPONSE_HEADERS, STATUS)) == [HeadersReply(Part.RESPONSE_HEADERS)]
    assert stream.receive(answer(b"{}", ends=True)) == [BodyReply(Part.RESPONSE_BODY, b"{}", ends=True)]
    assert stream.request is None
    stream.close()
