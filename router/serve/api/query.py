# SPDX-License-Identifier: Apache-2.0
"""The hot endpoints that query the index: `/query` and `/query_by_hash`.

They lead from the raw body to the reply without I/O, and synchronously unless the body is long. They run outside
FastAPI, whose parameters and pydantic cost three times as much as everything else.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvrouter.contract.queries import QueryBody, QueryByHashBody, QueryReply
from kvrouter.contract.tiers import TIERS
from kvrouter.router.base.common.errors import BadQuestion
from kvrouter.router.base.common.json_arrays import hash_array, token_array
from kvrouter.router.index.matching.matcher import HashPlan, HitTable
from kvrouter.router.index.matching.question import Question
from kvrouter.router.model.kvcache.hit_tables import FOUND_COLUMNS
from kvrouter.router.model.workers.model_names import ServedModel
from kvrouter.router.model.workers.registration_from_body import model_of
from kvrouter.router.serve.api.dynamo_shapes import DEFAULT_MODEL, check_group
from kvrouter.router.serve.api.http_metrics import HttpMetrics
from kvrouter.router.serve.api.ports import CorePort
from kvrouter.router.serve.api.query_template import QueryTemplate
from kvrouter.router.serve.api.requests import BodyReader, HotRequest, is_msgpack, within_bounds, worker_ids_of
from kvrouter.router.serve.api.responses import JSON, encode, query_reply

# The number of models whose templates are kept; a worker's text takes about 200 bytes.
MAX_TEMPLATES = 1_000

# The placeholder of number `cell` of the table while a reply's template is made. It is larger than the length of any
# prompt.
PLACEHOLDER = 8 * 10**18
PLACEHOLDERS = re.compile(rb"(?<=:)(8[0-9]{18})(?=[,}])")
# The numbers that a reply has for each worker: longest_matched, one for each tier, and twice that of its rank.
NUMBERS_OF_WORKER = len(TIERS) + 3

# A body, its tokens or its hashes, and its statement of the prompt's length.
_Read = tuple[Any, NDArray[np.int64] | None, NDArray[np.uint64] | None, int | None]


class QueryRoutes:
    """The handlers of the endpoints: they turn bodies into questions to the core, and its answers into replies."""

    def __init__(self, core: CorePort, metrics: HttpMetrics, clock: Callable[[], float]) -> None:
        self._core = core
        self._observe = metrics.decide_seconds.observe
        # Returns seconds, for `kvrouter_decide_seconds`, which covers the core alone.
        self._clock = clock
        self._query_reader = BodyReader(QueryBody)
        self._by_hash_reader = BodyReader(QueryByHashBody)
        # The template for each model, with and without hashes, and the plan from which it was made.
        self._templates: dict[tuple[str, bool], tuple[HashPlan, QueryTemplate | None]] = {}

    def query(self, request: HotRequest) -> QueryReply | bytes | Coroutine[Any, Any, QueryReply | bytes]:
        """Answer `POST /query`. The reply may be encoded JSON, or a coroutine if the body is long."""
        if request.is_long:
            return self._answer_long(request, self._read_tokens)
        return self._ask(self._question(self._read_tokens(request), request), request)

    def query_by_hash(self, request: HotRequest) -> QueryReply | bytes | Coroutine[Any, Any, QueryReply | bytes]:
        """Answer `POST /query_by_hash`. The reply may be encoded JSON, or a coroutine if the body is long."""
        if request.is_long:
            return self._answer_long(request, self._read_hashes)
        return self._ask(self._question(self._read_hashes(request), request), request)

    async def _answer_long(self, request: HotRequest, read: Callable[[HotRequest], _Read]) -> QueryReply | bytes:
        """Answer a question whose body is long: read it in a thread, and hash the prompt in turns."""
        question = self._question(await asyncio.to_thread(read, request), request)
        await self._core.hash_ahead(question)
        return self._ask(question, request)

    def _read_tokens(self, request: HotRequest) -> _Read:
        """Read a body with token ids. May run in any thread."""
        body = self._query_reader.read(request.data, request.content_type, request.start)
        return body, token_array(body.token_ids, is_msgpack=is_msgpack(request.content_type)), None, None

    def _read_hashes(self, request: HotRequest) -> _Read:
        """Read a body with block hashes. May run in any thread."""
        body = self._by_hash_reader.read(request.data, request.content_type, request.start)
        return body, None, hash_array(body.block_hashes, is_msgpack=is_msgpack(request.content_type)), body.num_tokens

    def _question(self, read: _Read, request: HotRequest) -> Question:
        """Return the question of a body, if the request's key may ask it. Raises Forbidden if it may not."""
        return within_bounds(self.question(*read, held=read[0].held), request.bounds)

    def _ask(self, question: Question, request: HotRequest) -> QueryReply | bytes:
        """Return the reply to a question, from a template if possible."""
        start = self._clock()
        # The usual question is about all workers, and wants the counts alone.
        usual = question.worker_ids is None and not (question.explain or question.held)
        table = self._core.hit_table(question) if usual else None
        if table is not None and request.takes_json:
            template = self._template((question.model, question.token_ids is None), table)
            if template is not None:
                content = template.fill(table.found)
                self._observe(self._clock() - start)
                return content
        hits = self._core.ask(question) if table is None else table.hits()
        self._observe(self._clock() - start)
        return query_reply(hits, question.explain, question.held)

    def _template(self, name: tuple[str, bool], table: HitTable) -> QueryTemplate | None:
        """Return the template of replies for the table, cached while its plan stays the same; None if none fits.

        Args:
            name: The key in the cache: the model, and whether the question has hashes in place of tokens.
            table: The hits of all workers.
        """
        cached = self._templates.get(name)
        if cached is None or cached[0] is not table.plan:
            if len(self._templates) >= MAX_TEMPLATES:
                self._templates.clear()
            cached = self._templates[name] = table.plan, make_template(table)
        return cached[1]

    def question(
        self,
        body: Any,
        tokens: NDArray[np.int64] | None,
        hashes: NDArray[np.uint64] | None,
        num_tokens: int | None,
        *,
        workers: Sequence[str | int] | None = None,
        exclude_workers: Sequence[str | int] | None = None,
        dp_rank: int | None = None,
        held: bool = False,
    ) -> Question:
        """Return the question of `body` about this prompt.

        Raises BadQuestion if the body is not valid, and UnknownModel if no worker serves its model.

        Args:
            body: The decoded body.
            tokens: The prompt's token ids, or None.
            hashes: The prompt's block hashes, or None.
            num_tokens: The length of the prompt if the body states it.
            workers: The only workers allowed; None takes those of the body.
            exclude_workers: The workers to leave out.
            dp_rank: The only data-parallel rank allowed.
            held: Whether the answer lists where each block lies.
        """
        served = self.served(body)
        model = served.model
        if tokens is not None:
            if not len(tokens):
                raise BadQuestion("token_ids is empty: send the ids of the whole prompt")
            num_tokens = len(tokens)
        elif num_tokens is None:
            # A prompt always has a token after its last reusable block, because the engine must compute one.
            num_tokens = (0 if hashes is None else len(hashes)) * self._core.hash_block_size(model) + 1
        return Question(
            model=model,
            num_tokens=num_tokens,
            token_ids=tokens,
            block_hashes=hashes,
            # Engines read an empty adapter name or an empty salt as absent.
            lora_name=body.lora_name or served.lora_name,
            cache_salt=body.cache_salt or None,
            worker_ids=intersect_optional(
                worker_ids_of(body.workers if workers is None else workers), served.worker_ids
            ),
            exclude_worker_ids=worker_ids_of(exclude_workers) or frozenset(),
            dp_rank=dp_rank,
            explain=body.explain,
            held=held,
        )

    def served(self, body: Any) -> ServedModel:
        """Return the model that the body's `model` means. Raises BadQuestion and UnknownModel."""
        check_group(body.routing_group)
        model = model_of(body)
        if model is None and DEFAULT_MODEL in self._core.models():
            model = DEFAULT_MODEL
        if not model:
            raise BadQuestion("model is missing: name the model that the workers were registered with")
        return self._core.resolve(model)


def make_template(table: HitTable) -> QueryTemplate | None:
    """Return the template of all replies to questions of the table's plan.

    Return None if the numbers also decide which rank of a worker is shown, so that the text differs between prompts.
    """
    numbers = PLACEHOLDER + np.arange(table.found.size).reshape(table.found.shape)
    hits = HitTable(table.plan, numbers, table.none).hits()
    if len({hit.worker.worker_id for hit in hits}) < len(hits):
        return None
    content, _ = encode(query_reply(hits, explain=False), JSON)
    pieces = PLACEHOLDERS.split(content)
    cells = [int(digits) - PLACEHOLDER for digits in pieces[1::2]]
    if len(cells) != NUMBERS_OF_WORKER * len(table.plan.views):
        # The name of a worker looks like a placeholder.
        return None
    return QueryTemplate(pieces[::2], cells, FOUND_COLUMNS)


def intersect_optional(some: frozenset[str] | None, others: frozenset[str] | None) -> frozenset[str] | None:
    """Return the intersection of two sets, each of which may be None for all elements."""
    if others is None:
        return some
    return others if some is None else some & others
