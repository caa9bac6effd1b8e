# SPDX-License-Identifier: Apache-2.0
"""The part of vLLM's OpenAI server that a router and its tests use, and the path that sets faults.

The server takes text prompts, token ids and chats, streamed or not. A client that disconnects aborts its request. A
request that the simulator cannot serve is refused with vLLM's error shape.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import msgspec
from aiohttp import web

from kvrouter.simulator.cache import tokenizer
from kvrouter.simulator.cache.job import Job
from kvrouter.simulator.engine.realtime import Engine, EngineStopped
from kvrouter.simulator.engine.replica import RequestRefused
from kvrouter.simulator.http import handover
from kvrouter.simulator.http.bodies import (
    DEFAULT_ANSWER_TOKENS,
    DEFAULT_MAX_TOKENS,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
    prompts_of,
)
from kvrouter.simulator.http.engine_flags import EngineFlags
from kvrouter.simulator.http.event_stream import EventStream
from kvrouter.simulator.http.faults import Faults
from kvrouter.simulator.http.generate_api import GenerateBody, SGLangAnswer, SGLangBody, TokensAnswer
from kvrouter.simulator.http.messages import CountBody, MessageAnswer, MessagesBody, chat_of, message_error
from kvrouter.simulator.http.metrics_page import metrics_page
from kvrouter.simulator.http.peer_source import Lenders, wish_of
from kvrouter.simulator.http.promptless_api import PromptlessApi
from kvrouter.simulator.http.refusals import Refused, Unreadable
from kvrouter.simulator.http.replies import Answer, Finish, error, json_response, usage
from kvrouter.simulator.http.responses import ResponsesApi, StoredResponse
from kvrouter.simulator.http.run import Run

# A prompt as long as a whole context is a megabyte as token ids in JSON; vLLM itself sets no bound.
MAX_BODY_BYTES = 64 * 2**20

JSON_TYPE = "application/json"
VERSION = "0.32.0+kvrouter-sim"

MESSAGES = "/v1/messages"

AnyAnswer: TypeAlias = Answer | MessageAnswer | TokensAnswer | SGLangAnswer | StoredResponse
Body = TypeVar("Body", bound=msgspec.Struct)


class EngineLife:
    """The parts of a replica that live from one restart to the next."""

    def __init__(self, engine: Engine, stream: EventStream, started_s: float) -> None:
        self.engine = engine
        self.stream = stream
        self.started_s = started_s
        # The stored responses by id, the oldest first.
        self.responses: dict[str, StoredResponse] = {}


class Api:
    """The HTTP side of one replica. `life` is replaced when the replica restarts."""

    def __init__(
        self,
        life: EngineLife,
        *,
        model: str,
        flags: EngineFlags,
        # Host and port of HTTP.
        address: tuple[str, int],
        # The endpoints of events and replay.
        streams: tuple[str, str | None],
        # Wall clock, in seconds.
        clock: Callable[[], float],
        # Restarts the replica after this many seconds.
        restart: Callable[[float], Awaitable[None]],
        # The data-parallel rank among its peers.
        dp_rank: int = 0,
        # Whether /kv_event_sources exists.
        event_sources: bool = True,
        # The replicas from which requests may fetch, by port.
        lenders: Lenders = MappingProxyType({}),
    ) -> None:
        self.life = life
        self._lenders = lenders
        self.down = False
        self.model = model
        self._host, self._port = address
        self._events, self._replay = streams
        self.clock = clock
        self._restart = restart
        self._dp_rank = dp_rank
        self._event_sources = event_sources
        self._flags = flags
        self._numbers = itertools.count(1)
        self._fail = 0
        self._fail_status = 500
        self._unhealthy = False
        self._api_keys: tuple[str, ...] = ()

    def app(self) -> web.Application:
        """Return the application with its routes."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post(MESSAGES, self._messages)
        app.router.add_post(f"{MESSAGES}/count_tokens", self._count_tokens)
        app.router.add_post("/inference/v1/generate", self._generate_tokens)
        app.router.add_post("/generate", self._generate_sglang)
        PromptlessApi(self).route(app)
        ResponsesApi(self).route(app)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_post("/reset_prefix_cache", self._reset_prefix_cache)
        app.router.add_post("/sim/faults", self._set_faults)
        app.router.add_get("/v1/models", self._models)
        if self._event_sources:
            app.router.add_get("/kv_event_sources", self._kv_event_sources)
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics)
        return app

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if self.down and request.path != "/sim/faults":
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=503)
        wanted = [f"Bearer {key}" for key in self._api_keys]
        if wanted and request.path.startswith("/v1") and request.headers.get("authorization") not in wanted:
            return json_response({"error": "Unauthorized"}, 401)
        try:
            return await handler(request)
        except Refused as refusal:
            body = error(refusal.status, str(refusal))
            if request.path.startswith(MESSAGES) and not isinstance(refusal, Unreadable):
                body = message_error(body["error"]["type"], str(refusal))
            return json_response(body, refusal.status)
        except web.HTTPRequestEntityTooLarge:
            return json_response(error(413, f"the body is larger than {MAX_BODY_BYTES} bytes"), 413)

    async def read(self, request: web.Request, kind: type[Body]) -> Body:
        """Return the decoded body. Raises Refused."""
        if request.headers.get("content-type", "").lower().partition(";")[0] != JSON_TYPE:
            raise Unreadable(400, f"Unsupported Media Type: Only '{JSON_TYPE}' is allowed")
        return await self._decoded(request, kind)

    async def _decoded(self, request: web.Request, kind: type[Body]) -> Body:
        try:
            # Accept "5" for a number, as pydantic does.
            body = msgspec.json.decode(await request.read(), type=kind, strict=False)
        except (msgspec.DecodeError, UnicodeDecodeError) as problem:
            raise Unreadable(400, str(problem)) from None
        self.check_model(getattr(body, "model", None))
        return body

    def check_model(self, model: object) -> None:
        """Raise Refused if `model` names another model."""
        if model not in (None, "", self.model):
            raise Refused(404, f"The model `{model}` does not exist; this replica serves `{self.model}`.")

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await self.read(request, CompletionBody)
        try:
            prompts = prompts_of(body)
        except ValueError as problem:
            raise Refused(400, str(problem)) from None
        ids = [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        answer = self._answer(request, body, chat=False)
        return await self.generate(request, body, ids, body.max_tokens or DEFAULT_MAX_TOKENS, "length", answer)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await self.read(request, ChatBody)
        ids = _chat_ids(body.messages, body.tools, body.add_generation_prompt, body.continue_final_message)
        max_tokens = body.max_completion_tokens or body.max_tokens
        finish: Finish = "length" if max_tokens else "stop"
        answer = self._answer(request, body, chat=True)
        return await self.generate(request, body, [ids], max_tokens or DEFAULT_ANSWER_TOKENS, finish, answer)

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        body = await self.read(request, MessagesBody)
        answer = MessageAnswer(request_id=self.request_id(request), model=self.model)
        return await self.generate(request, body, [_message_ids(body)], body.max_tokens, "length", answer)

    async def _generate_tokens(self, request: web.Request) -> web.StreamResponse:
        body = await self.read(request, GenerateBody)
        answer = TokensAnswer(request_id=self.request_id(request), model=self.model, created=int(self.clock()))
        # vLLM lets an answer without a limit fill the context.
        max_tokens = body.sampling_params.max_tokens or DEFAULT_ANSWER_TOKENS
        return await self.generate(request, body, [body.token_ids], max_tokens, "length", answer)

    async def _generate_sglang(self, request: web.Request) -> web.StreamResponse:
        body = await self.read(request, SGLangBody)
        max_tokens = (body.sampling_params and body.sampling_params.max_new_tokens) or DEFAULT_ANSWER_TOKENS
        answer = SGLangAnswer(request_id=self.request_id(request))
        return await self.generate(request, body, [body.ids], max_tokens, "length", answer)

    async def _count_tokens(self, request: web.Request) -> web.Response:
        count = len(_message_ids(await self.read(request, CountBody)))
        return json_response({"input_tokens": count, "context_management": {"original_input_tokens": count}})

    def request_id(self, request: web.Request) -> str:
        """Return the client's request id, or a new number."""
        return request.headers.get("x-request-id") or str(next(self._numbers))

    def _answer(self, request: web.Request, body: GenerationBody, *, chat: bool) -> Answer:
        return Answer(
            request_id=self.request_id(request),
            model=self.model,
            created=int(self.clock()),
            chat=chat,
            with_token_ids=bool(body.return_token_ids),
        )

    def fail_once(self) -> None:
        """Raise Refused while the replica is set to fail."""
        if self._fail:
            self._fail -= 1
            raise Refused(self._fail_status, "this replica was set to fail")

    @contextlib.contextmanager
    def failures(self, request: web.Request) -> Iterator[None]:
        """Turn a refusal and the end of the engine into the error that the client sees."""
        try:
            yield
        except RequestRefused as refusal:
            raise Refused(400, str(refusal)) from None
        except EngineStopped as problem:
            # As when the engine's process dies: the client sees its connection end, without a status.
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError(str(problem)) from None

    async def generate(
        self,
        request: web.Request,
        body: GenerationBody | SGLangBody,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        finish: Finish,
        answer: AnyAnswer,
    ) -> web.StreamResponse:
        """Answer each prompt as often as `n` says, all at the same time, as vLLM does. Raises Refused."""
        self.fail_once()
        engine = self.life.engine
        limit = engine.replica.max_text_tokens
        if max_tokens > limit:
            raise Refused(400, f"max_tokens={max_tokens} cannot be greater than max_model_len={limit}")
        runs: list[Run] = []
        with self.failures(request):
            async with contextlib.AsyncExitStack() as stack:
                for ids in prompts:
                    # Like vLLM, shorten the answer to the context instead of refusing the request.
                    most_tokens = min(max_tokens, limit - len(ids)) if len(ids) < limit else max_tokens
                    for _ in range(body.n or 1):
                        text = engine.replica.text(ids, body.cache_salt)
                        running = engine.generate(
                            text,
                            most_tokens,
                            handover.part(body.kv_transfer_params),
                            wish_of(body.kv_transfer_params, self._lenders),
                        )
                        runs.append(Run(*await stack.enter_async_context(running)))
                if body.stream:
                    return await self._stream(request, body, answer, runs, finish)
                for run in runs:
                    run.sampled = [token async for token in run.tokens]
                # The cached tokens of the last prompt, as in vLLM.
                counted = self.usage(runs, runs[-1].job, body)
                left = handover.given(
                    runs[0].job,
                    engine_id=f"{self._host}:{self._port}",
                    request_id=answer.id,
                    host=self._host,
                    port=self._port,
                )
                return web.Response(
                    body=answer.whole([run.sampled for run in runs], finish, counted, left),
                    content_type="application/json",
                )

    def usage(self, runs: Sequence[Run], cached_job: Job, body: GenerationBody | SGLangBody) -> dict[str, Any]:
        """Return the usage of a request, with the cached tokens of one job."""
        is_told = self._flags.prompt_tokens_details
        cached = handover.cached_tokens(cached_job, body.kv_transfer_params) if is_told else None
        prompt_tokens = sum(run.job.prompt_tokens for run in runs[:: body.n or 1])
        return usage(prompt_tokens, sum(len(run.sampled) for run in runs), cached)

    async def _stream(
        self,
        request: web.Request,
        body: GenerationBody | SGLangBody,
        answer: AnyAnswer,
        runs: list[Run],
        finish: Finish,
    ) -> web.StreamResponse:
        options = body.stream_options
        continuous = options is not None and options.continuous_usage_stats
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        first: Run | None = None
        async for index, token in _merged(runs):
            run = runs[index]
            run.sampled.append(token)
            if first is None:
                first = run
                # Not before: until the first token, an error can still be an error status.
                await response.prepare(request)
                opening = answer.opening(self.usage(runs, first.job, body))
                if opening is not None:
                    await response.write(opening)
            running = self.usage([run], run.job, body) if continuous else None
            ends = finish if len(run.sampled) == run.job.max_tokens else None
            await response.write(answer.piece(token, ends, running, index))
        assert first is not None
        with_usage = options is not None and bool(options.include_usage)
        # The cached tokens of the prompt whose first token came first, as in vLLM.
        counted = self.usage(runs, first.job, body)
        await response.write(answer.closing(finish, counted, with_usage=with_usage))
        await response.write_eof()
        return response

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await self.read(request, TokenizeBody)
        if body.messages is not None:
            ids = _chat_ids(body.messages, body.tools, body.add_generation_prompt, body.continue_final_message)
        elif body.prompt is not None:
            ids = tokenizer.encode(body.prompt)
        else:
            raise Refused(400, "there is nothing to tokenize; send `prompt` or `messages`")
        limit = self.life.engine.replica.max_text_tokens
        strings = tokenizer.token_strings(ids) if body.return_token_strs else None
        return json_response({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strings})

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = await self.read(request, DetokenizeBody)
        return json_response({"prompt": tokenizer.decode(body.tokens)})

    async def _reset_prefix_cache(self, _: web.Request) -> web.Response:
        return json_response({"success": self.life.engine.replica.reset_prefix_cache()})

    async def _models(self, _: web.Request) -> web.Response:
        card = {
            "id": self.model,
            "object": "model",
            "created": int(self.life.started_s),
            "owned_by": "kvrouter-simulator",
            "root": self.model,
            "parent": None,
            "max_model_len": self.life.engine.replica.max_text_tokens,
        }
        return json_response({"object": "list", "data": [card]})

    async def _kv_event_sources(self, _: web.Request) -> web.Response:
        # vLLM 0.32.0 config/kv_events.py, with its defaults; one entry for each data-parallel rank.
        config = {
            "enable_kv_cache_events": self._flags.kv_events,
            "publisher": "zmq",
            "endpoint": self._events,
            "replay_endpoint": self._replay,
            "buffer_steps": 10_000,
            "hwm": 100_000,
            "max_queue_size": 100_000,
            "topic": "",
        }
        return json_response({str(self._dp_rank): config})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self._unhealthy else 200)

    async def _version(self, _: web.Request) -> web.Response:
        rust = {"rust_frontend_version": VERSION} if self._flags.rust_front_end else {}
        return json_response({"version": VERSION, **rust})

    async def _metrics(self, _: web.Request) -> web.Response:
        life, caches = self.life, self._flags.prefix_caching
        page = metrics_page(life.engine, self.model, life.started_s, self._dp_rank, prefix_caching=caches)
        return web.Response(body=page, content_type="text/plain", charset="utf-8")

    async def _set_faults(self, request: web.Request) -> web.Response:
        # This path is not vLLM's, so it accepts a curl without a content type.
        faults = await self._decoded(request, Faults)
        await self.apply(faults)
        return json_response(faults)

    async def apply(self, faults: Faults) -> None:
        """Let the faults take effect."""
        life = self.life
        if faults.drop_events is not None:
            life.stream.drop(faults.drop_events)
        if faults.lose_events is not None:
            life.stream.lose(faults.lose_events)
        if faults.stall_s is not None:
            life.engine.stall(faults.stall_s)
        if faults.slow is not None:
            life.engine.slowdown = faults.slow
        if faults.fail is not None:
            self._fail = faults.fail
        if faults.fail_status is not None:
            self._fail_status = faults.fail_status
        if faults.unhealthy is not None:
            self._unhealthy = faults.unhealthy
        if faults.api_keys is not None:
            self._api_keys = faults.api_keys
        if faults.restart:
            await self._restart(faults.down_s or 0.0)


