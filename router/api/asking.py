# SPDX-License-Identifier: Apache-2.0
"""The hot endpoints: `/query`, `/query_by_hash`, `/select`. From the raw body to the reply, synchronous, no I/O; but for a
`/select` with text, whose tokens have to be found first.

They run outside FastAPI, whose parameters and pydantic cost three times the whole rest (215 against 65 us for 512
hashes).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrouter.router.api.bodies import (
    NULLS,
    BodyReader,
    QueryBody,
    QueryByHashBody,
    SelectBody,
    is_msgpack,
    model_of,
    worker_ids_of,
)
from kvrouter.router.api.ports import CorePort, TokensPort
from kvrouter.router.api.replies import (
    CandidateReply,
    QueryReply,
    SelectReply,
    TokensReply,
    overlap_of,
    query_reply,
)
from kvrouter.router.arrays import hash_array, token_array
from kvrouter.router.errors import BadQuestion
from kvrouter.router.metrics import Metrics
from kvrouter.router.model_names import Served
from kvrouter.router.question import Question
from kvrouter.router.tokens.asked import CHAT_PATH, TEXT_PATH


class Asking:
    """Turns bodies into questions to the core and its answers into replies.

    tokens: finds those of texts; None: texts are refused. clock: seconds, for `kvrouter_decide_seconds`, which covers the core
    alone."""

    def __init__(self, core: CorePort, tokens: TokensPort | None, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._core = core
        self._tokens = tokens
        self._observe = metrics.decide_seconds.observe
        self._clock = clock
        self._query_reader = BodyReader(QueryBody, arrays=False)
        self._by_hash_reader = BodyReader(QueryByHashBody, arrays=False)
        self._select_reader = BodyReader(SelectBody, arrays=False)

    def query(self, raw: bytes, content_type: str) -> QueryReply:
        body = self._query_reader.read(raw, content_type)
        tokens = token_array(body.token_ids, is_msgpack=is_msgpack(content_type))
        return self._ask(self._question(body, tokens, None, None))

    def query_by_hash(self, raw: bytes, content_type: str) -> QueryReply:
        body = self._by_hash_reader.read(raw, content_type)
        hashes = hash_array(body.block_hashes, is_msgpack=is_msgpack(content_type))
        return self._ask(self._question(body, None, hashes, body.num_tokens))

    def select(self, raw: bytes, content_type: str) -> SelectReply | Coroutine[Any, Any, SelectReply]:
        body = self._select_reader.read(raw, content_type)
        packed = is_msgpack(content_type)
        tokens = hashes = None
        if bytes(body.token_ids) not in NULLS:
            tokens = token_array(body.token_ids, is_msgpack=packed)
        if bytes(body.block_hashes) not in NULLS:
            hashes = hash_array(body.block_hashes, is_msgpack=packed)
        has_text = bytes(body.prompt) not in NULLS or bytes(body.messages) not in NULLS
        given = (tokens is not None) + (hashes is not None) + has_text
        if given != 1:
            raise BadQuestion("give one of token_ids, block_hashes, prompt and messages: that is the prompt to place")
        if has_text:
            return self._select_text(body, raw, packed)
        return self._choose(self._question(body, tokens, hashes, body.num_tokens, body.exclude_workers, body.dp_rank))

    async def _select_text(self, body: Any, raw: bytes, packed: bool) -> SelectReply:
        if self._tokens is None:
            raise BadQuestion(
                "this router does not tokenize prompt or messages; send token_ids or block_hashes "
                "(an engine's /tokenize gives the ids)",
                code="tokens_required",
            )
        served = self._served(body)
        if packed:
            try:
                raw = msgspec.json.encode(msgspec.msgpack.decode(raw))
            except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
                raise BadQuestion(f"the body has what JSON has no form for: {error}") from None
        path = TEXT_PATH if bytes(body.messages) in NULLS else CHAT_PATH
        prompt = await self._tokens.prompt(path, served.model, raw)
        if prompt.refused:
            raise BadQuestion(f"the prompt is refused: {prompt.problem}", code="prompt_refused")
        reply = self._choose(
            prompt.question(
                served.model,
                lora_name=body.lora_name or served.lora_name,
                cache_salt=body.cache_salt or None,
                worker_ids=_both(worker_ids_of(body.workers), served.worker_ids),
                exclude_worker_ids=worker_ids_of(body.exclude_workers) or frozenset(),
                dp_rank=body.dp_rank,
                explain=body.explain,
            )
        )
        known = 0 if prompt.token_ids is None else len(prompt.token_ids)
        reply.tokens = TokensReply(prompt.source, prompt.num_tokens, known, prompt.problem)
        return reply

    def _choose(self, question: Question) -> SelectReply:
        start = self._clock()
        choice = self._core.choose(question)
        self._observe(self._clock() - start)
        reply = SelectReply(
            selection_id=uuid.uuid4().hex,
            model=question.model,
            worker_id=choice.hit.worker.worker_id,
            dp_rank=choice.hit.worker.dp_rank,
            endpoint=choice.url,
            overlap=overlap_of(choice.hit),
            effective_prefill_tokens=question.num_tokens - choice.hit.disk,
            reason=choice.reason,
        )
        if question.explain:
            reply.candidates = [
                CandidateReply(
                    worker_id=candidate.hit.worker.worker_id,
                    dp_rank=candidate.hit.worker.dp_rank,
                    overlap=overlap_of(candidate.hit),
                    load=candidate.load,
                    cost=candidate.cost,
                    state=candidate.hit.state,
                    limited_by=candidate.hit.limited_by,
                    reason=candidate.hit.reason or msgspec.UNSET,
                    approximate=candidate.hit.approximate or msgspec.UNSET,
                )
                for candidate in choice.candidates
            ]
        return reply

    def _ask(self, question: Question) -> QueryReply:
        start = self._clock()
        hits = self._core.ask(question)
        self._observe(self._clock() - start)
        return query_reply(hits, question.explain)

    def _question(
        self,
        body: Any,
        tokens: NDArray[np.int64] | None,
        hashes: NDArray[np.uint64] | None,
        num_tokens: int | None,
        exclude_workers: list[str | int] | None = None,
        dp_rank: int | None = None,
    ) -> Question:
        served = self._served(body)
        model = served.model
        if tokens is not None:
            if not len(tokens):
                raise BadQuestion("token_ids is empty: send the ids of the whole prompt")
            num_tokens = len(tokens)
        elif num_tokens is None:
            # A prompt always has a token after its last reusable block: the engine must compute one.
            num_tokens = (0 if hashes is None else len(hashes)) * self._core.hash_block_size(model) + 1
        return Question(
            model=model,
            num_tokens=num_tokens,
            token_ids=tokens,
            block_hashes=hashes,
            # The engines read an empty name and an empty salt as none.
            lora_name=body.lora_name or served.lora_name,
            cache_salt=body.cache_salt or None,
            worker_ids=_both(worker_ids_of(body.workers), served.worker_ids),
            exclude_worker_ids=worker_ids_of(exclude_workers) or frozenset(),
            dp_rank=dp_rank,
            explain=body.explain,
        )

    def _served(self, body: Any) -> Served:
        model = model_of(body)
        if not model:
            raise BadQuestion("model is missing: name the model that the workers were registered with")
        return self._core.resolve(model)


def _both(some: frozenset[str] | None, others: frozenset[str] | None) -> frozenset[str] | None:
    """What is in both; None stands for all."""
    if others is None:
        return some
    return others if some is None else some & others
