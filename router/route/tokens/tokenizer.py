# SPDX-License-Identifier: Apache-2.0
"""The tokens of clients' prompts: sent by the client, made in this process, or made by an engine.

This is the async shell around the pure parts. It never waits without a deadline, and nothing long runs in the event
loop. If tokens cannot be found in time, the result is a `Prompt` without ids and with the reason; the request is then
placed by load.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, TypeVar

import aiohttp
import numpy as np
from numpy.typing import NDArray

from kvrouter.router.base.common import ticks
from kvrouter.router.base.common.task_supervisor import TaskSupervisor
from kvrouter.router.model.config.settings import Config
from kvrouter.router.model.engines.engine import TokenEndpoints
from kvrouter.router.model.workers.engine_key import EngineKey
from kvrouter.router.model.workers.renderer_spec import RendererKeys, RendererSpec
from kvrouter.router.route.tokens.client_body import ClientBody
from kvrouter.router.route.tokens.engine.client import Absent, Engine, EngineClient
from kvrouter.router.route.tokens.engine.renderers import KEY_WANTED, Renderers
from kvrouter.router.route.tokens.engine.verification import LocalMaker, Verdict
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
from kvrouter.router.route.tokens.prompt_list import SPLIT_PROMPTS, PromptList, looked_up_among
from kvrouter.router.route.tokens.prompt_tokens import FoundTokens, Prompt, TokensUnknown, estimated_tokens
from kvrouter.router.route.tokens.token_metrics import TokenMetrics
from kvrouter.router.route.tokens.token_request import ListRequest, TokenRequest, cuts_cleanly, read
from kvrouter.router.route.tokens.unknown_prompts import WITHOUT_ENGINE, WITHOUT_SOURCE, UnknownPrompts

log = logging.getLogger(__name__)

# The largest body that is read, and the largest prompt that is tokenized, in the event loop: within half a millisecond
# (14 us for 2 kB, 126 us for 32 kB; 0.6 ms for 2 kB). Larger ones go to a thread.
READ_BYTES = 64 * 1024
MAKE_BYTES = 2 * 1024
# Tokenizing keeps a core busy; more threads would take the event loop's.
THREADS = 2
# Requests that may wait for tokens at once; each holds its body. Further ones are placed by load.
MAX_WAITING = 1_024
# The number of engines tried: if one does not answer, another may.
ENGINES_TRIED = 2
# The size of JSON whose numbers are read in less than a millisecond; larger answers go to a thread.
PARSE_BYTES = 1024**2
# The assumed tokens of a picture or a sound, for load alone; engines use from some hundred to some thousand tokens.
TOKENS_OF_MEDIA = 1_024
# Two texts without a common token, which replace a message with media.
STAND_INS = ("A", "7")

# The share of the deadline for an engine's render of a prompt with media, which may fetch a picture first. The rest is
# for finding the text before the media.
MEDIA_SHARE = 0.6
# The share of the deadline for renderers, so that engines can still answer in place of a slow one.
RENDERER_SHARE = 0.6
# The share of the deadline for each prompt of a list, all of which are looked up at the same time.
LIST_SHARE = 0.9

T = TypeVar("T")


class _Asker(NamedTuple):
    """The client that wants the tokens of a text."""

    # The `Authorization` header that the client sent for the engine.
    authorization: str | None
    # As in `TextTokenizer.prompt`.
    space: str


class TextTokenizer:
    """The tokens of texts, from engines or from tokenizers in this process.

    Args:
        models: Returns the models that have workers.
        workers: Returns the number of a model's workers.
        engines: Returns the engines of a model that may be queried now.
        session: Used for queries to those engines.
        engine_key: Decides which engines get a key.
        local: Tokenizers in this process, by model.
        renderers: The renderers that the settings name.
        renderer_ways: The endpoints of a renderer.
        timeout_s: Deadline for finding the tokens of one request.
        metrics: The metrics of finding tokens.
        clock: Returns seconds.
        rng: Decides between engines that are used equally.
        supervisor: Runs the task that verifies engines; None for a new one.
    """

    def __init__(
        self,
        *,
        models: Callable[[], Iterable[str]],
        workers: Callable[[str], int],
        engines: Callable[[str], Sequence[Engine]],
        session: aiohttp.ClientSession,
        engine_key: EngineKey,
        local: Mapping[str, LocalMaker],
        renderers: Sequence[RendererSpec],
        renderer_ways: TokenEndpoints,
        timeout_s: float,
        metrics: TokenMetrics,
        clock: Callable[[], float],
        rng: random.Random,
        supervisor: TaskSupervisor | None = None,
    ) -> None:
        self._models = models
        self._workers = workers
        self._client = EngineClient(session, engine_key)
        self._local = local
        self._timeout_s = timeout_s
        self._metrics = metrics
        self._clock = clock
        self._rng = rng
        self._supervisor = supervisor or TaskSupervisor(clock=clock, rng=rng)
        self._memory = PromptMemory(clock)
        self._renderer_client = EngineClient(session, RendererKeys(renderers, engine_key))
        self._renderers = Renderers(
            renderers,
            client=self._renderer_client,
            ways=renderer_ways,
            changed=self._on_verified,
            metrics=metrics,
            clock=clock,
        )
        self._engines = VerifiedEngines(
            models=models,
            engines=engines,
            client=self._client,
            local=local,
            renderers=self._renderers,
            changed=self._on_verified,
            metrics=metrics,
            clock=clock,
        )
        self._texts = UnknownPrompts(clock)
        self.missing = self._texts.found
        self.status = self._engines.status
        self.differences = self._engines.differences
        self.front_ends = self._engines.front_ends
        self.renderer_problems = self._engines.renderer_problems
        self.unread_responses = self._engines.unread_responses
        # Queries to engines under way, by what they look up and the header; callers that need the same tokens share one.
        self._under_way: dict[tuple[Key, str | None], asyncio.Task[FoundTokens]] = {}
        self._waiting = 0
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokens")
        self._watching: asyncio.Task[None] | None = None

    def health(self) -> list[str]:
        """Return the problems of finding tokens of texts, for `/health`."""
        return self._engines.health() + self._texts.health()

    def _on_verified(self, model: str) -> None:
        """Forget what was found before an engine or a renderer of the model was verified."""
        self._memory.forget(model)
        ended = WITHOUT_ENGINE | WITHOUT_SOURCE if self._engines.has_source(model) else WITHOUT_ENGINE
        self._texts.end(model, ended)

    def apply(self, config: Config) -> None:
        """Apply the changed time limit to requests that begin from now on."""
        self._timeout_s = config.tokenize_timeout_s

    def start(self) -> None:
        """Look for engines and judge them, until `stop` is called."""
        self._watching = self._supervisor.start("tokenizing", self._watch)

    async def stop(self) -> None:
        """Cancel all work."""
        tasks = [task for task in (self._watching, *self._under_way.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._engines.stop()
        await self._renderers.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _watch(self) -> None:
        while True:
            self._engines.look()
            self._texts.keep(set(self._models()))
            held_bytes = self._memory.held_bytes + sum(local.held_bytes for local in self._local.values())
            self._metrics.memory_bytes.set(held_bytes)
            await ticks.sleep(LOOK_S)

    async def prompt(
        self,
        path: str,
        model: str,
        body: ClientBody,
        *,
        authorization: str | None = None,
        counts: bool = True,
        space: str = "",
    ) -> Prompt:
        """Return the tokens of a body that a client sent to `path`.

        Args:
            path: The path of the client's request.
            model: The model as its workers are registered.
            body: The client's body.
            authorization: The header that the client sent for the engine.
            counts: Whether the metrics count this prompt; False for a dry run.
            space: The space in which tokens are remembered. Tokens from one space take as long to find in another space as
                unknown ones, so that the time shows a tenant nothing about others.

        Raises:
            BadQuestion: The body cannot be read.
        """
        start_s = self._clock()
        request: TokenRequest | NDArray[np.int64] | ListRequest | Prompt | TokensUnknown | None = None
        if body.ids is not None or len(body.raw) <= READ_BYTES:
            try:
                request = self._read(path, model, body)
            except TokensUnknown as unknown:
                request = unknown
        if isinstance(request, TokensUnknown):
            prompt = _unknown(request, len(body.raw))
        elif request is None or isinstance(request, TokenRequest) or _has_texts(request):
            prompt = await self._prompt(path, model, body, request, _Asker(authorization, space))
        elif isinstance(request, ListRequest):
            prompt = given_list(request)
        else:
            # The request itself contains all token ids, so this needs no deadline and no place in the queue of waiting
            # requests.
            prompt = _given(request)
        if counts:
            self._count(model, prompt, start_s)
        return prompt

    def _read(self, path: str, model: str, body: ClientBody) -> TokenRequest | NDArray[np.int64] | ListRequest | Prompt:
        """Read a body with `read`, and leave out the prompts of a list that are too many for the model's workers."""
        request = read(path, body)
        return request.within(looked_up_among(self._workers(model))) if isinstance(request, ListRequest) else request

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
        request: TokenRequest | NDArray[np.int64] | ListRequest | Prompt | None,
        asker: _Asker,
    ) -> Prompt:
        """Find the tokens within the deadline.

        Args:
            path: The path of the client's request.
            model: The model as its workers are registered.
            body: The client's body.
            request: The content of `body`, or None if it is too long to be read in the event loop.
            asker: The client that wants the tokens.
        """
        size_bytes = len(body.raw)
        if self._waiting >= MAX_WAITING:
            return _unknown(
                TokensUnknown("busy", f"{MAX_WAITING} requests wait for their tokens; add router processes"), size_bytes
            )
        self._waiting += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                if request is None:
                    request = await self._in_thread(lambda: _whole(self._read(path, model, body)))
                if isinstance(request, ListRequest):
                    return await self._listed(model, request, asker)
                if not isinstance(request, TokenRequest):
                    return _given(request)
                if request.media_at is not None:
                    size_bytes = request.text_bytes
                    return await self._with_media(model, request, request.media_at, asker)
                ids, source, items = await self._found(model, request, asker)
                return Prompt(len(ids), ids, source, replaces=self._engines.all_alike(model), items=items)
        except TokensUnknown as unknown:
            return _unknown(unknown, size_bytes)
        except TimeoutError:
            return _unknown(self._too_late(), size_bytes)
        finally:
            self._waiting -= 1

    async def _listed(self, model: str, request: ListRequest, asker: _Asker) -> Prompt:
        """Return the prompts of a list, each with its tokens as far as they are found in time."""
        parts = await asyncio.gather(*(self._part(model, prompt, asker) for prompt in request.prompts))
        return list_of(parts, request.whole)

    async def _part(self, model: str, prompt: TokenRequest | NDArray[np.int64], asker: _Asker) -> Prompt:
        """Return one prompt of a list."""
        if not isinstance(prompt, TokenRequest):
            return Prompt(len(prompt), prompt, "given")
        try:
            # A little less than the whole list has, so that one slow prompt does not lose the others.
            async with asyncio.timeout(self._timeout_s * LIST_SHARE):
                # Many short texts are as long as one long text, which a thread tokenizes.
                ids, source, items = await self._found(model, prompt, asker, at_once=False)
                return Prompt(len(ids), ids, source, items=items)
        except TokensUnknown as unknown:
            return _unknown(unknown, prompt.size_bytes)
        except TimeoutError:
            return _unknown(self._too_late(), prompt.size_bytes)

    def _too_late(self) -> TokensUnknown:
        return TokensUnknown(
            "timeout",
            f"its tokens were not found within {self._timeout_s:g} s: engines answer slowly; raise tokenize_timeout_s",
        )

    async def _with_media(self, model: str, request: TokenRequest, at: int, asker: _Asker) -> Prompt:
        """Return the whole prompt if an engine's render names its media, else the part before the first media.

        Args:
            model: The model as its workers are registered.
            request: The request.
            at: The index of the first message that has media.
            asker: The client that wants the tokens.
        """
        try:
            async with asyncio.timeout(self._timeout_s * MEDIA_SHARE):
                ids, source, items = await self._ask_once(model, request, asker)
        except (TokensUnknown, TimeoutError) as error:
            if isinstance(error, TokensUnknown) and error.broke_engine:
                raise
            log.debug("not known through its media", extra={"reason": str(error) or "not in time"})
        else:
            if items:
                return Prompt(len(ids), ids, source, items=items)
        return await self._before_media(model, request, at, asker)

    async def _before_media(self, model: str, request: TokenRequest, at: int, asker: _Asker) -> Prompt:
        """Return the part of the prompt before its first message with more than text.

        The message is replaced by each of two texts; both prompts have exactly this part in common.
        """
        if not cuts_cleanly(request, at):
            raise TokensUnknown("media", "its messages have more than text, and what comes before is not known alone")
        before = request.messages[:at]
        role = request.messages[at].get("role") or "user"
        variants = []
        for text in STAND_INS:
            stand_in = request.with_fields(
                messages=[*before, {"role": role, "content": text}],
                continue_final_message=None,
                add_generation_prompt=None,
            )
            try:
                variants.append(await self._found(model, stand_in, asker))
            except TokensUnknown as unknown:
                # The engine refused the replaced message, not the client's own request.
                reason = "media" if unknown.reason == "refused" else unknown.reason
                problem = f"up to its first message with media: {unknown.problem}"
                raise TokensUnknown(reason, problem, broke_engine=unknown.broke_engine) from None
        (ids, source, _), (other_ids, _, _) = variants
        common = min(len(ids), len(other_ids))
        differences = np.flatnonzero(ids[:common] != other_ids[:common])
        # One token less, because the template's text before the message may share a token with the replacement.
        known_tokens = max(0, (int(differences[0]) if len(differences) else common) - 1)
        return Prompt(
            num_tokens=max(known_tokens, estimated_tokens(request.text_bytes)) + TOKENS_OF_MEDIA,
            token_ids=ids[:known_tokens],
            source=source,
            problem="its messages have more than text: tokens are known up to the first that has",
            known_tokens=known_tokens,
            reason="media",
        )

    async def _found(self, model: str, request: TokenRequest, asker: _Asker, *, at_once: bool = True) -> FoundTokens:
        """Return the tokens of a request, from the local tokenizer or from an engine.

        Args:
            model: The model as its workers are registered.
            request: The request.
            asker: The client that wants the tokens.
            at_once: Whether a short text may be tokenized in the event loop.

        Raises:
            TokensUnknown: Neither can make them.
        """
        local = self._local.get(model)
        if local is not None:
            quirks = await self._trusted_local(model, request)
            if quirks:
                try:
                    if at_once and request.size_bytes <= MAKE_BYTES:
                        return FoundTokens(_made(local, request, quirks), "local")
                    return FoundTokens(await self._in_thread(lambda: _made(local, request, quirks)), "local")
                except TokensUnknown as unknown:
                    # If the tokenizer cannot read the request, or its template refuses it, the engine decides if there
                    # is one.
                    if not self._engines.of(model) and model not in self._renderers.models:
                        raise
                    log.debug("left to the engine", extra={"reason": unknown.problem})
        return await self._ask_once(model, request, asker)

    async def _ask_once(self, model: str, request: TokenRequest, asker: _Asker) -> FoundTokens:
        """Return the tokens from the cache or from an engine; callers with the same request share one query.

        Raises:
            TokensUnknown: No engine could return them.
        """
        key = (model, request.key, asker.space)
        cached = self._memory.get(key)
        if cached is not None:
            self._metrics.memory_hits.inc()
            return cached
        flight = (key, asker.authorization)
        task = self._under_way.get(flight)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._ask_in_time(key, request, asker.authorization))
            self._under_way[flight] = task
            task.add_done_callback(lambda done: self._landed(flight, done))
        # Shielded, because other callers may wait for the same query.
        return await asyncio.shield(task)

    def _landed(self, flight: tuple[Key, str | None], task: asyncio.Task[FoundTokens]) -> None:
        """Forget a query that has ended."""
        del self._under_way[flight]
        if not task.cancelled():
            # Retrieve the exception, because all callers that waited for it may be gone.
            task.exception()

    async def _ask_in_time(self, key: Key, request: TokenRequest, authorization: str | None) -> FoundTokens:
        """Query engines within the deadline, and cache the tokens."""
        async with asyncio.timeout(self._timeout_s):
            tokens = await self._ask_engines(key[0], request, authorization)
        self._memory.put(key, tokens)
        return tokens

    async def _ask_engines(self, model: str, request: TokenRequest, authorization: str | None) -> FoundTokens:
        """Query the renderers that can make the tokens, and then the engines, the least busy first.

        Raises:
            TokensUnknown: None of them could return the tokens.
        """
        verdicts = await self._engines.verdicts(model)
        if self._engines.reads_differently(model, request):
            raise self._engines.why_none(model, request, verdicts)
        problem: TokensUnknown | None = None
        if model in self._renderers.models:
            tokens = await self._ask_renderers(model, request, verdicts)
            if isinstance(tokens, FoundTokens):
                return tokens
            problem = tokens
        urls = [url for url, verdict in verdicts.items() if token_path(verdict, request) is not None]
        if not urls:
            raise problem or self._engines.why_none(model, request, verdicts)
        for url in self._in_turn(self._staying(model, urls), self._client):
            try:
                return await self._ask(model, url, verdicts[url], request, authorization)
            except Absent:
                # The engine had its endpoint for tokens when its tokens were verified.
                self._engines.doubt(model, url)
                problem = TokensUnknown("unreachable", f"{url} has changed and is being verified again")
            except TokensUnknown as unknown:
                if unknown.reason == "refused" or unknown.broke_engine:
                    raise
                problem = unknown
        assert problem is not None
        raise problem

    def _in_turn(self, urls: list[str], client: EngineClient) -> list[str]:
        """Return the servers to query: the least busy first, and equals in random order."""
        self._rng.shuffle(urls)
        urls.sort(key=client.asks)
        return urls[:ENGINES_TRIED]

    def _staying(self, model: str, urls: list[str]) -> list[str]:
        """Return the engines among `urls` that do not drain, or all of them if each one drains.

        A draining engine may end before it answers.
        """
        draining = {engine.url for engine in self._engines.of(model) if engine.drains}
        return [url for url in urls if url not in draining] or urls

    async def _ask_renderers(
        self, model: str, request: TokenRequest, engines: Mapping[str, Verdict]
    ) -> FoundTokens | TokensUnknown | None:
        """Return the tokens that a renderer makes of a request; else the problem, or None if no renderer is trusted.

        Raises:
            TokensUnknown: The request may have broken a renderer, so it must not be sent to an engine for its tokens.
        """
        problem: TokensUnknown | None = None
        url = ""
        try:
            async with asyncio.timeout(self._timeout_s * RENDERER_SHARE):
                await self._renderers.known(model)
                if not engines and self._engines.of(model):
                    # No engine is verified yet, so there is nothing to compare with.
                    return None
                trusted = self._renderers.trusted(model, request, engines)
                for url in self._in_turn(trusted, self._renderer_client):
                    try:
                        return await self._render(model, url, request)
                    except TokensUnknown as unknown:
                        if unknown.broke_engine:
                            self._renderers.doubt(model, url, unknown.problem)
                            raise
                        problem = TokensUnknown(unknown.reason, f"the renderer at {url}: {unknown.problem}")
                        if unknown.reason == "refused":
                            # Its limits may be others than the engine's, so the engine decides.
                            return TokensUnknown("unverified", problem.problem)
                        self._renderers.doubt(model, url, unknown.problem)
        except TimeoutError:
            text = f"no answer within {self._timeout_s * RENDERER_SHARE:g} s"
            if url:
                self._renderers.doubt(model, url, text)
                problem = TokensUnknown("timeout", f"the renderer at {url}: {text}")
        return problem

    async def _render(self, model: str, url: str, request: TokenRequest) -> FoundTokens:
        """Return the tokens that a renderer makes of a request. Raises TokensUnknown."""
        verdict = self._renderers.way(model, url)
        if verdict is None or token_path(verdict, request) != "render":
            raise TokensUnknown("unreachable", "it is being verified again")
        try:
            return await self._ask(model, url, verdict, request, None, self._renderer_client)
        except Absent as absent:
            raise TokensUnknown("unreachable", str(absent)) from None
        except TokensUnknown as unknown:
            if unknown.reason == "unauthorized":
                raise TokensUnknown("unreachable", KEY_WANTED) from None
            raise

    async def _ask(
        self,
        model: str,
        url: str,
        verdict: Verdict,
        request: TokenRequest,
        authorization: str | None,
        client: EngineClient | None = None,
    ) -> FoundTokens:
        """Query one engine or renderer by its render endpoint or its /tokenize.

        Args:
            model: The model as its workers are registered.
            url: The engine's URL.
            verdict: What is known of the engine.
            request: The request.
            authorization: The header that the client sent for the engine.
            client: Sends the request; None for the client of engines.

        Raises:
            Absent: The engine has no such endpoint.
            TokensUnknown: The engine does not answer with tokens.
        """
        if token_path(verdict, request) == "render":
            path = verdict.ways.render_paths[request.kind]
            answer = await (client or self._client).post(url, path, render_body(request, model), authorization)
            ids, items = await self._parsed(answer, lambda: rendered(request.kind, answer))
            return FoundTokens(ids, "render", items)
        make = partial(tokenize_body, request, verdict.tokenize_quirks, verdict.ways)
        body = make() if request.size_bytes <= READ_BYTES else await self._in_thread(make)
        answer = await self._client.post(url, TOKENIZE_PATH, body, authorization)
        return FoundTokens(await self._parsed(answer, lambda: tokenized_ids(answer)), "tokenize")

    async def _parsed(self, answer: bytes, parse: Callable[[], T]) -> T:
        """Return the parsed answer; a thread parses a large one."""
        return parse() if len(answer) <= PARSE_BYTES else await self._in_thread(parse)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _trusted_local(self, model: str, request: TokenRequest) -> list[RenderQuirks]:
        """Return the quirks to tokenize this request with locally, or none if that cannot be trusted.

        It can be trusted if trials of the request's features gave the tokens of every engine, or if the model has no
        engine to compare with. Engines of another kind, or with another template, have quirks of their own.
        """
        if not self._engines.of(model):
            # There is no engine to compare with; `health` reports that.
            return [self._local[model].likely_quirks()[0]]
        verdicts = list((await self._engines.verdicts(model)).values())
        if any(verdict.unequal(verdict.local, request) is not None for verdict in verdicts):
            return []
        return list(dict.fromkeys(verdict.local_quirks for verdict in verdicts))


