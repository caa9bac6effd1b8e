# SPDX-License-Identifier: Apache-2.0
"""The hot endpoints: `/query`, `/query_by_hash`, `/select`. From the raw body to the reply, synchronous, no I/O.

They run outside FastAPI, whose parameters and pydantic cost three times the whole rest (215 against 65 us for 512
hashes).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable

import msgspec

from kvrouter.router.api.arrays import hash_array, token_array
from kvrouter.router.api.bodies import (
    NULLS,
    BodyReader,
    QueryBody,
    QueryByHashBody,
    SelectBody,
    model_of,
    worker_ids_of,
)
from kvrouter.router.api.ports import CorePort
from kvrouter.router.api.replies import CandidateReply, QueryReply, SelectReply, overlap_of, query_reply
from kvrouter.router.errors import BadQuestion
from kvrouter.router.metrics import Metrics
from kvrouter.router.question import Question


class Asking:
    """Turns bodies into questions to the core and its answers into replies.

    clock: seconds, for `kvrouter_decide_seconds`, which covers the core alone."""

    def __init__(self, core: CorePort, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._core = core
        self._observe = metrics.decide_seconds.observe
        self._clock = clock
        self._query_reader = BodyReader(QueryBody)
        self._by_hash_reader = BodyReader(QueryByHashBody)
        self._select_reader = BodyReader(SelectBody)

    def query(self, raw: bytes, content_type: str) -> QueryReply:
        body: QueryBody = self._query_reader.read(raw, content_type)
        return self._ask(self._question(body, body.token_ids, None, None))

    def query_by_hash(self, raw: bytes, content_type: str) -> QueryReply:
        body: QueryByHashBody = self._by_hash_reader.read(raw, content_type)
        return self._ask(self._question(body, None, body.block_hashes, body.num_tokens))

    def select(self, raw: bytes, content_type: str) -> SelectReply:
        body: SelectBody = self._select_reader.read(raw, content_type)
        has_text = bytes(body.prompt) not in NULLS or bytes(body.messages) not in NULLS
        given = (body.token_ids is not None) + (body.block_hashes is not None) + has_text
        if given != 1:
            raise BadQuestion("give one of token_ids, block_hashes, prompt and messages: that is the prompt to place")
        if has_text:
            raise BadQuestion(
                "this router does not tokenize prompt or messages; send token_ids or block_hashes "
                "(an engine's /tokenize gives the ids)",
                code="tokens_required",
            )
        question = self._question(body, body.token_ids, body.block_hashes, body.num_tokens, body.exclude_workers)
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
        body: QueryBody | QueryByHashBody | SelectBody,
        token_ids: list[int] | None,
        block_hashes: list[int | str] | None,
        num_tokens: int | None,
        exclude_workers: list[str | int] | None = None,
    ) -> Question:
        model = model_of(body)
        if not model:
            raise BadQuestion("model is missing: name the model that the workers were registered with")
        tokens = hashes = None
        if token_ids is not None:
            if not token_ids:
                raise BadQuestion("token_ids is empty: send the ids of the whole prompt")
            tokens = token_array(token_ids)
            num_tokens = len(token_ids)
        else:
            hashes = hash_array(block_hashes or [])
            if num_tokens is None:
                # A prompt always has a token after its last reusable block: the engine must compute one.
                num_tokens = len(hashes) * self._core.hash_block_size(model) + 1
        return Question(
            model=model,
            num_tokens=num_tokens,
            token_ids=tokens,
            block_hashes=hashes,
            # The engines read an empty name and an empty salt as none.
            lora_name=body.lora_name or None,
            cache_salt=body.cache_salt or None,
            worker_ids=worker_ids_of(body.workers),
            exclude_worker_ids=worker_ids_of(exclude_workers) or frozenset(),
            explain=body.explain,
        )
