# SPDX-License-Identifier: Apache-2.0
"""`/v1/responses` as vLLM 0.33.0 serves it with VLLM_ENABLE_RESPONSES_API_STORE=1: create, retrieve and cancel.

`DELETE` and `input_items` have OpenAI's form, because vLLM serves neither. A response and its conversation are kept by
the process that made them and are gone with it. Source: vLLM 0.33.0 entrypoints/openai/responses/serving.py.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Protocol

import msgspec
from aiohttp import web

from kvrouter.simulator.cache import tokenizer
from kvrouter.simulator.cache.job import Handover, Job
from kvrouter.simulator.cache.text import Text
from kvrouter.simulator.engine.realtime import EngineStopped
from kvrouter.simulator.engine.replica import RequestRefused
from kvrouter.simulator.http.bodies import DEFAULT_ANSWER_TOKENS, AtLeastOne, GenerationBody
from kvrouter.simulator.http.refusals import Refused
from kvrouter.simulator.http.replica_api import ReplicaApi, ReplicaLife
from kvrouter.simulator.http.replies import Finish, json_response
from kvrouter.simulator.http.run import Run

RESPONSES = "/v1/responses"
# vLLM keeps all responses of its process; a replica that runs for days must not grow without a bound.
MAX_STORED = 10_000
ENDED = ("completed", "incomplete", "cancelled", "failed")

Item = dict[str, Any]


class ResponsesBody(GenerationBody, kw_only=True):
    """Body of /v1/responses."""

    input: str | Annotated[list[Item], msgspec.Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: AtLeastOne | None = None
    previous_response_id: str | None = None
    store: bool | None = True
    background: bool | None = False
    tools: list[Item] | None = None

    def __post_init__(self) -> None:
        GenerationBody.__post_init__(self)
        if self.background and not self.store:
            raise ValueError("background can only be used when `store` is true")

    @property
    def items(self) -> list[Item]:
        """The input as a list of items."""
        return [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input


class StoredResponse:
    """One response from its creation on: its present form, its conversation, and the events of its stream."""

    def __init__(self, body: ResponsesBody, model: str, created: int, former: Sequence[Item]) -> None:
        self.items = body.items
        # The conversation without instructions, which hold for one turn alone.
        self.messages = [*former, *(_message(item) for item in self.items)]
        self.events: list[bytes] = []
        # Replaced whenever something is added; set then.
        self.news = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.form: dict[str, Any] = {
            "id": body.request_id or f"resp_{secrets.token_hex(16)}",
            "created_at": created,
            "instructions": body.instructions,
            "metadata": None,
            "model": model,
            "object": "response",
            "output": [],
            "parallel_tool_calls": True,
            "temperature": body.temperature,
            "tool_choice": "auto",
            "tools": body.tools or [],
            "top_p": body.top_p,
            "background": bool(body.background),
            "max_output_tokens": body.max_output_tokens,
            "previous_response_id": body.previous_response_id,
            "status": "queued" if body.background else "in_progress",
            "usage": None,
        }
        self._item_id = f"msg_{secrets.token_hex(8)}"
        self._text = ""

    @property
    def id(self) -> str:
        """The id of the response."""
        return str(self.form["id"])

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will be added."""
        return self.form["status"] in ENDED

    # The methods of `replies.Answer`, with which `Api` answers without background.

    def opening(self, usage: dict[str, Any]) -> bytes:
        """Return the events before the first token."""
        self.form["status"] = "in_progress"
        item = self._item("in_progress")
        part = {"type": "output_text", "text": "", "annotations": []}
        return b"".join(
            (
                self._event("response.created", response=self.form),
                self._event("response.in_progress", response=self.form),
                self._event("response.output_item.added", output_index=0, item=item | {"content": []}),
                self._event("response.content_part.added", **self._place(), part=part),
            )
        )

    def piece(self, token: int, finish: Finish | None, usage: dict[str, Any] | None, index: int) -> bytes:
        """Return one token's event of the only answer, whose index is 0."""
        text = tokenizer.decode((token,))
        self._text += text
        return self._event("response.output_text.delta", **self._place(), delta=text, logprobs=[])

    def closing(self, finish: Finish, usage: dict[str, Any], *, with_usage: bool) -> bytes:
        """Return the events after the last token, which always include the usage."""
        self._end(finish, usage)
        part = {"type": "output_text", "text": self._text, "annotations": []}
        return b"".join(
            (
                self._event("response.output_text.done", **self._place(), text=self._text, logprobs=[]),
                self._event("response.content_part.done", **self._place(), part=part),
                self._event("response.output_item.done", output_index=0, item=self.form["output"][0]),
                self._event(f"response.{self.form['status']}", response=self.form),
            )
        )

    def whole(
        self, answers: Sequence[Sequence[int]], finish: Finish, usage: dict[str, Any], transfer: dict[str, Any] | None
    ) -> bytes:
        """Return the answer as one body; there is only one answer."""
        (tokens,) = answers
        self._text = tokenizer.decode(tokens)
        self._end(finish, usage)
        return msgspec.json.encode(self.form)

    def stop(self, status: str) -> None:
        """End the response early, with this status."""
        self.form["status"] = status
        self._wake()

    def _end(self, finish: Finish, usage: dict[str, Any]) -> None:
        """Complete the form and the conversation."""
        cached = usage["prompt_tokens_details"] or {"cached_tokens": 0}
        self.form |= {
            "status": "incomplete" if finish == "length" else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if finish == "length" else None,
            "output": [self._item("completed")],
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": cached,
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }
        self.messages.append({"role": "assistant", "content": self._text})

    def _item(self, status: str) -> Item:
        part = {"type": "output_text", "text": self._text, "annotations": []}
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": [part]}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = msgspec.json.encode({**fields, "sequence_number": len(self.events), "type": kind})
        event = b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"
        self.events.append(event)
        self._wake()
        return event

    def _wake(self) -> None:
        news, self.news = self.news, asyncio.Event()
        news.set()


