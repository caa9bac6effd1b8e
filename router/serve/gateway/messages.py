# SPDX-License-Identifier: Apache-2.0
"""What a gateway says and is answered on one Process stream, as plain values.

One stream is one HTTP request and its answer: headers, pieces of the body, trailers, of each side. Source:
envoy/service/ext_proc/v3/external_processor.proto, and proposal 004 of the Gateway API Inference Extension (1.0.0)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple, TypeAlias

from kvrouter.router.serve.proxy.headers import NOTHING, Headers


class Part(IntEnum):
    """What of an exchange a message is about. A request's field in ProcessingRequest; one less in
    ProcessingResponse."""

    REQUEST_HEADERS = 2
    RESPONSE_HEADERS = 3
    REQUEST_BODY = 4
    RESPONSE_BODY = 5
    REQUEST_TRAILERS = 6
    RESPONSE_TRAILERS = 7


class BodyMode(IntEnum):
    """How the gateway sends a body (`processing_mode` of its filter)."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4


class Modes(NamedTuple):
    """Of both bodies, as the first message of a stream has them; without them, what the extension demands."""

    request: int = BodyMode.FULL_DUPLEX_STREAMED
    answer: int = BodyMode.FULL_DUPLEX_STREAMED


class Incoming(NamedTuple):
    """One message of the gateway.

    ends: the body ends with it. subset: the endpoints to choose from, None where the gateway says nothing of them.
    served: the endpoint that answers, where the gateway says it. observes: the gateway does not wait for answers."""

    part: Part
    headers: Headers = NOTHING
    data: bytes = b""
    ends: bool = False
    modes: Modes | None = None
    subset: tuple[str, ...] | None = None
    served: str | None = None
    observes: bool = False


class HeadersReply(NamedTuple):
    """The headers may go on. given: set, in place of what has the name. endpoint: as metadata."""

    part: Part
    given: Headers = NOTHING
    removed: tuple[bytes, ...] = ()
    endpoint: str | None = None


class BodyReply(NamedTuple):
    """A piece of the body in FULL_DUPLEX_STREAMED, in which only what is sent back goes on."""

    part: Part
    data: bytes
    ends: bool


class KeptBody(NamedTuple):
    """The piece of the body goes on as it came, in every other mode. body: in its place, None: unchanged. The others as
    in HeadersReply; a gateway takes them while it holds the headers back, with a BUFFERED request alone."""

    part: Part
    body: bytes | None = None
    given: Headers = NOTHING
    removed: tuple[bytes, ...] = ()
    endpoint: str | None = None


class TrailersReply(NamedTuple):
    """The trailers go on."""

    part: Part


class Refusal(NamedTuple):
    """The client gets this answer, and no engine the request."""

    status: int
    headers: Headers
    body: bytes


Reply: TypeAlias = HeadersReply | BodyReply | KeptBody | TrailersReply | Refusal


class ProtocolError(Exception):
    """The gateway sent what the protocol does not allow, or nothing can be picked with. The text says what to change
    there."""


# Where the extension has endpoints in metadata.
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET_KEY = "x-gateway-destination-endpoint-subset"
NAMESPACE = "envoy.lb"
ENDPOINT = "x-gateway-destination-endpoint"
SERVED_KEY = "x-gateway-destination-endpoint-served"
# An attribute of Envoy: the address that it sent the request to.
UPSTREAM = "upstream.address"


def subset_of(hint: Mapping[str, object] | None) -> tuple[str, ...] | None:
    """The endpoints of a hint; None where it has none. A list, or a text with commas."""
    if hint is None or SUBSET_KEY not in hint:
        return None
    given = hint[SUBSET_KEY]
    texts = given.split(",") if isinstance(given, str) else given if isinstance(given, list) else []
    return tuple(text.strip() for text in texts if isinstance(text, str) and text.strip())
