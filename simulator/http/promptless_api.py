# SPDX-License-Identifier: Apache-2.0
"""The paths whose prompts a router does not know: scores, rerank, pooling, classes and audio."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import msgspec
from aiohttp import web

from kvrouter.simulator.cache import tokenizer
from kvrouter.simulator.http.refusals import Refused
from kvrouter.simulator.http.replica_api import ReplicaApi
from kvrouter.simulator.http.replies import DONE, json_response
from kvrouter.simulator.http.scores import (
    PoolingBody,
    RerankBody,
    ScoreBody,
    SpeechBody,
    pairs,
    pooling_reply,
    rerank_reply,
    score_reply,
)

# A recording counts as a prompt whose tokens follow from its length. 16 kHz WAV has 32 kB a second; Whisper makes 50
# tokens of a second.
AUDIO_BYTES_PER_SECOND = 32_000
AUDIO_BYTES_PER_TOKEN = AUDIO_BYTES_PER_SECOND // 50
AUDIO_ANSWER_TOKENS = 8
# A WAV file without a sample.
SILENCE = bytes.fromhex("524946462400000057415645666d74201000000001000100803e0000007d0000020010006461746100000000")


class PromptlessReplica(ReplicaApi, Protocol):
    """The part of `Api` that these paths use."""

    def check_model(self, model: object) -> None:
        """Raise Refused if `model` names another model."""
        ...

    def request_id(self, request: web.Request) -> str:
        """Return the client's request id, or a new number."""
        ...

    def failures(self, request: web.Request) -> AbstractContextManager[None]:
        """Turn a refusal and the end of the engine into the error that the client sees."""
        ...


class PromptlessApi:
    """The handlers of these paths for one replica."""

    def __init__(self, api: PromptlessReplica) -> None:
        self._api = api

    def route(self, app: web.Application) -> None:
        """Add the routes."""
        for path in ("/score", "/v1/score"):
            app.router.add_post(path, self._score)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            app.router.add_post(path, self._rerank)
        for path in ("/pooling", "/classify"):
            app.router.add_post(path, self._pool)
        for path in ("/v1/audio/transcriptions", "/v1/audio/translations"):
            app.router.add_post(path, self._audio)
        app.router.add_post("/v1/audio/speech", self._speech)

    async def _score(self, request: web.Request) -> web.Response:
        api = self._api
        body = await api.read(request, ScoreBody)
        try:
            scored = pairs(body.text_1, body.text_2)
        except ValueError as problem:
            raise Refused(400, str(problem)) from None
        tokens = await self._compute_pairs(request, scored)
        return json_response(score_reply(api.request_id(request), api.model, int(api.clock()), scored, tokens))

    async def _rerank(self, request: web.Request) -> web.Response:
        api = self._api
        body = await api.read(request, RerankBody)
        tokens = await self._compute_pairs(request, [(body.query, text) for text in body.documents])
        return json_response(rerank_reply(api.request_id(request), api.model, body, tokens))

    async def _pool(self, request: web.Request) -> web.Response:
        api = self._api
        body = await api.read(request, PoolingBody)
        tokens = await self._compute_texts(request, [body.input] if isinstance(body.input, str) else body.input)
        classifies = request.path == "/classify"
        return json_response(pooling_reply(api.request_id(request), api.model, int(api.clock()), tokens, classifies))

    async def _speech(self, request: web.Request) -> web.Response:
        # Not a path of vLLM itself; vLLM-Omni has it.
        body = await self._api.read(request, SpeechBody)
        await self._compute_texts(request, [body.input])
        return web.Response(body=SILENCE, content_type="audio/wav")

    async def _audio(self, request: web.Request) -> web.StreamResponse:
        api = self._api
        try:
            form = await request.post()
        except ValueError as problem:
            raise Refused(400, str(problem)) from None
        api.check_model(form.get("model"))
        file = form.get("file")
        if not isinstance(file, web.FileField):
            raise Refused(400, "the form has no file")
        api.fail_once()
        sound = file.file.read()
        tokens = await self._computed(request, list(sound[::AUDIO_BYTES_PER_TOKEN]) or [0], AUDIO_ANSWER_TOKENS)
        text = tokenizer.decode(tokens)
        if str(form.get("stream", "")).lower() in ("true", "1"):
            response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
            await response.prepare(request)
            await response.write(_transcription_events(api.request_id(request), api.model, int(api.clock()), tokens))
            await response.write_eof()
            return response
        if form.get("response_format") == "text":
            return web.json_response(text)
        translates = request.path.endswith("translations")
        return json_response({"text": text} if translates else _transcription(text, len(sound)))

    async def _compute_pairs(self, request: web.Request, scored: list[tuple[str, str]]) -> int:
        """Compute each pair, and return the number of prompt tokens of all."""
        return sum(await self._compute_texts(request, [f"{first}\n{second}" for first, second in scored]))

    async def _compute_texts(self, request: web.Request, texts: list[str]) -> list[int]:
        """Compute each text, and return the number of prompt tokens of each."""
        self._api.fail_once()
        tokens = []
        for text in texts:
            ids = tokenizer.encode(text)
            await self._computed(request, ids, 1)
            tokens.append(len(ids))
        return tokens

    async def _computed(self, request: web.Request, ids: list[int], max_tokens: int) -> list[int]:
        """Return the sampled tokens."""
        engine = self._api.life.engine
        with self._api.failures(request):
            async with engine.generate(engine.replica.text(ids, None), max_tokens) as (_, tokens):
                return [token async for token in tokens]
        raise AssertionError("not reached")


def _transcription(text: str, size_bytes: int) -> dict[str, Any]:
    """Return a whole transcription in the shape of vLLM 0.32.0."""
    return {"text": text, "usage": {"type": "duration", "seconds": -(-size_bytes // AUDIO_BYTES_PER_SECOND)}}


def _transcription_events(request_id: str, model: str, created: int, tokens: Sequence[int]) -> bytes:
    """Return a transcription as a stream of events in the shape of vLLM 0.32.0, one for each token."""
    head = {"id": f"trsc-{request_id}", "object": "transcription.chunk", "created": created, "model": model}
    events = []
    for number, token in enumerate(tokens, 1):
        finish = "stop" if number == len(tokens) else None
        choice = {"delta": {"content": tokenizer.decode((token,))}, "finish_reason": finish, "stop_reason": None}
        events.append(b"data: " + msgspec.json.encode(head | {"choices": [choice]}) + b"\n\n")
    return b"".join([*events, DONE])
