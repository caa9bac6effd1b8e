# SPDX-License-Identifier: Apache-2.0
"""The hot endpoints that choose a worker (`/select`, `/select_and_reserve`), and `/reservations` for a chosen one.

They do no I/O, and run outside FastAPI like those of `query.py`. They are synchronous except for long bodies, and for
texts, which wait until their tokens are found.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrouter.contract.choices import PrefillReply, PullReply, SelectBody, SelectReply, TokensReply
from kvrouter.contract.reservations import ReservationBody
from kvrouter.router.base.common.errors import BadQuestion
from kvrouter.router.base.common.json_arrays import hash_array, token_array
from kvrouter.router.index.matching.question import Question
from kvrouter.router.model.workers.registration_from_body import model_of
from kvrouter.router.model.workers.role import HandoverWay
from kvrouter.router.route.placement.candidates import Pin
from kvrouter.router.route.placement.choose import Choice
from kvrouter.router.route.placement.placement_request import MAX_ANSWERS, MAX_LIMIT_TOKENS, Placement, PlacementRequest
from kvrouter.router.route.placement.placer import Placer
from kvrouter.router.route.placement.planned_pull import SOURCE_FIELD, PlannedPull
from kvrouter.router.route.tokens.client_body import CHAT_PATH, TEXT_PATH, read_client_body
from kvrouter.router.route.tokens.without_cache import engines_without_cache
from kvrouter.router.serve.access.key_bounds import KeyBounds, made_salt
from kvrouter.router.serve.api.dynamo_shapes import ROUTING_GROUP, check_group
from kvrouter.router.serve.api.http_metrics import HttpMetrics
from kvrouter.router.serve.api.ports import CorePort, TokensPort
from kvrouter.router.serve.api.query import QueryRoutes, intersect_optional
from kvrouter.router.serve.api.requests import (
    BodyReader,
    HotRequest,
    is_given,
    is_msgpack,
    within_bounds,
    worker_ids_of,
)
from kvrouter.router.serve.api.responses import candidate_replies, overlap_of

# The block size in `decode_blocks` while the model's is not known.
USUAL_BLOCK_TOKENS = 16

# A decoded body with its token ids and its block hashes. One of them is the prompt; both are None if it is a text.
_Read = tuple[Any, NDArray[np.int64] | None, NDArray[np.uint64] | None]


class SelectRoutes:
    """The handlers of the endpoints: they turn bodies into placement requests, and choices into replies."""

    def __init__(
        self,
        core: CorePort,
        placer: Placer,
        tokens: TokensPort | None,
        asking: QueryRoutes,
        metrics: HttpMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._core = core
        self._placer = placer
        # Tokenizes texts; with None, texts are refused.
        self._tokens = tokens
        self._asking = asking
        self._observe = metrics.decide_seconds.observe
        # Returns seconds, for `kvrouter_decide_seconds`, which covers the placer alone.
        self._clock = clock
        self._select_reader = BodyReader(SelectBody)
        self._reservation_reader = BodyReader(ReservationBody)

    def select(self, request: HotRequest) -> SelectReply | Coroutine[Any, Any, SelectReply]:
        """Answer `POST /select`. The reply is a coroutine if the body is long or has a text."""
        return self._select(request, self._choose)

    def select_and_reserve(self, request: HotRequest) -> SelectReply | Coroutine[Any, Any, SelectReply]:
        """Answer `POST /select_and_reserve`. The reply is a coroutine if the body is long or has a text."""
        return self._select(request, self._reserve)

    async def reserve_at(self, raw: bytes, content_type: str, bounds: KeyBounds | None) -> Placement:
        """Reserve a place at the worker that the client has chosen, for `POST /reservations`."""
        request = HotRequest(raw, 0, content_type, takes_json=True, bounds=bounds)
        body, tokens, hashes = (
            await asyncio.to_thread(_read, self._reservation_reader, request)
            if request.is_long
            else _read(self._reservation_reader, request)
        )
        if body.worker_id is None:
            return self._claim(body)
        length = _length(body)
        if tokens is not None or hashes is not None:
            question = within_bounds(self._known(body, tokens, hashes), bounds)
            await self._core.hash_ahead(question)
        elif length is not None:
            question = within_bounds(self._asking.question(body, None, np.empty(0, np.uint64), length), bounds)
        else:
            raise BadQuestion("give token_ids, block_hashes or isl_tokens: they determine the prompt's load")
        pinned = Pin(str(body.worker_id), body.dp_rank)
        # The reply names no source, so the engine fetches nothing.
        ask = msgspec.structs.replace(_ask(body, question, bounds), pinned=pinned, may_pull=False)
        prefill_tokens = 0 if body.track_prefill_tokens is False else body.effective_prefill_tokens
        if prefill_tokens is not None and prefill_tokens > question.num_tokens:
            raise BadQuestion(f"effective_prefill_tokens exceeds the prompt's {question.num_tokens} tokens")
        return self._placer.reserve(ask, anyway=True, prefill_tokens=prefill_tokens)

    def _claim(self, body: Any) -> Placement:
        """Reserve the place that an earlier `/select` chose under this selection id."""
        check_group(body.routing_group)
        if body.selection_id is None:
            raise BadQuestion("give worker_id, or only selection_id to claim what an earlier /select chose under it")
        return self._placer.claim(body.selection_id, model_of(body))

    def _select(
        self, request: HotRequest, decide: Callable[[PlacementRequest], SelectReply]
    ) -> SelectReply | Coroutine[Any, Any, SelectReply]:
        """Decide about a body at once if possible; otherwise, return a coroutine."""
        if request.is_long:
            return self._select_long(request, decide)
        body, tokens, hashes = _read_prompt(self._select_reader, request)
        if tokens is None and hashes is None:
            return self._select_text(body, request, decide)
        question = within_bounds(self._known(body, tokens, hashes), request.bounds)
        return _salted_reply(decide(_ask(body, question, request.bounds)), question, request.bounds)

    async def _select_long(self, request: HotRequest, decide: Callable[[PlacementRequest], SelectReply]) -> SelectReply:
        """Decide about a long body, which is read in a thread and hashed in turns."""
        body, tokens, hashes = await asyncio.to_thread(_read_prompt, self._select_reader, request)
        if tokens is None and hashes is None:
            return await self._select_text(body, request, decide)
        question = within_bounds(self._known(body, tokens, hashes), request.bounds)
        await self._core.hash_ahead(question)
        return _salted_reply(decide(_ask(body, question, request.bounds)), question, request.bounds)

    def _known(self, body: Any, tokens: NDArray[np.int64] | None, hashes: NDArray[np.uint64] | None) -> Question:
        """Return the question to the index for a body that has its prompt as tokens or hashes."""
        return self._asking.question(
            body,
            tokens,
            hashes,
            _length(body),
            workers=_workers(body),
            exclude_workers=body.exclude_workers,
            dp_rank=body.dp_rank,
        )

    async def _select_text(
        self, body: Any, request: HotRequest, decide: Callable[[PlacementRequest], SelectReply]
    ) -> SelectReply:
        """Decide about a body with a text, after finding its tokens."""
        if self._tokens is None:
            raise BadQuestion(
                "this router does not tokenize prompt or messages; send token_ids or block_hashes "
                "(an engine's /tokenize gives the ids)",
                code="tokens_required",
            )
        served = self._asking.served(body)
        cache_salt = body.cache_salt or None
        if request.bounds is not None:
            cache_salt = request.bounds.asked_salt(cache_salt)
            request.bounds.check_model(served.model, body.lora_name or served.lora_name)
            request.bounds.check_salt(cache_salt)
        raw = request.data[request.start :]
        if is_msgpack(request.content_type):
            try:
                raw = msgspec.json.encode(msgspec.msgpack.decode(raw))
            except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
                raise BadQuestion(f"the body has a value that JSON cannot express: {error}") from None
        path = CHAT_PATH if is_given(body.messages) else TEXT_PATH
        client_body = read_client_body(path, raw)
        is_dry = body.dry_run and decide == self._choose
        space = made_salt(request.bounds, cache_salt)
        prompt = await self._tokens.prompt(path, served.model, client_body, counts=not is_dry, space=space)
        if prompt.refused:
            raise BadQuestion(f"the engine rejects the prompt: {prompt.problem}", code="prompt_refused")
        question = prompt.question(
            served.model,
            lora_name=body.lora_name or served.lora_name,
            cache_salt=cache_salt,
            worker_ids=intersect_optional(worker_ids_of(_workers(body)), served.worker_ids),
            exclude_worker_ids=worker_ids_of(body.exclude_workers) or frozenset(),
            dp_rank=body.dp_rank,
            explain=body.explain,
            without_cache=engines_without_cache(client_body),
        )
        await self._core.hash_ahead(question)
        reply = _salted_reply(decide(_ask(body, question, request.bounds)), question, request.bounds)
        source = TokensReply(prompt.source, prompt.num_tokens, question.known_tokens or 0, prompt.problem)
        return msgspec.structs.replace(reply, tokens=source)

    def _choose(self, request: PlacementRequest) -> SelectReply:
        """Choose a worker without reserving it, and return the reply."""
        selection_id = request.selection_id or self._placer.new_id()
        start = self._clock()
        choice = self._placer.choose(request, selection_id)
        if not request.dry_run:
            self._observe(self._clock() - start)
        return self._reply(request.question, choice, selection_id, reserved=False)

    def _reserve(self, request: PlacementRequest) -> SelectReply:
        """Choose and reserve a worker, and return the reply."""
        start = self._clock()
        placement = self._placer.reserve(request)
        self._observe(self._clock() - start)
        return self._reply(request.question, placement.choice, placement.selection_id, reserved=True)

    def _reply(self, question: Question, choice: Choice, selection_id: str, *, reserved: bool) -> SelectReply:
        worker = choice.hit.worker
        decode_tokens = self._placer.decode_tokens(worker) + (0 if reserved else question.num_tokens)
        block_size = self._core.hash_block_size(question.model)
        given_id = self._core.given_id
        pull = choice.pull
        return SelectReply(
            selection_id=selection_id,
            model=question.model,
            worker_id=given_id(worker),
            dp_rank=worker.dp_rank,
            request_rank=self._core.request_ranks().get(worker),
            endpoint=choice.url,
            overlap=overlap_of(choice.hit),
            expected_tokens=choice.expected_tokens,
            effective_prefill_tokens=question.num_tokens - choice.hit.tokens,
            reason=choice.reason,
            model_name=question.model,
            routing_group=ROUTING_GROUP,
            isl_tokens=question.num_tokens,
            num_prompts=question.num_prompts,
            block_size=block_size,
            potential_decode_blocks=decode_blocks(decode_tokens, block_size),
            reserved=reserved,
            candidates=candidate_replies(choice, given_id) if question.explain else None,
            prefill=None
            if choice.prefill is None
            else self._prefill(question, choice.prefill, self._core.handover(worker)),
            pull=None if pull is None else self._pull(pull),
            kv_transfer_params=None if pull is None else {SOURCE_FIELD: pull.source_params(selection_id)},
        )

    def _pull(self, pull: PlannedPull) -> PullReply:
        """Return the reply's part about the source of blocks."""
        return PullReply(
            worker_id=self._core.given_id(pull.source),
            dp_rank=pull.source.dp_rank,
            tokens=pull.tokens,
            fetched_tokens=pull.fetched_tokens,
            timeout_s=pull.timeout_s,
        )

    def _prefill(self, question: Question, choice: Choice, handover: HandoverWay) -> PrefillReply:
        """Return the reply's part about the prefill worker."""
        worker, given_id = choice.hit.worker, self._core.given_id
        return PrefillReply(
            worker_id=given_id(worker),
            dp_rank=worker.dp_rank,
            request_rank=self._core.request_ranks().get(worker),
            endpoint=choice.url,
            overlap=overlap_of(choice.hit),
            effective_prefill_tokens=question.num_tokens - choice.hit.tokens,
            handover=handover,
            reason=choice.reason,
            candidates=candidate_replies(choice, given_id) if question.explain else None,
        )


