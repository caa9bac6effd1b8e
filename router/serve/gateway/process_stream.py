# SPDX-License-Identifier: Apache-2.0
"""The state of one Process stream: one HTTP request on its way through a gateway, and its answer. Pure.

No part of a request goes on before it is complete and its endpoint is known; every piece of an answer goes on at once.
A message out of order ends the stream with a ProtocolError, which never leaves a request half answered.
"""

from __future__ import annotations

from typing import Protocol

from kvrouter.router.base.common.errors import TooLarge
from kvrouter.router.route.tokens.proxied_paths import AUDIO, BELOW_RESPONSES, PATHS, VERSIONED_PATHS, stored_path
from kvrouter.router.serve.access.key_bounds import KeyBounds
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
    Reply,
    TrailersReply,
)
from kvrouter.router.serve.proxy.headers import CONTENT_ENCODING, CONTENT_LENGTH, NOTHING, Headers

METHOD, PATH, STATUS = b":method", b":path", b":status"
# A changed body goes on in pieces of this size: Envoy's own pieces are as large, and gRPC's messages must stay below 4
# MiB.
PIECE_BYTES = 64 * 1024


class Observer(Protocol):
    """An observer of one answer."""

    def begins(self, status: int, headers: Headers, served: str | None) -> Headers:
        """Note the headers of the answer, and return headers to set in it, in place of those of the same name.

        `served` is the endpoint that answers, or None if the gateway does not name it.
        """
        ...

    def takes(self, data: bytes) -> None:
        """Note the next bytes of the answer's body."""

    def ends(self) -> None:
        """Note that the answer is complete."""

    def close(self) -> None:
        """Note that the stream ended before the answer was complete."""