def _made(local: LocalMaker, request: TokenRequest, quirks: Sequence[RenderQuirks]) -> NDArray[np.int64]:
    """Return the local tokens of a request if they are the same with each of the engines' quirks.

    Raises:
        TokensUnknown: They differ, or only the engine can read the request.
    """
    ids, *others = [local.ids(request, some_quirks) for some_quirks in quirks]
    if any(not np.array_equal(ids, other_ids) for other_ids in others):
        raise TokensUnknown("unverified", "the model's engines make different prompts of it")
    return ids


def _given(prompt: NDArray[np.int64] | Prompt) -> Prompt:
    """Return the prompt whose token ids the client sent."""
    return prompt if isinstance(prompt, Prompt) else Prompt(len(prompt), prompt, "given")


def _whole(
    request: TokenRequest | NDArray[np.int64] | ListRequest | Prompt,
) -> TokenRequest | NDArray[np.int64] | ListRequest | Prompt:
    """Compute now the properties of a long request that are otherwise computed later, and return the request."""
    if isinstance(request, TokenRequest):
        request.key, request.has_media, request.features  # noqa: B018
    return request


def _unknown(unknown: TokensUnknown, size_bytes: int) -> Prompt:
    """Return the prompt for unknown tokens, with a length estimated from the size of its text."""
    return Prompt(
        estimated_tokens(size_bytes),
        None,
        "none",
        unknown.problem,
        reason=unknown.reason,
        refused=unknown.reason == "refused",
        broke_engine=unknown.broke_engine,
        num_prompts=unknown.num_prompts,
    )


