# SPDX-License-Identifier: Apache-2.0
"""The messages of `messages.py` in protobuf. No other module depends on protobuf.

The types are described here, with only the fields that are used, and built at import. Generated modules would tie this
package to one version of protobuf, and the published ones (xds-protos) are 1,826 modules that overwrite files of other
packages. Texts that may not be UTF-8 (headers) are declared as bytes, which are the same on the wire.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError

from kvrouter.router.serve.gateway.messages import (
    ENDPOINT,
    NAMESPACE,
    SERVED_KEY,
    SUBSET_NAMESPACE,
    UPSTREAM,
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
    subset_of,
)
from kvrouter.router.serve.proxy.headers import Headers

EXTERNAL_PROCESSOR = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH = "grpc.health.v1.Health"

_STRUCT = "google.protobuf.Struct"
# The number and type of each field, by message. A * marks a repeated field. A map is a list of entries on the wire.
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "HeaderValue": {"key": (1, "bytes"), "value": (2, "bytes"), "raw_value": (3, "bytes")},
    "HeaderMap": {"headers": (1, "HeaderValue*")},
    "StructEntry": {"key": (1, "string"), "value": (2, _STRUCT)},
    "Metadata": {"filter_metadata": (1, "StructEntry*")},
    "HttpHeaders": {"headers": (1, "HeaderMap"), "end_of_stream": (3, "bool")},
    "HttpBody": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "HttpTrailers": {"trailers": (1, "HeaderMap")},
    "ProtocolConfiguration": {"request_body_mode": (1, "int32"), "response_body_mode": (2, "int32")},
    "ProcessingRequest": {
        "request_headers": (Part.REQUEST_HEADERS, "HttpHeaders"),
        "response_headers": (Part.RESPONSE_HEADERS, "HttpHeaders"),
        "request_body": (Part.REQUEST_BODY, "HttpBody"),
        "response_body": (Part.RESPONSE_BODY, "HttpBody"),
        "request_trailers": (Part.REQUEST_TRAILERS, "HttpTrailers"),
        "response_trailers": (Part.RESPONSE_TRAILERS, "HttpTrailers"),
        "metadata_context": (8, "Metadata"),
        "attributes": (9, "StructEntry*"),
        "observability_mode": (10, "bool"),
        "protocol_config": (11, "ProtocolConfiguration"),
    },
    "HeaderValueOption": {"header": (1, "HeaderValue"), "append_action": (3, "int32")},
    "HeaderMutation": {"set_headers": (1, "HeaderValueOption*"), "remove_headers": (2, "bytes*")},
    "StreamedBodyResponse": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "BodyMutation": {"body": (1, "bytes"), "streamed_response": (3, "StreamedBodyResponse")},
    "CommonResponse": {
        "header_mutation": (2, "HeaderMutation"),
        "body_mutation": (3, "BodyMutation"),
        "clear_route_cache": (5, "bool"),
    },
    "HeadersResponse": {"response": (1, "CommonResponse")},
    "BodyResponse": {"response": (1, "CommonResponse")},
    "TrailersResponse": {"header_mutation": (1, "HeaderMutation")},
    "HttpStatus": {"code": (1, "int32")},
    "ImmediateResponse": {"status": (1, "HttpStatus"), "headers": (2, "HeaderMutation"), "body": (3, "bytes")},
    "ProcessingResponse": {
        "request_headers": (Part.REQUEST_HEADERS - 1, "HeadersResponse"),
        "response_headers": (Part.RESPONSE_HEADERS - 1, "HeadersResponse"),
        "request_body": (Part.REQUEST_BODY - 1, "BodyResponse"),
        "response_body": (Part.RESPONSE_BODY - 1, "BodyResponse"),
        "request_trailers": (Part.REQUEST_TRAILERS - 1, "TrailersResponse"),
        "response_trailers": (Part.RESPONSE_TRAILERS - 1, "TrailersResponse"),
        "immediate_response": (7, "ImmediateResponse"),
        "dynamic_metadata": (8, _STRUCT),
    },
    "HealthCheckRequest": {"service": (1, "string")},
    "HealthCheckResponse": {"status": (1, "int32")},
}
# The numbers of the fields of which a message has exactly one.
_ONEOF = {"ProcessingRequest": frozenset(range(2, 8)), "ProcessingResponse": frozenset(range(1, 8))}
_CONTENT = "content"
# HeaderValueOption.append_action: OVERWRITE_IF_EXISTS_OR_ADD.
_OVERWRITE = 2
_FIELDS = {part: part.name.lower() for part in Part}
_PARTS = {field: part for part, field in _FIELDS.items()}
_SCALARS = {"bytes", "string", "bool", "int32"}


def _described() -> descriptor_pb2.FileDescriptorProto:
    """Return the description of all messages as a protobuf file."""
    field_proto = descriptor_pb2.FieldDescriptorProto
    package = "kvrouter.gateway"
    file = descriptor_pb2.FileDescriptorProto(
        name="kvrouter/gateway.proto", package=package, syntax="proto3", dependency=["google/protobuf/struct.proto"]
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        choices = _ONEOF.get(name, frozenset())
        if choices:
            message.oneof_decl.add(name=_CONTENT)
        for field, (number, kind) in fields.items():
            descriptor = message.field.add(name=field, number=number, label=field_proto.LABEL_OPTIONAL)
            if number in choices:
                descriptor.oneof_index = 0
            if kind.endswith("*"):
                descriptor.label = field_proto.LABEL_REPEATED
                kind = kind.removesuffix("*")
            if kind in _SCALARS:
                descriptor.type = getattr(field_proto, f"TYPE_{kind.upper()}")
            else:
                descriptor.type = field_proto.TYPE_MESSAGE
                descriptor.type_name = f".{kind}" if "." in kind else f".{package}.{kind}"
    return file


def _types() -> dict[str, Any]:
    """Return the message classes by name."""
    # The pool is not the default one, because another library may use the same names.
    pool = descriptor_pool.DescriptorPool()
    struct = descriptor_pb2.FileDescriptorProto()
    struct_pb2.DESCRIPTOR.CopyToProto(struct)
    pool.Add(struct)
    file = pool.Add(_described()) or pool.FindFileByName("kvrouter/gateway.proto")
    return {name: message_factory.GetMessageClass(file.message_types_by_name[name]) for name in _MESSAGES}


_TYPES = _types()
_Request, _Response = _TYPES["ProcessingRequest"], _TYPES["ProcessingResponse"]
_HealthRequest, _HealthResponse = _TYPES["HealthCheckRequest"], _TYPES["HealthCheckResponse"]


def decode(raw: bytes) -> Incoming:
    """Decode a message of the gateway. Raises ProtocolError."""
    try:
        message = _Request.FromString(raw)
    except DecodeError:
        raise ProtocolError("this is no ProcessingRequest") from None
    field = message.WhichOneof(_CONTENT)
    if field is None:
        raise ProtocolError("a ProcessingRequest without a request")
    return _incoming(_PARTS[field], getattr(message, field), message)


def _incoming(part: Part, content: Any, message: Any) -> Incoming:
    if part in (Part.REQUEST_BODY, Part.RESPONSE_BODY):
        # This branch is first because most messages are pieces of a body.
        return Incoming(part, data=content.body, ends=content.end_of_stream)
    if part in (Part.REQUEST_TRAILERS, Part.RESPONSE_TRAILERS):
        return Incoming(part, ends=True)
    # Names of headers mean the same in any case, and the rest of the router compares them in lower case.
    headers = [(header.key.lower(), header.raw_value or header.value) for header in content.headers.headers]
    metadata = {entry.key: entry.value for entry in message.metadata_context.filter_metadata}
    hint = metadata.get(SUBSET_NAMESPACE)
    modes = None
    if message.HasField("protocol_config"):
        modes = Modes(message.protocol_config.request_body_mode, message.protocol_config.response_body_mode)
    return Incoming(
        part,
        headers,
        ends=content.end_of_stream,
        modes=modes,
        subset=subset_of(None if hint is None else MessageToDict(hint)),
        served=_served(metadata.get(NAMESPACE), message.attributes),
        observes=message.observability_mode,
    )


def _served(metadata: Any, attributes: Any) -> str | None:
    """Return the endpoint that answers, from the extension's metadata or else from Envoy's attribute."""
    if metadata is not None and (endpoint := _text(metadata, SERVED_KEY)):
        return endpoint
    return next((endpoint for entry in attributes if (endpoint := _text(entry.value, UPSTREAM))), None)


def _text(struct: Any, key: str) -> str | None:
    """Return a text in a Struct, or None if it is absent or empty."""
    return struct.fields[key].string_value or None if key in struct.fields else None


def encode(reply: Reply) -> bytes:
    """Encode a reply as a ProcessingResponse."""
    message = _Response()
    match reply:
        case BodyReply(part, data, ends):
            streamed = getattr(message, _FIELDS[part]).response.body_mutation.streamed_response
            streamed.body, streamed.end_of_stream = data, ends
        case HeadersReply(part, given, removed, endpoint):
            _mutate(getattr(message, _FIELDS[part]).response, given, removed)
            _point(message, endpoint)
        case KeptBody(part, body, given, removed, endpoint):
            response = getattr(message, _FIELDS[part]).response
            _mutate(response, given, removed)
            if body is not None:
                response.body_mutation.body = body
            _point(message, endpoint)
        case TrailersReply(part):
            getattr(message, _FIELDS[part]).SetInParent()
        case Refusal(status, headers, body):
            immediate = message.immediate_response
            immediate.status.code = status
            _set(immediate.headers, headers)
            immediate.body = body
    encoded: bytes = message.SerializeToString()
    return encoded


def _mutate(response: Any, given: Headers, removed: tuple[bytes, ...]) -> None:
    response.SetInParent()
    if given or removed:
        _set(response.header_mutation, given)
        response.header_mutation.remove_headers.extend(removed)


def _set(mutation: Any, headers: Headers) -> None:
    for name, value in headers:
        option = mutation.set_headers.add()
        option.header.key, option.header.raw_value, option.append_action = name, value, _OVERWRITE


def _point(message: Any, endpoint: str | None) -> None:
    if endpoint is not None:
        message.dynamic_metadata.get_or_create_struct(NAMESPACE)[ENDPOINT] = endpoint


def health_service(raw: bytes) -> str:
    """Return the name of the service that a health check is about. Raises ProtocolError."""
    try:
        service: str = _HealthRequest.FromString(raw).service
    except DecodeError:
        raise ProtocolError("this is no HealthCheckRequest") from None
    return service


def health_answer(*, serves: bool) -> bytes:
    """Encode a HealthCheckResponse: SERVING or NOT_SERVING."""
    encoded: bytes = _HealthResponse(status=1 if serves else 2).SerializeToString()
    return encoded
