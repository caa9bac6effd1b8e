# SPDX-License-Identifier: Apache-2.0
"""The tokens of clients' prompts: given, made here, or made by an engine. The async shell around the pure parts.

Nothing here waits without a deadline, and nothing long runs in the event loop. What cannot be found out in time is a
Prompt without ids, with its reason: the request is then placed by load.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import aiohttp
import numpy as np
from numpy.typing import NDArray

from kvrouter.router.base.common.task_supervisor import TaskSupervisor
from kvrouter.router.model.workers.engine_key import EngineKey
from kvrouter.router.route.tokens.client_body import ClientBody
from kvrouter.router.route.tokens.engine.client import Absent, Engine, EngineClient
from kvrouter.router.route.tokens.engine.verification import EQUAL, LocalMaker, Verdict
from kvrouter.router.route.tokens.engine.verified_engines import LOOK_S, VerifiedEngines, token_path
from kvrouter.router.route.tokens.engine.wire import (
    TOKENIZE_PATH,
    RenderQuirks,
    render_body,
    rendered,
    tokenize_body,
    tokenized_ids,
)
from kvrouter.router.route.tokens.prompt_cache import Key, PromptMemory
from kvrouter.router.route.tokens.prompt_tokens import FoundTokens, Prompt, TokensUnknown, estimated_tokens
from kvrouter.router.route.tokens.token_metrics import TokenMetrics
from kvrouter.router.route.tokens.token_request import TokenRequest, cuts_cleanly, read
from kvrouter.router.route.tokens.unknown_prompts import UnknownPrompts

log = logging.getLogger(__name__)

# A body up to this is read, and a prompt up to that tokenized here, within half a millisecond (14 us for 2 kB, 126 us
# for 32 kB; 0.6 ms for 2 kB); longer ones go to a thread.
READ_BYTES = 64 * 1024
MAKE_BYTES = 2 * 1024
# Tokenizing is work for a core; more threads would take the loop's.
THREADS = 2
# Requests that wait for tokens at once; each holds its body. Those beyond are placed by load.
MAX_WAITING = 1_024
# Where one does not answer, another may.
ENGINES_TRIED = 2
# Numbers in this much JSON are read in below a millisecond.
PARSE_BYTES = 1024**2
# Tokens of a picture or a sound, for load alone; engines take from some hundred to some thousand tokens.
TOKENS_OF_MEDIA = 1_024
# Two texts that have no token in common, in place of a message with media.
STAND_INS = ("A", "7")

# The share of the deadline for an engine's render of a prompt with media, which may fetch a picture first. The rest is
# for the text before it.
MEDIA_SHARE = 0.6

T = TypeVar("T")


class TextTokenizer:
    """Tokens of texts, from engines or from tokenizers here.

    Args:
        engines: Returns the engines of a model that may be queried now.
        session: Used for queries to those engines.
        engine_key: Decides which engines get a key.
        local: Tokenizers in this process, by model.
        clock: Returns seconds.
    """

    def __init__(
        self,
        *,
        models: Callable[[], Iterable[str]],
        engines: Callable[[str], Sequence[Engine]],
        session: aiohttp.ClientSession,
        engine_key: EngineKey,
        local: Mapping[str, LocalMaker],
        timeout_s: float,
        metrics: TokenMetrics,
        clock: Callable[[], float],
        rng: random.Random,
        supervisor: TaskSupervisor | None = None,
    ) -> None:
        self._models = models
        self._client = EngineClient(session, engine_key)
        self._local = local
        self._timeout_s = timeout_s
        self._metrics = metrics
        self._clock = clock
        self._rng = rng
        self._supervisor = supervisor or TaskSupervisor(clock=clock, rng=rng)
        self._memory = PromptMemory(clock)
        self._engines = VerifiedEngines(
            models=models,
            engines=engines,
            client=self._client,
            local=local,
            changed=self._memory.forget,
            metrics=metrics,
            clock=clock,
        )
        self._texts = UnknownPrompts()
        self.missing = self._texts.found
        self.status = self._engines.status
        self.differences = self._engines.differences
        # Requests for tokens under way, by request and key; callers that wait for the same one share it.
        self._under_way: dict[tuple[str, bytes, str | None], asyncio.Task[FoundTokens]] = {}
        self._waiting = 0
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokens")
        self._watching: asyncio.Task[None] | None = None

    def health(self) -> list[str]:
        """Return the problems of finding tokens of texts, for `/health`."""
        return self._engines.health() + self._texts.health()

    def start(self) -> None:
        """Look for engines and judge them, until `stop`."""
        self._watching = self._supervisor.start("tokenizing", self._watch)

    async def stop(self) -> None:
        running = [task for task in (self._watching, *self._under_way.values()) if task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._engines.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _watch(self) -> None:
        while True:
            self._engines.look()
            self._texts.keep(set(self._models()))
            held_bytes = self._memory.held_bytes + sum(local.held_bytes for local in self._local.values())
            self._metrics.memory_bytes.set(held_bytes)
            await asyncio.sleep(LOOK_S)

    async def prompt(
        self, path: str, model: str, body: ClientBody, *, authorization: str | None = None, counts: bool = True
    ) -> Prompt:
        """Return the tokens of a body that a client sent to `path`. Raises BadQuestion where the body cannot be read.

        Args:
            model: The model as its workers are registered.
            authorization: The header that the client sent for the engine.
            counts: Whether it is a request, not a dry run.
        """
        start_s = self._clock()
        request: TokenRequest | NDArray[np.int64] | TokensUnknown | None = None
        if body.ids is not None or len(body.raw) <= READ_BYTES:
            try:
                request = read(path, body)
            except TokensUnknown as unknown:
                request = unknown
        if request is None or isinstance(request, TokenRequest):
            prompt = await self._prompt(path, model, body, request, authorization)
        elif isinstance(request, TokensUnknown):
            prompt = _unknown(request, len(body.raw))
        else:
            # Nothing is waited for: no deadline, no place among those that wait.
            prompt = Prompt(len(request), request, "given")
        if counts:
            self._count(model, prompt, start_s)
        return prompt

    def _count(self, model: str, prompt: Prompt, start_s: float) -> None:
        self._metrics.prompts(prompt.source).inc()
        self._metrics.seconds(prompt.source).observe(self._clock() - start_s)
        self._texts.add(model, prompt)
        if prompt.reason is not None:
            self._metrics.unknown.labels(prompt.reason).inc()

    async def _prompt(
        self,
        path: str,
        model: str,
        body: ClientBody,
        request: TokenRequest | NDArray[np.int64] | None,
        authorization: str | None,
    ) -> Prompt:
        """request: the content of `body`, None if it was too long to be read at once."""
        size_bytes = len(body.raw)
        if self._waiting >= MAX_WAITING:
            return _unknown(
                TokensUnknown("busy", f"{MAX_WAITING} requests wait for their tokens; add router processes"), size_bytes
            )
        self._waiting += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                if request is None:
                    request = await self._in_thread(lambda: _whole(path, body))
                if not isinstance(request, TokenRequest):
                    return Prompt(len(request), request, "given")
                if request.media_at is not None:
                    size_bytes = request.text_bytes
                    return await self._with_media(model, request, request.media_at, authorization)
                ids, source, items = await self._found(model, request, authorization)
                return Prompt(len(ids), ids, source, replaces=self._engines.all_alike(model), items=items)
        except TokensUnknown as unknown:
            return _unknown(unknown, size_bytes)
        except TimeoutError:
            why = f"its tokens were not found within {self._timeout_s:g} s: engines answer slowly; raise tokenize_timeout_s"
            return _unknown(TokensUnknown("timeout", why), size_bytes)
        finally:
            self._waiting -= 1

    async def _with_media(self, model: str, request: TokenRequest, at: int, authorization: str | None) -> Prompt:
        """All of it if an engine's render returns its items, else what comes before message `at`, the first that has
        media."""
        try:
            async with asyncio.timeout(self._timeout_s * MEDIA_SHARE):
                ids, source, items = await self._ask_once(model, request, authorization)
        except (TokensUnknown, TimeoutError) as error:
            if isinstance(error, TokensUnknown) and error.broke_engine:
                raise
            log.debug("not known through its media", extra={"reason": str(error) or "not in time"})
        else:
            if items:
                return Prompt(len(ids), ids, source, items=items)
        return await self._before_media(model, request, at, authorization)

    async def _before_media(self, model: str, request: TokenRequest, at: int, authorization: str | None) -> Prompt:
        """What comes before the first message with more than text: that which two chats have in common that differ in
        it alone."""
        if not cuts_cleanly(request, at):
            raise TokensUnknown("media", "its messages have more than text, and what comes before is not known alone")
        before = request.messages[:at]
        role = request.messages[at].get("role") or "user"
        both = []
        for text in STAND_INS:
            stand_in = request.with_fields(
                messages=[*before, {"role": role, "content": text}],
                continue_final_message=None,
                add_generation_prompt=None,
            )
            try:
                both.append(await self._found(model, stand_in, authorization))
            except TokensUnknown as unknown:
                # It is not the client's request that was refused.
                reason = "media" if unknown.reason == "refused" else unknown.reason
                problem = f"up to its first message with media: {unknown.problem}"
                raise TokensUnknown(reason, problem, broke_engine=unknown.broke_engine) from None
        (one, source, _), (other, _, _) = both
        most = min(len(one), len(other))
        apart = np.flatnonzero(one[:most] != other[:most])
        # Less one: what stands before the message's text may become one token with what is put there instead.
        known = max(0, (int(apart[0]) if len(apart) else most) - 1)
        return Prompt(
            num_tokens=max(known, estimated_tokens(request.text_bytes)) + TOKENS_OF_MEDIA,
            token_ids=one[:known],
            source=source,
            problem="its messages have more than text: tokens are known up to the first that has",
            known_tokens=known,
            reason="media",
        )

    async def _found(self, model: str, request: TokenRequest, authorization: str | None) -> FoundTokens:
        """Raises Unknown."""
        local = self._local.get(model)
        if local is not None:
            habits = await self._trusted_local(model, request)
            if habits is not None:
                try:
                    if request.size_bytes <= MAKE_BYTES:
                        return FoundTokens(local.ids(request, habits), "local")
                    return FoundTokens(await self._in_thread(lambda: local.ids(request, habits)), "local")
                except TokensUnknown as unknown:
                    # If the tokenizer does not read the request, or its template refuses it, the engine decides, if
                    # there is one.
                    if not self._engines.of(model):
                        raise
                    log.debug("left to the engine", extra={"reason": unknown.problem})
        return await self._ask_once(model, request, authorization)

    async def _ask_once(self, model: str, request: TokenRequest, authorization: str | None) -> FoundTokens:
        """What an engine said or says of it; those that wait for the same share one question. Raises Unknown."""
        key = (model, request.key)
        known = self._memory.get(key)
        if known is not None:
            self._metrics.memory_hits.inc()
            return known
        flight = (*key, authorization)
        task = self._under_way.get(flight)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._ask_in_time(key, request, authorization))
            self._under_way[flight] = task
            task.add_done_callback(lambda done: self._landed(flight, done))
        # Others may wait for the same.
        return await asyncio.shield(task)

    def _landed(self, flight: tuple[str, bytes, str | None], task: asyncio.Task[FoundTokens]) -> None:
        del self._under_way[flight]
        if not task.cancelled():
            # All who waited may be gone; then nobody else looks at it.
            task.exception()

    async def _ask_in_time(self, key: Key, request: TokenRequest, authorization: str | None) -> FoundTokens:
        async with asyncio.timeout(self._timeout_s):
            found = await self._ask_engines(key[0], request, authorization)
        self._memory.put(key, found)
        return found

    async def _ask_engines(self, model: str, request: TokenRequest, authorization: str | None) -> FoundTokens:
        """Raises Unknown."""
        verdicts = await self._engines.verdicts(model)
        able = [url for url, verdict in verdicts.items() if token_path(verdict, request) is not None]
        if not able:
            raise self._engines.why_none(model, request, verdicts)
        # The least used first, equals in any order.
        self._rng.shuffle(able)
        able.sort(key=self._client.asks)
        problem = None
        for url in able[:ENGINES_TRIED]:
            try:
                return await self._ask(model, url, verdicts[url], request, authorization)
            except Absent:
                # It had the endpoint when it was judged.
                self._engines.doubt(model, url)
                problem = TokensUnknown("unreachable", f"{url} has changed and is being verified again")
            except TokensUnknown as unknown:
                if unknown.reason == "refused" or unknown.broke_engine:
                    raise
                problem = unknown
        assert problem is not None
        raise problem

    async def _ask(
        self, model: str, url: str, verdict: Verdict, request: TokenRequest, authorization: str | None
    ) -> FoundTokens:
        """Raises Absent and Unknown."""
        if token_path(verdict, request) == "render":
            path = verdict.ways.render_paths[request.kind]
            answer = await self._client.post(url, path, render_body(request, model), authorization)
            ids, items = await self._parsed(answer, lambda: rendered(request.kind, answer))
            return FoundTokens(ids, "render", items)
        body = tokenize_body(request, verdict.tokenize_habits, verdict.ways)
        answer = await self._client.post(url, TOKENIZE_PATH, body, authorization)
        return FoundTokens(await self._parsed(answer, lambda: tokenized_ids(answer)), "tokenize")

    async def _parsed(self, answer: bytes, parse: Callable[[], T]) -> T:
        return parse() if len(answer) <= PARSE_BYTES else await self._in_thread(parse)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _trusted_local(self, model: str, request: TokenRequest) -> RenderQuirks | None:
        """What to make the prompt here with; None where it is not known to become what the engines make."""
        if not self._engines.of(model):
            # Nobody to hold it against; `health` says so.
            return self._local[model].likely_habits()[0]
        verdicts = list((await self._engines.verdicts(model)).values())
        trusted = all(verdict.local.get(feature) == EQUAL for verdict in verdicts for feature in request.features)
        return verdicts[0].local_habits if verdicts and trusted else None


def _whole(path: str, body: ClientBody) -> TokenRequest | NDArray[np.int64]:
    """`read`, with all that is worked out of a long body later."""
    request = read(path, body)
    if isinstance(request, TokenRequest):
        request.key, request.media_at, request.features  # noqa: B018
    return request


def _unknown(unknown: TokensUnknown, size_bytes: int) -> Prompt:
    return Prompt(
        estimated_tokens(size_bytes),
        None,
        "none",
        unknown.problem,
        reason=unknown.reason,
        refused=unknown.reason == "refused",
        broke_engine=unknown.broke_engine,
    )
