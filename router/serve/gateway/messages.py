# SPDX-License-Identifier: Apache-2.0
"""The messages of one Process stream between a gateway and the router, as plain values.

One stream is one HTTP request and its answer: headers, pieces of the body, and trailers of each side. Source:
envoy/service/ext_proc/v3/external_processor.proto, and proposal 004 of the Gateway API Inference Extension (1.0.0).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple, TypeAlias

from kvrouter.router.serve.proxy.headers import NOTHING, Headers


class Part(IntEnum):
    """The part of an exchange that a message is about.

    The values are the field numbers in ProcessingRequest; those in ProcessingResponse are one less.
    """

    REQUEST_HEADERS = 2
    RESPONSE_HEADERS = 3
    REQUEST_BODY = 4
    RESPONSE_BODY = 5
    REQUEST_TRAILERS = 6
    RESPONSE_TRAILERS = 7


class BodyMode(IntEnum):
    """The mode in which the gateway sends a body (`processing_mode` of its filter)."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4


class Modes(NamedTuple):
    """The modes of both bodies, from the first message of a stream. The defaults are what the extension demands."""

    request: int = BodyMode.FULL_DUPLEX_STREAMED
    answer: int = BodyMode.FULL_DUPLEX_STREAMED


class Incoming(NamedTuple):
    """One message of the gateway."""

    part: Part
    # The names are in lower case.
    headers: Headers = NOTHING
    data: bytes = b""
    # Whether the body ends with this message.
    ends: bool = False
    # The modes of the bodies; None in all messages but the first.
    modes: Modes | None = None
    # The endpoints to choose from; None if the gateway names none.
    subset: tuple[str, ...] | None = None
    # The endpoint that answers, if the gateway names it.
    served: str | None = None
    # Whether the gateway does not wait for replies.
    observes: bool = False


class HeadersReply(NamedTuple):
    """The reply with which Envoy sends a request's or an answer's headers on, changed as stated."""

    part: Part
    # Headers to set, in place of those of the same name.
    given: Headers = NOTHING
    # Names of headers to remove.
    removed: tuple[bytes, ...] = ()
    # The endpoint to send the request to, which is sent as metadata.
    endpoint: str | None = None


class BodyReply(NamedTuple):
    """The reply with a piece of the body in FULL_DUPLEX_STREAMED, a mode in which only replies go on."""

    part: Part
    data: bytes
    # Whether the body ends with this piece.
    ends: bool


class KeptBody(NamedTuple):
    """The reply that passes a piece of the body on unchanged, in every mode but FULL_DUPLEX_STREAMED.

    `given`, `removed` and `endpoint` change headers. A gateway accepts such changes only with a BUFFERED body, because only
    then does it hold the headers back until the body is complete.
    """

    part: Part
    # A body to send in place of the piece; None leaves the piece unchanged.
    body: bytes | None = None
    # The other fields are the same as in `HeadersReply`.
    given: Headers = NOTHING
    removed: tuple[bytes, ...] = ()
    endpoint: str | None = None


class TrailersReply(NamedTuple):
    """The reply that lets trailers go on."""

    part: Part


class Refusal(NamedTuple):
    """The reply that answers the client without sending the request to an engine."""

    status: int
    headers: Headers
    body: bytes


Reply: TypeAlias = HeadersReply | BodyReply | KeptBody | TrailersReply | Refusal


class ProtocolError(Exception):
    """The error that a message of the gateway is not allowed, or that no endpoint can be picked with it.

    The text says what to change in the gateway.
    """


# The places of endpoints in the extension's metadata.
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET_KEY = "x-gateway-destination-endpoint-subset"
NAMESPACE = "envoy.lb"
ENDPOINT = "x-gateway-destination-endpoint"
SERVED_KEY = "x-gateway-destination-endpoint-served"
# An attribute of Envoy: the address that it sent the request to.
UPSTREAM = "upstream.address"


def subset_of(hint: Mapping[str, object] | None) -> tuple[str, ...] | None:
    """Return the endpoints of a hint, or None if it has none.

    The hint holds a list, or a text with commas.
    """
    if hint is None or SUBSET_KEY not in hint:
        return None
    listed = hint[SUBSET_KEY]
    texts = listed.split(",") if isinstance(listed, str) else listed if isinstance(listed, list) else []
    return tuple(text.strip() for text in texts if isinstance(text, str) and text.strip())