class Route:
    """The endpoint of a request, and the changes to it on its way."""

    __slots__ = ("body", "endpoint", "given", "observer", "removed")

    def __init__(
        self,
        endpoint: str | None,
        given: Headers = NOTHING,
        removed: tuple[bytes, ...] = (),
        body: bytes | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.endpoint = endpoint
        # Headers to set in the request, and names of headers to remove from it.
        self.given = given
        self.removed = removed
        # A body to send in place of the client's; None leaves it unchanged.
        self.body = body
        # None if the answer is not observed.
        self.observer = observer


class GatewayRequest:
    """One complete request, as a `ClientRequest` of `downstream.py`.

    `url` is the path with the query. A path that ends with one of the proxy's paths with a version is treated as that
    path, because a gateway's route may have a prefix (`/team/model/v1/...`), which it removes after the picker.
    """

    def __init__(
        self, headers: Headers, body: bytes, subset: tuple[str, ...] | None, *, may_go_on: bool = False
    ) -> None:
        pseudo = dict(headers)
        self.method = pseudo.get(METHOD, b"")
        path, mark, query = pseudo.get(PATH, b"/").partition(b"?")
        self.path = _known_path(path.decode("latin-1"))
        self.url = self.path.encode("latin-1") + mark + query
        self.headers = [(name, value) for name, value in headers if not name.startswith(b":")]
        self.body = body
        self.subset = subset
        # The values of Content-Encoding; empty if there are none.
        self.encoding = b""
        if CONTENT_ENCODING in pseudo:
            self.encoding = b", ".join(value for name, value in headers if name == CONTENT_ENCODING)
        # Whether more of the body may follow if its JSON is cut, although the gateway has marked its end.
        self.may_go_on = may_go_on
        # The gateway decides which clients it admits; its protocol has no API key.
        self.bounds: KeyBounds | None = None


def _known_path(path: str) -> str:
    """Return the end of the path that is a versioned path of the proxy, or the whole path if there is no such end.

    If there are several, the longest one counts.
    """
    if path in PATHS:
        return path
    # An id may end like one of the paths, so a stored response comes first.
    below = path.rfind(BELOW_RESPONSES)
    if below >= 0 and stored_path(path[below:]) is not None:
        return path[below:]
    return max((proxied for proxied in VERSIONED_PATHS if path.endswith(proxied)), key=len, default=path)


class ProcessStream:
    """The state machine of one stream.

    Pass each message to `receive`. Once `request` is set, find its route, and call `send_on` or `refuse`; if its body
    is cut and `may_go_on`, call `wait_for_rest`.

    A gateway may mark the end of a body twice or too early. Source: envoyproxy/envoy issue 46237, where the last piece
    of a body over 1 MB in FULL_DUPLEX_STREAMED comes again.
    """

    def __init__(self, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._modes = Modes()
        self._expects = Part.REQUEST_HEADERS
        self._headers: Headers = []
        self._subset: tuple[str, ...] | None = None
        self._pieces: list[bytes] = []
        self._size_bytes = 0
        # The Content-Length of the request, or None if it has none.
        self._length_bytes: int | None = None
        # The size of the last piece that is not empty.
        self._last_bytes = 0
        # The complete body, by which a repeated piece is recognised, and whether white space after it has no meaning.
        self._body = b""
        self._is_json = False
        # Whether the body was marked as complete before its JSON was, so that the rest is waited for.
        self.is_cut = False
        # The number of pieces after the end that were ignored, and whether an early end was repaired.
        self.repeated_pieces = 0
        self.was_repaired = False
        self._has_trailers = False
        self._has_body = False
        # Whether the client got an error, so that nothing more is sent on this stream.
        self.is_refused = False
        self._observer: Observer | None = None
        # The request that waits for its route, or None.
        self.request: GatewayRequest | None = None

    def receive(self, message: Incoming) -> list[Reply]:
        """Take a message and return the replies to send now. Raises ProtocolError."""
        part = message.part
        if part is Part.RESPONSE_BODY:
            return self._answer_body(message)
        if part is Part.REQUEST_BODY:
            return self._request_body(message)
        if part is Part.REQUEST_HEADERS:
            return self._request_headers(message)
        if part is Part.RESPONSE_HEADERS:
            return self._answer_headers(message)
        if part is Part.REQUEST_TRAILERS:
            return self._request_trailers()
        self._expect(Part.RESPONSE_BODY, part)
        self._end_answer()
        return [TrailersReply(part)]

    def send_on(self, route: Route) -> list[Reply]:
        """Return the replies that send the request on along its route."""
        self.request, self._observer, self._headers = None, route.observer, []
        self.was_repaired, self.is_cut = self.is_cut, False
        self._expects = Part.RESPONSE_HEADERS
        trailers: list[Reply] = [TrailersReply(Part.REQUEST_TRAILERS)] if self._has_trailers else []
        if not self._has_body:
            if trailers and self._modes.request == BodyMode.BUFFERED:
                # The gateway sent the headers on before it knew that no body follows, so it has placed the request
                # itself.
                return trailers
            return [HeadersReply(Part.REQUEST_HEADERS, route.given, route.removed, route.endpoint), *trailers]
        if self._modes.request == BodyMode.BUFFERED:
            headers = route.given
            if route.body is not None:
                # Set the new length, because a gateway refuses a changed body whose content-length is that of the original one.
                headers = [*headers, (CONTENT_LENGTH, b"%d" % len(route.body))]
            return [KeptBody(Part.REQUEST_BODY, route.body, headers, route.removed, route.endpoint)]
        pieces, self._pieces = self._pieces, []
        if route.body is not None:
            view = route.body
            pieces = [view[at : at + PIECE_BYTES] for at in range(0, len(view), PIECE_BYTES)] or [b""]
        last = len(pieces) - 1
        ends = not trailers
        # The gateway drops the length of a body that may be changed; without this header, engines would get the body in
        # chunks.
        length = [(CONTENT_LENGTH, b"%d" % sum(map(len, pieces)))] if ends else NOTHING
        replies: list[Reply] = [
            HeadersReply(Part.REQUEST_HEADERS, [*route.given, *length], route.removed, route.endpoint)
        ]
        replies += [BodyReply(Part.REQUEST_BODY, piece, ends and n == last) for n, piece in enumerate(pieces)]
        return replies + trailers

    def refuse(self, status: int, headers: Headers, body: bytes) -> list[Reply]:
        """Return the reply that answers the client without any engine. Later messages on the stream have no effect."""
        self.request, self._pieces, self.is_refused = None, [], True
        return [Refusal(status, headers, body)]

    def wait_for_rest(self) -> None:
        """Take further pieces of the request's body, because its JSON is cut."""
        self.request, self.is_cut, self._expects = None, True, Part.REQUEST_BODY

    def end_cut(self) -> list[Reply]:
        """Offer the request as it is, because the rest of its body has not come."""
        self._whole(may_go_on=False)
        return []

    @property
    def is_answering(self) -> bool:
        """Whether an answer is under way, every piece of which has gone on so far."""
        return self._expects is Part.RESPONSE_BODY

    def close(self) -> None:
        """End the exchange, at whatever point the stream has ended."""
        if self._modes.answer == BodyMode.NONE and self._expects is Part.RESPONSE_BODY:
            # The gateway does not show the body, and may end the stream at any time.
            self._end_answer()
        observer, self._observer = self._observer, None
        if observer is not None:
            observer.close()

    def _expect(self, expected: Part, part: Part) -> None:
        """Raise ProtocolError unless the stream expects this part now."""
        if self._expects is not expected:
            raise ProtocolError(f"{part.name} came where {self._expects.name} was to come")

    # The request.

    def _request_headers(self, message: Incoming) -> list[Reply]:
        self._expect(Part.REQUEST_HEADERS, message.part)
        if message.observes:
            raise ProtocolError("the gateway only observes, so nothing can be picked: turn observability_mode off")
        self._modes = message.modes or self._modes
        self._headers, self._subset = message.headers, message.subset
        if message.ends:
            self._whole(may_go_on=False)
            return []
        length = next((value for name, value in message.headers if name == CONTENT_LENGTH), b"")
        if length.isdigit():
            # Check the length before the body comes: a BUFFERED body is one message, and gRPC refuses a message that is
            # too large without an error for the client.
            self._length_bytes = int(length)
            self._check_size(self._length_bytes)
        mode = self._modes.request
        self._expects = Part.REQUEST_BODY
        if mode == BodyMode.FULL_DUPLEX_STREAMED:
            # The headers are answered once the endpoint is known, which requires the body.
            return []
        if mode == BodyMode.BUFFERED:
            return [HeadersReply(message.part)]
        raise ProtocolError(
            "an endpoint is picked by the request's body: set the gateway's request_body_mode to FULL_DUPLEX_STREAMED"
        )

    def _request_body(self, message: Incoming) -> list[Reply]:
        if self._expects in (Part.RESPONSE_HEADERS, Part.RESPONSE_BODY):
            return self._after_end(message)
        self._expect(Part.REQUEST_BODY, message.part)
        if self.is_cut and self._size_bytes + len(message.data) == len(self._body):
            # The end is marked again, and there is still no rest.
            self.repeated_pieces += 1
            return []
        self._has_body = True
        self._size_bytes += len(message.data)
        self._check_size(self._size_bytes)
        self._pieces.append(message.data)
        self._last_bytes = len(message.data) or self._last_bytes
        if self._modes.request == BodyMode.BUFFERED:
            # The body is one message; it is not marked as the request's end if trailers follow.
            self._whole(may_go_on=False)
        elif message.ends:
            self._whole(may_go_on=self._length_bytes is None or self._size_bytes < self._length_bytes)
        return []

    def _after_end(self, message: Incoming) -> list[Reply]:
        """Ignore a piece that adds nothing to the complete body. Raises ProtocolError if it adds something."""
        data = message.data
        is_repeated = len(data) == self._last_bytes and self._body.endswith(data)
        if data and not is_repeated and not (self._is_json and data.isspace()):
            raise ProtocolError(
                f"{len(data)} bytes came after the end of the request's body, which had {len(self._body)} bytes, and "
                "they do not repeat its last piece: the gateway, or a filter before the picker, marks the end too "
                "early; set request_body_mode to BUFFERED, which needs no such mark"
            )
        self.repeated_pieces += 1
        # A gateway that sends BUFFERED bodies waits for the reply to each message.
        return [KeptBody(message.part)] if self._modes.request == BodyMode.BUFFERED else []

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes > self._max_body_bytes:
            raise TooLarge(
                f"the body is over {self._max_body_bytes} bytes; send a shorter prompt, or raise the router's max_body_bytes"
            )

    def _request_trailers(self) -> list[Reply]:
        if self._expects is Part.RESPONSE_HEADERS:
            # The body already marked the end of the request.
            return [TrailersReply(Part.REQUEST_TRAILERS)]
        self._expect(Part.REQUEST_BODY, Part.REQUEST_TRAILERS)
        self._has_trailers = True
        self._whole(may_go_on=False)
        return []

    def _whole(self, *, may_go_on: bool) -> None:
        """Set `request`, because the request is complete and can be routed.

        Args:
            may_go_on: Whether more of the body may follow if its JSON is cut.
        """
        self._expects = Part.RESPONSE_HEADERS
        self._body = b"".join(self._pieces)
        self.request = GatewayRequest(self._headers, self._body, self._subset, may_go_on=may_go_on)
        self._is_json = self.request.path in PATHS - AUDIO

    # The answer.

    def _answer_headers(self, message: Incoming) -> list[Reply]:
        if self._expects is Part.REQUEST_BODY:
            # This is the gateway's own answer to a request that it gave up.
            self._expects, self._pieces, self.is_cut = Part.RESPONSE_HEADERS, [], False
        self._expect(Part.RESPONSE_HEADERS, message.part)
        self._expects = Part.RESPONSE_BODY
        observer = self._observer
        added: Headers = NOTHING
        removed: tuple[bytes, ...] = ()
        if observer is not None:
            status = next((value for name, value in message.headers if name == STATUS), b"0")
            headers = [(name, value) for name, value in message.headers if not name.startswith(b":")]
            added = observer.begins(int(status) if status.isdigit() else 0, headers, message.served)
            ours = {name for name, _ in added}
            removed = tuple(name for name, _ in headers if name.startswith(b"x-kvrouter-") and name not in ours)
        if message.ends:
            self._end_answer()
        return [HeadersReply(message.part, added, removed)]

    def _answer_body(self, message: Incoming) -> list[Reply]:
        self._expect(Part.RESPONSE_BODY, message.part)
        if self._observer is not None and message.data:
            self._observer.takes(message.data)
        # A BUFFERED body is one message; trailers may follow it, and the gateway need not show them.
        if message.ends or self._modes.answer == BodyMode.BUFFERED:
            self._end_answer()
        if self._modes.answer == BodyMode.FULL_DUPLEX_STREAMED:
            return [BodyReply(message.part, message.data, message.ends)]
        return [KeptBody(message.part)]

    def _end_answer(self) -> None:
        observer, self._observer = self._observer, None
        if observer is not None:
            observer.ends()
