# SPDX-License-Identifier: Apache-2.0
"""The endpoints of an engine that return tokens, as a real HTTP server with vLLM's answers.

It can be slow or wrong, lack endpoints, or change from one request to the next. Each byte of a text is a token; the
first token shows whether the request was a chat or a text.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from kvrouter.router.route.tokens.responses_conversation import as_chat
from kvrouter.router.route.tokens.token_request import TokenRequest

TOOLS_TOKEN, SYSTEM_TOKEN = 900, 901


def tokens_of(body: dict[str, Any], *, drop_tools: bool = False) -> list[int]:
    """Return the tokens that this engine makes of a request; chats and texts are encoded in different ways."""
    if "prompt" in body:
        return [1, *str(body["prompt"]).encode()]
    if "input" in body:
        chat = as_chat(TokenRequest("responses", {name: msgspec.Raw(msgspec.json.encode(body[name])) for name in body}))
        body = {name: chat.value(name) for name in chat.fields}
    ids = [SYSTEM_TOKEN]
    if body.get("tools") and not (drop_tools and body.get("tool_choice") == "none"):
        ids += [TOOLS_TOKEN, *json.dumps(body["tools"]).encode()]
    for message in body["messages"]:
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(part.get("text", "") if isinstance(part, dict) else part for part in content)
        ids += [*message["role"].encode(), 0, *(content or "").encode(), 2]
    return ids if body.get("continue_final_message") else [*ids, 3]


class TokenEngine:
    """A server that listens from entry to exit; tests set its attributes between requests."""

    def __init__(self) -> None:
        # Error statuses in place of answers, by path.
        self.statuses: dict[str, int] = {}
        # Bodies in place of the answers with tokens, by path.
        self.answers: dict[str, bytes] = {}
        self.delay_s = 0.0
        # Requests that contain this text wait for `go_on`.
        self.slow: str | None = None
        self.go_on = asyncio.Event()
        # The connection of a request that contains this text is cut.
        self.dies_of: str | None = None
        # Requests that contain this text are refused, as a template refuses them.
        self.refused: str | None = None
        # The `features` in render's answers to requests with images.
        self.features: dict[str, Any] | None = None
        self.tokens: Callable[[dict[str, Any]], list[int]] = tokens_of
        # The tokens of /tokenize, if they differ from those of the other endpoints.
        self.tokenize: Callable[[dict[str, Any]], list[int]] | None = None
        # Whether completions return the prompt's token ids if they are requested.
        self.tells_ids = True
        # The path and the body of each request so far.
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[dict[str, str]] = []
        # Requests that are being answered now, and the most that ever were at the same time.
        self.at_once = self.most_at_once = 0
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> TokenEngine:
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]

    async def _handle(self, request: web.Request) -> web.Response:
        path, body = request.path, json.loads(await request.read() or b"{}")
        self.asked.append((path, body))
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(self.delay_s)
            if self.slow is not None and self.slow in str(body):
                await self.go_on.wait()
            if self.dies_of is not None and self.dies_of in str(body) and request.transport is not None:
                request.transport.abort()
            return self._answer(path, body)
        finally:
            self.at_once -= 1

    def _answer(self, path: str, body: dict[str, Any]) -> web.Response:
        if self.refused is not None and self.refused in str(body):
            return web.json_response({"error": {"message": "the template refuses it"}}, status=400)
        if path in self.statuses:
            error = {"error": {"message": f"{path} says no", "type": "BadRequestError", "code": self.statuses[path]}}
            return web.json_response(error, status=self.statuses[path])
        if path in self.answers:
            return web.Response(body=self.answers[path], content_type="application/json")
        ids = self.tokens(body)
        if path == "/tokenize":
            ids = ids if self.tokenize is None else self.tokenize(body)
            return web.json_response({"count": len(ids), "max_model_len": 4096, "tokens": ids})
        if path.endswith("/render"):
            features = self.features if "image_url" in str(body) else None
            rendered = {"request_id": "r", "token_ids": ids, "features": features, "sampling_params": {"max_tokens": 1}}
            return web.json_response([rendered] if "completions/render" in path and "chat" not in path else rendered)
        if path == "/v1/responses":
            messages = (
                [{"message": "", "tokens": ids}] if self.tells_ids and body.get("enable_response_messages") else None
            )
            return web.json_response({"id": "r", "usage": {"input_tokens": len(ids)}, "input_messages": messages})
        usage = {"prompt_tokens": len(ids), "completion_tokens": 1, "total_tokens": len(ids) + 1}
        completion: dict[str, Any] = {"id": "c", "choices": [{"index": 0}], "usage": usage}
        if self.tells_ids and body.get("return_token_ids"):
            (completion if "messages" in body else completion["choices"][0])["prompt_token_ids"] = ids
        return web.json_response(completion)
