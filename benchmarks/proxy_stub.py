# SPDX-License-Identifier: Apache-2.0
"""An engine that answers every POST at once with the same completion, so that only the proxies in front cost time.

A stream has CHUNKS chunks, one every CHUNK_S; each says when it was sent (CLOCK_MONOTONIC, ns). With
`--tokenizer FOLDER` it also answers `/tokenize` and `/v1/chat/completions/render`, and reports the ids of a prompt to
clients that request them, as vLLM does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import httptools
import uvloop

from kvrouter.router.route.tokens.client_body import CHAT_PATH, TEXT_PATH, read_client_body
from kvrouter.router.route.tokens.local.local_tokenizer import LocalTokenizer
from kvrouter.router.route.tokens.prompt_tokens import Prompt
from kvrouter.router.route.tokens.token_request import ListRequest, TokenRequest, read

CHUNKS = 32
# The time of a fast decode step, which is longer than any proxy takes for a chunk.
CHUNK_S = 0.004
BODY = (
    b'{"id":"cmpl-0","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":" yes","logprobs":null,'
    b'"finish_reason":"length"}],"usage":{"prompt_tokens":256,"completion_tokens":1,"total_tokens":257}}'
)
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
MODELS = b'{"object":"list","data":[{"id":"m","object":"model","created":1,"owned_by":"stub"}]}'
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"id":"c","object":"text_completion","choices":[{"index":0,"text":" yes"}],"sent_ns":%d}\n\n'
# A pattern, as each router writes the body again in its own way.
STREAM_ASKED = re.compile(rb'"stream":\s*true')
LAST_EVENT = b"data: [DONE]\n\n"


class Stub(asyncio.Protocol):
    """One connection to the engine."""

    def __init__(self, tokenizer: LocalTokenizer | None) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._tokenizer = tokenizer
        self._body = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url = url
        self._body.clear()

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        if self._parser.get_method() != b"POST":
            self._answer(MODELS if self._url == b"/v1/models" else b"{}")
        elif self._url.endswith(b"/render"):
            rendered: dict[str, Any] = {
                "request_id": "r",
                "token_ids": self._ids(),
                "features": None,
                "sampling_params": {},
            }
            self._answer(json.dumps(rendered if b"chat" in self._url else [rendered]).encode())
        elif self._url == b"/tokenize":
            ids = self._ids()
            self._answer(json.dumps({"count": len(ids), "max_model_len": 100_000, "tokens": ids}).encode())
        elif self._tokenizer is not None and b'"return_token_ids":true' in self._body:
            completion = json.loads(BODY) | {"prompt_token_ids": self._ids()}
            self._answer(json.dumps(completion).encode())
        elif STREAM_ASKED.search(self._body):
            self._transport.write(STREAM)
            self._send_chunk(CHUNKS)
        else:
            self._answer(BODY)

    def _answer(self, body: bytes) -> None:
        self._transport.write(ANSWER % (len(body), body))

    def _send_chunk(self, left: int) -> None:
        if self._transport.is_closing():
            return
        event = EVENT % time.monotonic_ns() if left else LAST_EVENT
        end = b"" if left else b"0\r\n\r\n"
        self._transport.write(b"%x\r\n%s\r\n%s" % (len(event), event, end))
        if left:
            asyncio.get_running_loop().call_later(CHUNK_S, self._send_chunk, left - 1)

    def _ids(self) -> list[int]:
        assert self._tokenizer is not None
        raw = bytes(self._body)
        path = CHAT_PATH if b'"messages"' in raw else TEXT_PATH
        prompt = read(path, read_client_body(path, raw))
        assert not isinstance(prompt, Prompt | ListRequest)
        if not isinstance(prompt, TokenRequest):
            return [int(token) for token in prompt]
        return [int(token) for token in self._tokenizer.ids(prompt, self._tokenizer.likely_quirks()[0])]


async def serve(port: int, tokenizer: LocalTokenizer | None) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Stub(tokenizer), "127.0.0.1", port, backlog=512)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    made = None if arguments.tokenizer is None else LocalTokenizer(arguments.tokenizer, datetime.now)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(arguments.port, made))