def _has_texts(request: object) -> bool:
    """Return whether it is a list with prompts that are not given as token ids."""
    return isinstance(request, ListRequest) and any(isinstance(prompt, TokenRequest) for prompt in request.prompts)


def given_list(request: ListRequest) -> Prompt:
    """Return the prompts of a list that has token ids only."""
    parts = [Prompt(len(ids), ids, "given") for ids in request.prompts if not isinstance(ids, TokenRequest)]
    return list_of(parts, request.whole)


def list_of(parts: Sequence[Prompt], whole: PromptList) -> Prompt:
    """Return the prompts of a list as one, of which `parts` were looked up."""
    # The first prompt with a problem speaks for the list.
    spokesman = next((part for part in parts if part.reason is not None), parts[0] if parts else UNSPLIT)
    looked_up_tokens = sum(part.num_tokens for part in parts)
    if whole.num_prompts == len(parts):
        num_tokens = looked_up_tokens
    elif whole.counted:
        num_tokens = whole.num_tokens
    else:
        # The texts that are not looked up are assumed to be as long as the others. The sum is larger than that of the
        # known ones, so that the list never looks completely known.
        num_tokens = max(whole.num_tokens, looked_up_tokens * whole.num_prompts // max(1, len(parts)))
    return Prompt(
        num_tokens,
        None,
        spokesman.source,
        spokesman.problem,
        reason=spokesman.reason,
        refused=any(part.refused for part in parts),
        broke_engine=any(part.broke_engine for part in parts),
        num_prompts=whole.num_prompts,
        parts=tuple(parts),
        others_counted=whole.counted or whole.num_prompts == len(parts),
    )


# Stands for the prompts of a list that is too long to be split.
UNSPLIT = Prompt(
    1,
    None,
    "none",
    f"more than {SPLIT_PROMPTS:,} prompts in one list are not looked up; they are placed by load",
    reason="not_looked_up",
)