async def _merged(runs: Sequence[Run]) -> AsyncIterator[tuple[int, int]]:
    """Yield each token of all runs as it comes, with the place of its run."""
    if len(runs) == 1:
        async for token in runs[0].tokens:
            yield 0, token
        return
    awaited = {asyncio.ensure_future(anext(run.tokens)): index for index, run in enumerate(runs)}
    try:
        while awaited:
            done, _ = await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            # In the order of the runs, because `done` is a set.
            for future in sorted(done, key=awaited.__getitem__):
                index = awaited.pop(future)
                with contextlib.suppress(StopAsyncIteration):
                    token = await future
                    awaited[asyncio.ensure_future(anext(runs[index].tokens))] = index
                    yield index, token
    finally:
        for future in awaited:
            future.cancel()
        await asyncio.gather(*awaited, return_exceptions=True)


def _chat_ids(messages: Any, tools: Any, add_generation_prompt: bool, continue_final_message: bool) -> list[int]:
    try:
        text = tokenizer.render_chat(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
    except tokenizer.NotATextError as problem:
        raise Refused(400, str(problem)) from None
    return tokenizer.encode(text)


def _message_ids(body: CountBody | MessagesBody) -> list[int]:
    messages, tools = chat_of(body)
    return _chat_ids(messages, tools, add_generation_prompt=True, continue_final_message=False)
