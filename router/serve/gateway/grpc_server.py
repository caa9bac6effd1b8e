# SPDX-License-Identifier: Apache-2.0
"""The gRPC server that gateways call: `ExternalProcessor/Process` and `Health/Check`.

This is the async shell over `process_stream.py`. It runs on the router's event loop, whose state it shares.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import msgspec

from kvrouter.router.base.common.errors import CutBody, RouterError, SettingError, WrongCoding, internal_error
from kvrouter.router.serve.access.certificate import GatewayPems
from kvrouter.router.serve.gateway.gateway_metrics import GatewayMetrics
from kvrouter.router.serve.gateway.messages import ProtocolError, Reply
from kvrouter.router.serve.gateway.process_stream import GatewayRequest, ProcessStream, Route
from kvrouter.router.serve.gateway.wire import (
    EXTERNAL_PROCESSOR,
    HEALTH,
    decode,
    encode,
    health_answer,
    health_service,
)
from kvrouter.router.serve.proxy.headers import Headers

log = logging.getLogger("kvrouter.gateway")

# The bytes of a message without its piece of a body.
FRAME_BYTES = 64 * 1024
# The size of the largest message, as a multiple of the largest body. A BUFFERED body is one message, and as large as
# the gateway's own buffer allows. gRPC ends the stream of a message over its limit, and the client gets an empty 500;
# below that limit, the router answers 413 to a body over max_body_bytes.
RECEIVED_BODIES = 4
# The number of streams equals the number of connections of the HTTP port. Each stream may hold a body. Above the limit
# a gateway is refused, and does what its failure mode says.
MAX_STREAMS = 4_096
# The seconds to wait for the rest of a body whose end was marked before its JSON was complete. The pieces of a body
# follow each other within milliseconds; a client whose JSON is cut gets its 400 this much later.
REST_S = 1.0
# The seconds before the end of a shutdown at which answers under way go on without this picker, from their next piece
# on. The events of a stream are tens of milliseconds apart.
LEAVE_S = 2.0
# The services that a health check may name. In the extension's specification, liveness is the process, and the others
# are readiness.
LIVENESS = "liveness"
READINESS = ("", "readiness", EXTERNAL_PROCESSOR)
JSON: Headers = [(b"content-type", b"application/json")]

INTERNAL_ERROR = 500

Pick = Callable[[GatewayRequest], Awaitable[Route]]


class Certificate:
    """The certificate for new connections. It may be replaced at any time."""

    def __init__(self, current: Callable[[], GatewayPems]) -> None:
        """Load the current certificate.

        `current` returns the certificate to show. It must not wait, because gRPC's threads call it.
        """
        self._current = current
        self._shown = current()

    def credentials(self) -> grpc.ServerCredentials:
        """Return the credentials for a gRPC port."""
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._shown), self._renewed, self._shown.client_ca is not None
        )

    def _renewed(self) -> Any:
        """Return another certificate for the next connections, or None if it is unchanged."""
        current = self._current()
        if current is self._shown:
            return None
        self._shown = current
        return _configuration(current)


def _configuration(pems: GatewayPems) -> Any:
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.certificate)], pems.client_ca)


class GatewayServer:
    """The server of the gateways' port. Call `start` once, then `stop`."""

    def __init__(
        self,
        pick: Pick,
        ready: Callable[[], str | None],
        metrics: GatewayMetrics,
        internal_errors: Callable[[], object],
        *,
        max_body_bytes: int,
    ) -> None:
        # Returns the route of a request.
        self._pick = pick
        # Returns why no request can be placed now, or None if one can.
        self._ready = ready
        self._metrics = metrics
        self._internal_errors = internal_errors
        self._max_body_bytes = max_body_bytes
        self._server: grpc.aio.Server | None = None
        self._open = 0
        # Whether answers under way go on without the router.
        self._leaves = False
        metrics.open.set_function(lambda: self._open)

    async def start(self, host: str, port: int, certificate: Certificate | None, *, shared: bool) -> int:
        """Listen, and return the port. Raises SettingError if the port cannot be used.

        Args:
            host: The name or address to listen on.
            port: The port; 0 lets the system choose one.
            certificate: The certificate for connections; None listens without TLS.
            shared: Whether other processes of this router listen on the same port.
        """
        options = [
            ("grpc.so_reuseport", int(shared)),
            ("grpc.max_receive_message_length", RECEIVED_BODIES * self._max_body_bytes + FRAME_BYTES),
            ("grpc.max_send_message_length", self._max_body_bytes + FRAME_BYTES),
            ("grpc.max_metadata_size", FRAME_BYTES),
        ]
        server = grpc.aio.server(options=options, maximum_concurrent_rpcs=MAX_STREAMS)
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    EXTERNAL_PROCESSOR, {"Process": grpc.stream_stream_rpc_method_handler(self._process)}
                ),
                grpc.method_handlers_generic_handler(
                    HEALTH, {"Check": grpc.unary_unary_rpc_method_handler(self._check)}
                ),
            )
        )
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            bound = (
                server.add_insecure_port(address)
                if certificate is None
                else server.add_secure_port(address, certificate.credentials())
            )
        except RuntimeError:
            bound = 0
        if not bound:
            raise SettingError(
                f"cannot listen on {host} port {port} for gateways; stop what listens there, or pass another --gateway-port"
            )
        await server.start()
        self._server = server
        return int(bound)

    async def stop(self, grace_s: float) -> None:
        """Take no more streams, and give those under way this many seconds to end. A later call may change the time."""
        loop = asyncio.get_running_loop()
        loop.call_later(max(0.0, grace_s - LEAVE_S), self._leave)
        if self._server is not None:
            await self._server.stop(grace_s)

    def _leave(self) -> None:
        self._leaves = True

    async def _process(self, _: Any, context: Any) -> None:
        """Serve one stream until it ends, is refused, or is left to the gateway."""
        stream = ProcessStream(self._max_body_bytes)
        self._open += 1
        reading: asyncio.Task[Any] | None = None
        try:
            while True:
                if stream.is_cut:
                    # A cancelled read would lose the message, so the read continues after the timeout.
                    reading = reading or asyncio.ensure_future(context.read())
                    await asyncio.wait((reading,), timeout=REST_S)
                    raw = reading.result() if reading.done() else grpc.aio.EOF
                else:
                    raw = await (context.read() if reading is None else reading)
                if reading is not None and reading.done():
                    reading = None
                if raw is grpc.aio.EOF and not stream.is_cut:
                    return
                for reply in await self._replies(stream, raw):
                    await context.write(encode(reply))
                if stream.is_refused:
                    # The gateway needs no second answer to the rest of the request.
                    return
                if self._leaves and stream.is_answering:
                    # A gateway continues without a picker if the picker ends the stream in order.
                    return
        except ProtocolError as error:
            self._metrics.protocol_errors.inc()
            log.warning("a gateway's stream cannot be served", extra={"problem": str(error)})
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        finally:
            self._open -= 1
            if reading is not None:
                reading.cancel()
            if stream.repeated_pieces:
                self._metrics.wrong_ends("repeated").inc(stream.repeated_pieces)
            if stream.was_repaired:
                self._metrics.wrong_ends("early").inc()
            stream.close()

    async def _replies(self, stream: ProcessStream, raw: Any) -> list[Reply]:
        """Return the replies to one message, with the endpoint once the request is complete.

        Raises ProtocolError.

        Args:
            stream: The stream of the message.
            raw: The message, or EOF if the rest of a cut body did not come.
        """
        try:
            replies = stream.end_cut() if raw is grpc.aio.EOF else stream.receive(decode(raw))
            if stream.request is not None:
                return stream.send_on(await self._pick(stream.request))
        except RouterError as error:
            if isinstance(error, CutBody) and stream.request is not None and stream.request.may_go_on:
                stream.wait_for_rest()
                return []
            return stream.refuse(error.status, headers_of(error), msgspec.json.encode(error.body()))
        except ProtocolError:
            raise
        except Exception:
            log.exception("unhandled error")
            self._internal_errors()
            return stream.refuse(INTERNAL_ERROR, JSON, msgspec.json.encode(internal_error()))
        return replies

    async def _check(self, raw: bytes, context: Any) -> bytes:
        """Answer a health check."""
        try:
            service = health_service(raw)
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise
        if service == LIVENESS:
            return health_answer(serves=True)
        if service not in READINESS:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return health_answer(serves=self._ready() is None)


def headers_of(error: RouterError) -> Headers:
    """Return the headers of the answer with this error."""
    if isinstance(error, WrongCoding):
        return [*JSON, (b"accept-encoding", error.accepted.encode())]
    if error.retry_after_s is None:
        return JSON
    # HTTP has only whole seconds.
    return [*JSON, (b"retry-after", b"%d" % math.ceil(error.retry_after_s))]