def _read(reader: BodyReader, request: HotRequest) -> _Read:
    """Read a body of any form. Pure, so it may run in any thread. Raises BadQuestion."""
    return _numbers(reader.read(request.data, request.content_type, request.start), request)


def _numbers(body: Any, request: HotRequest) -> _Read:
    """Return the body with its token ids or block hashes decoded."""
    packed = is_msgpack(request.content_type)
    if is_given(body.token_ids):
        return body, token_array(body.token_ids, is_msgpack=packed), None
    if is_given(body.block_hashes):
        return body, None, hash_array(body.block_hashes, is_msgpack=packed)
    return body, None, None


def _read_prompt(reader: BodyReader, request: HotRequest) -> _Read:
    """Read a body that must have exactly one prompt: token ids, block hashes, or a text. Raises BadQuestion."""
    body = reader.read(request.data, request.content_type, request.start)
    has_text = is_given(body.prompt) or is_given(body.messages)
    if is_given(body.token_ids) + is_given(body.block_hashes) + has_text != 1:
        raise BadQuestion("give exactly one of token_ids, block_hashes, prompt and messages: the prompt to place")
    return _numbers(body, request)


def decode_blocks(decode_tokens: int, block_size: int) -> int:
    """Return the decode load in blocks of the model, the unit of Dynamo; without a known block size, in usual ones."""
    return -(-decode_tokens // (block_size if block_size > 1 else USUAL_BLOCK_TOKENS))


def _ask(body: Any, question: Question, bounds: KeyBounds | None) -> PlacementRequest:
    """Return the placement request of a body."""
    max_tokens = body.expected_output_tokens if body.max_tokens is None else body.max_tokens
    if max_tokens is not None:
        max_tokens = min(max_tokens, MAX_LIMIT_TOKENS)
    pinned = body.pinned_worker
    pin = None if pinned is None else Pin(str(pinned.worker_id), pinned.dp_rank)
    context = body.session_context
    session_id = body.session_id if context is None else context.session_id
    return PlacementRequest(
        question,
        session_id,
        max_tokens,
        pin,
        body.selection_id,
        dry_run=body.dry_run,
        key_name="" if bounds is None else bounds.caller,
        answers=min(body.n or 1, MAX_ANSWERS),
    )


def _salted_reply(reply: SelectReply, question: Question, bounds: KeyBounds | None) -> SelectReply:
    """Return the reply with the salt that the request to the engine must have, if it is made here."""
    if bounds is None or bounds.maker is None:
        return reply
    return msgspec.structs.replace(reply, cache_salt=question.cache_salt)


def _length(body: Any) -> int | None:
    """Return the length of the prompt in tokens, if the body states it."""
    length: int | None = body.isl_tokens if body.num_tokens is None else body.num_tokens
    return length


def _workers(body: Any) -> Sequence[str | int] | None:
    """Return the only workers allowed, or None for all."""
    worker_ids: Sequence[str | int] | None = body.allowed_worker_ids if body.workers is None else body.workers
    return worker_ids
