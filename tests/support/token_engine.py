# SPDX-License-Identifier: Apache-2.0
"""What an engine answers to those who ask for tokens: a real HTTP server with vLLM's shapes that can be slow, wrong,
without some endpoints, or another from one moment to the next. A token is a byte of the text, after a first one that
stands for the endpoint."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from aiohttp import web

TOOLS_TOKEN, SYSTEM_TOKEN = 900, 901


def tokens_of(body: dict[str, Any], *, drop_tools: bool = False) -> list[int]:
    """What this engine makes of a request: one way for chats, another for texts."""
    if "prompt" in body:
        return [1, *str(body["prompt"]).encode()]
    found = [SYSTEM_TOKEN]
    if body.get("tools") and not (drop_tools and body.get("tool_choice") == "none"):
        found += [TOOLS_TOKEN, *json.dumps(body["tools"]).encode()]
    for message in body["messages"]:
        content = message["content"]
        if isinstance(content, list):
            content = "".join(part.get("text", "") if isinstance(part, dict) else part for part in content)
        found += [*message["role"].encode(), 0, *(content or "").encode(), 2]
    return found if body.get("continue_final_message") else [*found, 3]


class TokenEngine:
    """Listens while it is entered. Set what it does between requests."""

    def __init__(self) -> None:
        # Statuses in place of answers, by path.
        self.statuses: dict[str, int] = {}
        # Whole answers in place of those with tokens, by path.
        self.answers: dict[str, bytes] = {}
        self.delay_s = 0.0
        # Requests with this in them wait for `go_on`.
        self.slow: str | None = None
        self.go_on = asyncio.Event()
        # Requests with this in them end their connection.
        self.dies_of: str | None = None
        # What render reports of images and the like, of requests that have them.
        self.features: dict[str, Any] | None = None
        self.tokens: Callable[[dict[str, Any]], list[int]] = tokens_of
        # What /tokenize makes, where it is not what the engine makes.
        self.tokenize: Callable[[dict[str, Any]], list[int]] | None = None
        self.tells_ids = True
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[dict[str, str]] = []
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
        usage = {"prompt_tokens": len(ids), "completion_tokens": 1, "total_tokens": len(ids) + 1}
        found: dict[str, Any] = {"id": "c", "choices": [{"index": 0}], "usage": usage}
        if self.tells_ids and body.get("return_token_ids"):
            (found if "messages" in body else found["choices"][0])["prompt_token_ids"] = ids
        return web.json_response(found)
