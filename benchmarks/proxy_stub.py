# SPDX-License-Identifier: Apache-2.0
"""An engine that answers every POST at once with the same completion: what is left is the cost of whoever stands in front."""

from __future__ import annotations

import argparse
import asyncio

import httptools
import uvloop

BODY = (
    b'{"id":"cmpl-0","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":" yes","logprobs":null,'
    b'"finish_reason":"length"}],"usage":{"prompt_tokens":256,"completion_tokens":1,"total_tokens":257}}'
)
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
MODELS = b'{"object":"list","data":[{"id":"m","object":"model","created":1,"owned_by":"stub"}]}'


class Stub(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url = url

    def on_message_complete(self) -> None:
        body = BODY if self._parser.get_method() == b"POST" else MODELS if self._url == b"/v1/models" else b"{}"
        self._transport.write(ANSWER % (len(body), body))  # type: ignore[attr-defined]


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", port, backlog=512)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(parser.parse_args().port))