class ResponsesLife(ReplicaLife, Protocol):
    """The part of a life of the replica that these paths use."""

    # The stored responses by id, the oldest first.
    responses: dict[str, StoredResponse]


class ResponsesReplica(ReplicaApi, Protocol):
    """The part of `Api` that these paths use; its methods are described there."""

    @property
    def life(self) -> ResponsesLife:
        """Present life of the replica."""
        ...

    def usage(self, runs: Sequence[Run], cached_job: Job, body: GenerationBody) -> dict[str, Any]:
        """Return the usage of a request, with the cached tokens of one job."""
        ...

    async def generate(
        self,
        request: web.Request,
        body: GenerationBody,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        finish: Finish,
        answer: StoredResponse,
    ) -> web.StreamResponse:
        """Generate the answer to a request that the client waits for. Raises Refused."""
        ...


class ResponsesApi:
    """The paths below /v1/responses. The responses belong to a life of the engine, and are gone with it."""

    def __init__(self, api: ResponsesReplica) -> None:
        self._api = api

    def route(self, app: web.Application) -> None:
        """Add the paths."""
        app.router.add_post(RESPONSES, self._create)
        app.router.add_get(f"{RESPONSES}/{{id}}", self._retrieve)
        app.router.add_delete(f"{RESPONSES}/{{id}}", self._delete)
        app.router.add_post(f"{RESPONSES}/{{id}}/cancel", self._cancel)
        app.router.add_get(f"{RESPONSES}/{{id}}/input_items", self._input_items)
        app.on_shutdown.append(self._end_tasks)

    async def _create(self, request: web.Request) -> web.StreamResponse:
        api = self._api
        body = await api.read(request, ResponsesBody)
        former: list[Item] = []
        if body.previous_response_id is not None:
            previous = api.life.responses.get(body.previous_response_id)
            if previous is None:
                return _not_found(body.previous_response_id)
            former = previous.messages
        stored = StoredResponse(body, api.model, int(api.clock()), former)
        instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
        ids = _chat_ids([*instructions, *stored.messages], body.tools)
        finish: Finish = "length" if body.max_output_tokens else "stop"
        max_tokens = body.max_output_tokens or DEFAULT_ANSWER_TOKENS
        if body.store:
            self._keep(stored)
        if not body.background:
            return await api.generate(request, body, [ids], max_tokens, finish, stored)
        text = api.life.engine.replica.text(ids, body.cache_salt)
        form = msgspec.json.encode(stored.form)
        stored.task = asyncio.create_task(self._run(stored, body, text, max_tokens, finish))
        if body.stream:
            return await self._stream(request, stored, 0)
        return web.Response(body=form, content_type="application/json")

    def _keep(self, stored: StoredResponse) -> None:
        responses = self._api.life.responses
        responses[stored.id] = stored
        if len(responses) > MAX_STORED:
            del responses[next(iter(responses))]

    async def _run(
        self, stored: StoredResponse, body: ResponsesBody, text: Text, max_tokens: int, finish: Finish
    ) -> None:
        """Generate a response in the background."""
        api = self._api
        try:
            async with api.life.engine.generate(text, max_tokens, Handover.NONE) as (job, tokens):
                run = Run(job, tokens)
                async for token in tokens:
                    if not run.sampled:
                        stored.opening({})
                    run.sampled.append(token)
                    stored.piece(token, None, None, 0)
                stored.closing(finish, api.usage([run], job, body), with_usage=True)
        except (EngineStopped, RequestRefused):
            stored.stop("failed")
        except asyncio.CancelledError:
            stored.stop("cancelled")

    async def _stream(self, request: web.Request, stored: StoredResponse, position: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        while True:
            news = stored.news
            while position < len(stored.events):
                await response.write(stored.events[position])
                position += 1
            if stored.has_ended:
                break
            await news.wait()
        await response.write_eof()
        return response

    def _found(self, request: web.Request) -> StoredResponse | None:
        self._api.fail_once()
        return self._api.life.responses.get(request.match_info["id"])

    async def _retrieve(self, request: web.Request) -> web.StreamResponse:
        stored = self._found(request)
        if stored is None:
            return _not_found(request.match_info["id"])
        if request.query.get("stream", "").lower() in ("true", "1"):
            after = request.query.get("starting_after", "-1")
            if not after.lstrip("-").isdecimal():
                raise Refused(400, "starting_after must be a number")
            return await self._stream(request, stored, int(after) + 1)
        return json_response(stored.form)

    async def _cancel(self, request: web.Request) -> web.Response:
        stored = self._found(request)
        if stored is None:
            return _not_found(request.match_info["id"])
        if stored.has_ended or stored.task is None:
            return json_response(_error(400, "Cannot cancel a synchronous response.", "BadRequestError"), 400)
        stored.task.cancel()
        stored.stop("cancelled")
        return json_response(stored.form)

    async def _delete(self, request: web.Request) -> web.Response:
        stored = self._found(request)
        if stored is None:
            return _not_found(request.match_info["id"])
        del self._api.life.responses[stored.id]
        if stored.task is not None:
            stored.task.cancel()
        return json_response({"id": stored.id, "object": "response", "deleted": True})

    async def _input_items(self, request: web.Request) -> web.Response:
        stored = self._found(request)
        if stored is None:
            return _not_found(request.match_info["id"])
        items = [
            {"id": f"item_{number}", "type": "message", "status": "completed", **item}
            | {"content": [{"type": "input_text", "text": _message(item)["content"]}]}
            for number, item in enumerate(stored.items)
        ]
        ids = {"first_id": items[0]["id"], "last_id": items[-1]["id"]}
        return json_response({"object": "list", "data": items, "has_more": False, **ids})

    async def _end_tasks(self, _: web.Application) -> None:
        tasks = [stored.task for stored in self._api.life.responses.values() if stored.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _chat_ids(messages: list[Item], tools: list[Item] | None) -> list[int]:
    return tokenizer.encode(tokenizer.render_chat(messages, tools=tools))


def _message(item: Item) -> Item:
    """Return an item of the input as a message of a chat."""
    kind = item.get("type", "message")
    if kind == "function_call_output":
        return {"role": "tool", "content": str(item.get("output", ""))}
    if kind == "function_call":
        return {"role": "assistant", "content": f"{item.get('name')}({item.get('arguments')})"}
    content = item.get("content")
    if isinstance(content, list):
        # A part is input_text or output_text here, and text in a chat.
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return {"role": str(item.get("role", "user")), "content": content or ""}


def _not_found(response_id: str) -> web.Response:
    """Return vLLM's answer for a response that this process does not have."""
    message = f"Response with id '{response_id}' not found."
    return json_response(_error(404, message, "invalid_request_error"), 404)


def _error(status: int, message: str, kind: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": "response_id", "code": status}}
