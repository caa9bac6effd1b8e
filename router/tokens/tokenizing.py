# SPDX-License-Identifier: Apache-2.0
"""The tokens of what clients send: given, made here, or asked of an engine. The async shell around the pure parts.

Nothing here waits without a deadline, and nothing long runs in the event loop. What cannot be found out in time is a Prompt without
ids, with its reason: the request is then placed by load.
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

from kvrouter.router.metrics import Metrics
from kvrouter.router.printable import printable
from kvrouter.router.status import TokensStatus
from kvrouter.router.tokens.asked import Asked, Feature, read
from kvrouter.router.tokens.engine_client import Absent, Engine, EngineClient
from kvrouter.router.tokens.engine_forms import (
    HOW_TO_RENDER,
    ONLY_RENDERED,
    RENDER_PATHS,
    TOKENIZE_PATH,
    Habits,
    render_body,
    rendered_ids,
    tokenize_body,
    tokenized_ids,
)
from kvrouter.router.tokens.judging import EQUAL, Judge, LocalMaker, Verdict, same_truths
from kvrouter.router.tokens.memory import Key, PromptMemory
from kvrouter.router.tokens.prompt import Prompt, Source, Unknown, estimated_tokens

log = logging.getLogger(__name__)

# A body up to this is read, and a prompt up to that tokenized here, within half a millisecond (14 us for 2 kB, 126 us for 32 kB;
# 0.6 ms for 2 kB); longer ones go to a thread.
READ_BYTES = 64 * 1024
MAKE_BYTES = 2 * 1024
# Tokenizing is work for a core; more threads would take the loop's.
THREADS = 2
# Requests that wait for tokens at once; each holds its body. Those beyond are placed by load.
MAX_WAITING = 1_024
# How often it is looked for new engines, and how soon one is tried again that did not answer.
LOOK_S = 0.25
RETRY_S = 2.0
# Some tens of probes, and an engine that is busy.
JUDGE_TIMEOUT_S = 15.0
# Where one does not answer, another may.
ENGINES_TRIED = 2
# Numbers in this much JSON are read in below a millisecond.
PARSE_BYTES = 1024**2
# A life of an engine is told by its event stream, which may begin anew more often than the engine.
MIN_JUDGE_INTERVAL_S = 5.0
# What a picture or a sound comes to, for load alone; engines take from some hundred to some thousand tokens.
TOKENS_PER_MEDIA_MESSAGE = 1_024
# Two texts that have no token in common, in place of a message with media.
STAND_INS = ("A", "7")

PROBE_NAMES: dict[Feature, str] = {
    "chat": "chat",
    "tools": "chat with tools",
    "continued": "chat that is to be continued",
    "text": "text",
}


Found = tuple[NDArray[np.int64], Source]
T = TypeVar("T")


class _Judged:
    """One engine of one model: its verdict, or the task that is to bring it."""

    def __init__(self) -> None:
        self.life = ""
        self.verdict: Verdict | None = None
        self.problem = "it was not asked yet"
        self.task: asyncio.Task[None] | None = None
        self.next_s = 0.0


class Tokenizing:
    """engines: those of a model that may be asked now. session: for those. local: tokenizers here, by model. clock: in seconds."""

    def __init__(
        self,
        *,
        models: Callable[[], Iterable[str]],
        engines: Callable[[str], Sequence[Engine]],
        session: aiohttp.ClientSession,
        local: Mapping[str, LocalMaker],
        timeout_s: float,
        metrics: Metrics,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._models = models
        self._engines = engines
        self._client = EngineClient(session)
        self._local = local
        self._timeout_s = timeout_s
        self._metrics = metrics
        self._clock = clock
        self._rng = rng
        self._memory = PromptMemory(clock)
        self._judge = Judge(self._client, local)
        self._judged: dict[tuple[str, str], _Judged] = {}
        # By what is asked and with which key; those that wait for the same share one.
        self._under_way: dict[tuple[str, bytes, str | None], asyncio.Task[Found]] = {}
        # Models of which a text was asked; where none ever is, no engine is bothered with probes.
        self._wanted: set[str] = set()
        self._waiting = 0
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokens")
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look for engines and judge them, until `stop`."""
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def stop(self) -> None:
        tasks = [self._watching, *self._under_way.values(), *(judged.task for judged in self._judged.values())]
        running = [task for task in tasks if task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def prompt(self, path: str, model: str, raw: bytes, *, authorization: str | None = None) -> Prompt:
        """The tokens of a body that a client sent to `path`, for `model` as its workers are registered.

        authorization: the header that the client sent for the engine. Raises BadQuestion where the body cannot be read."""
        start_s = self._clock()
        prompt = await self._prompt(path, model, raw, authorization)
        self._metrics.count_prompt(prompt.source, prompt.reason, self._clock() - start_s)
        return prompt

    async def _prompt(self, path: str, model: str, raw: bytes, authorization: str | None) -> Prompt:
        size_bytes = len(raw)
        if self._waiting >= MAX_WAITING:
            return _unknown(
                Unknown("busy", f"{MAX_WAITING} requests wait for their tokens; add router processes"), size_bytes
            )
        self._waiting += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                asked = (
                    read(path, raw) if size_bytes <= READ_BYTES else await self._in_thread(lambda: _whole(path, raw))
                )
                if not isinstance(asked, Asked):
                    return Prompt(len(asked), asked, "given")
                if asked.media_at is not None:
                    return await self._before_media(model, asked, asked.media_at, authorization)
                ids, source = await self._ids(model, asked, authorization)
                return Prompt(len(ids), ids, source, replaces=self._all_alike(model))
        except Unknown as unknown:
            return _unknown(unknown, size_bytes)
        except TimeoutError:
            why = f"its tokens were not found within {self._timeout_s:g} s: engines answer slowly; raise tokenize_timeout_s"
            return _unknown(Unknown("timeout", why), size_bytes)
        finally:
            self._waiting -= 1

    async def _before_media(self, model: str, asked: Asked, at: int, authorization: str | None) -> Prompt:
        """What comes before the first message with more than text: that which two chats have in common that differ in it alone."""
        before = asked.messages[:at]
        role = asked.messages[at].get("role")
        both = []
        for text in STAND_INS:
            stand_in = asked.with_fields(
                messages=[*before, {"role": role, "content": text}],
                continue_final_message=None,
                add_generation_prompt=None,
            )
            both.append(await self._ids(model, stand_in, authorization))
        (one, source), (other, _) = both
        most = min(len(one), len(other))
        apart = np.flatnonzero(one[:most] != other[:most])
        # Less one: what stands before the message's text may become one token with what is put there instead.
        known = max(0, (int(apart[0]) if len(apart) else most) - 1)
        rest = len(asked.messages) - at
        return Prompt(
            num_tokens=known + rest * TOKENS_PER_MEDIA_MESSAGE,
            token_ids=one[:known],
            source=source,
            problem="its messages have more than text: tokens are known up to the first that has",
            known_tokens=known,
            reason="media",
        )

    async def _ids(self, model: str, asked: Asked, authorization: str | None) -> Found:
        """Raises Unknown."""
        local = self._local.get(model)
        if local is not None:
            habits = await self._trusted_local(model, asked)
            if habits is not None:
                try:
                    if asked.size_bytes <= MAKE_BYTES:
                        return local.ids(asked, habits), "local"
                    return await self._in_thread(lambda: local.ids(asked, habits)), "local"
                except Unknown as unknown:
                    # What it does not read, or its template refuses, the engine decides; where there is one.
                    if not self._engines(model):
                        raise
                    log.debug("left to the engine", extra={"reason": unknown.problem})
        key = (model, asked.key)
        known = self._memory.get(key)
        if known is not None:
            self._metrics.prompt_memory_hits.inc()
            return known
        flight = (*key, authorization)
        task = self._under_way.get(flight)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._asked_in_time(key, asked, authorization))
            self._under_way[flight] = task
            task.add_done_callback(lambda done: self._landed(flight, done))
        # Others may wait for the same.
        return await asyncio.shield(task)

    def _landed(self, flight: tuple[str, bytes, str | None], task: asyncio.Task[Found]) -> None:
        del self._under_way[flight]
        if not task.cancelled():
            # All who waited may be gone; then nobody else looks at it.
            task.exception()

    async def _asked_in_time(self, key: Key, asked: Asked, authorization: str | None) -> Found:
        async with asyncio.timeout(self._timeout_s):
            found = await self._ask_engines(key[0], asked, authorization)
        self._memory.put(key, *found)
        return found

    async def _ask_engines(self, model: str, asked: Asked, authorization: str | None) -> Found:
        """Raises Unknown."""
        self._wanted.add(model)
        verdicts = await self._verdicts(model)
        able = [url for url, verdict in verdicts.items() if _way(verdict, asked) is not None]
        if not able:
            raise self._why_none(model, asked, verdicts)
        # The least asked first, equals in any order.
        self._rng.shuffle(able)
        able.sort(key=self._client.asks)
        problem = None
        for url in able[:ENGINES_TRIED]:
            try:
                return await self._ask(url, verdicts[url], asked, authorization)
            except Absent:
                # It had the endpoint when it was judged.
                self._judged[model, url].life = ""
                problem = Unknown("unreachable", f"{url} is not what it was; it is judged anew")
            except Unknown as unknown:
                if unknown.reason == "refused":
                    raise
                problem = unknown
        assert problem is not None
        raise problem

    async def _ask(self, url: str, verdict: Verdict, asked: Asked, authorization: str | None) -> Found:
        """Raises Absent and Unknown."""
        if _way(verdict, asked) == "render":
            answer = await self._client.post(url, RENDER_PATHS[asked.kind], render_body(asked), authorization)
            return await self._parsed(answer, lambda: rendered_ids(asked.kind, answer)), "render"
        answer = await self._client.post(
            url, TOKENIZE_PATH, tokenize_body(asked, verdict.tokenize_habits), authorization
        )
        return await self._parsed(answer, lambda: tokenized_ids(answer)), "tokenize"

    async def _parsed(self, answer: bytes, parse: Callable[[], NDArray[np.int64]]) -> NDArray[np.int64]:
        return parse() if len(answer) <= PARSE_BYTES else await self._in_thread(parse)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _trusted_local(self, model: str, asked: Asked) -> Habits | None:
        """What to make the prompt here with; None where it is not known to become what the engines make."""
        if not self._engines(model):
            # Nobody to hold it against; `health` says so.
            return self._local[model].likely_habits()[0]
        verdicts = list((await self._verdicts(model)).values())
        trusted = all(verdict.local.get(feature) == EQUAL for verdict in verdicts for feature in asked.features)
        return verdicts[0].local_habits if verdicts and trusted else None

    async def _verdicts(self, model: str) -> dict[str, Verdict]:
        """Those that are known, by URL; waits for the first where none is and one is under way."""
        while True:
            self._begin_judging(model)
            mine = [(engine.url, self._judged[model, engine.url]) for engine in self._engines(model)]
            found = {url: judged.verdict for url, judged in mine if judged.verdict is not None}
            tasks = [judged.task for _, judged in mine if judged.task is not None]
            if found or not tasks:
                return found
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)

    def _begin_judging(self, model: str) -> None:
        now = self._clock()
        for engine in self._engines(model):
            judged = self._judged.setdefault((model, engine.url), _Judged())
            known = judged.verdict is not None and judged.life == engine.life
            if judged.task is None and not known and now >= judged.next_s:
                judged.task = asyncio.get_running_loop().create_task(self._judge_one(model, engine, judged))

    async def _judge_one(self, model: str, engine: Engine, judged: _Judged) -> None:
        try:
            async with asyncio.timeout(JUDGE_TIMEOUT_S):
                verdict = await self._judge.judge(model, engine.url)
        except (Unknown, TimeoutError) as error:
            judged.problem = error.problem if isinstance(error, Unknown) else f"no answers within {JUDGE_TIMEOUT_S:g} s"
            # Whatever it was before, it is another life now.
            judged.verdict = None
            judged.next_s = self._clock() + RETRY_S
            log.debug("engine not judged", extra={"url": engine.url, "reason": judged.problem})
        except Exception:
            judged.next_s = self._clock() + RETRY_S
            self._metrics.internal_errors.labels("tokens").inc()
            log.exception("engine not judged", extra={"url": engine.url})
        else:
            self._memory.forget(model)
            judged.verdict, judged.life, judged.problem = verdict, engine.life, ""
            judged.next_s = self._clock() + MIN_JUDGE_INTERVAL_S
            for problem in self._problems(model, engine.url, verdict):
                log.warning("tokens differ", extra={"model": model, "url": engine.url, "reason": problem})
        finally:
            judged.task = None

    async def _watch(self) -> None:
        while True:
            try:
                self._look()
            except Exception:
                self._metrics.internal_errors.labels("tokens").inc()
                log.exception("engines not looked at")
            await asyncio.sleep(LOOK_S)

    def _look(self) -> None:
        models = set(self._models())
        self._wanted &= models
        models &= self._wanted | self._local.keys()
        for model in models:
            self._begin_judging(model)
        there = {(model, engine.url) for model in models for engine in self._engines(model)}
        for key in self._judged.keys() - there:
            judged = self._judged.pop(key)
            if judged.task is not None:
                judged.task.cancel()
            self._client.forget(key[1])
        self._metrics.prompt_memory_bytes.set(
            self._memory.held_bytes + sum(local.held_bytes for local in self._local.values())
        )
        self._metrics.token_mismatches.set(
            sum(bool(self._problems(*key, judged.verdict)) for key, judged in self._judged.items() if judged.verdict)
        )

    def _all_alike(self, model: str) -> bool:
        """Whether every engine of the model has been judged, and makes the same of the probes."""
        known = [self._judged.get((model, engine.url)) for engine in self._engines(model)]
        verdicts = [judged.verdict for judged in known if judged is not None and judged.verdict is not None]
        return 0 < len(verdicts) == len(known) and all(same_truths(verdicts[0], other) for other in verdicts[1:])

    def _why_none(self, model: str, asked: Asked, verdicts: Mapping[str, Verdict]) -> Unknown:
        if not verdicts:
            problems = [judged.problem for (of, _), judged in self._judged.items() if of == model]
            if not problems:
                return Unknown("no_engine", "no worker of the model has a url to ask for tokens; register it with one")
            return Unknown("unreachable", problems[0])
        verdict = next(iter(verdicts.values()))
        for feature in asked.features:
            why = verdict.tokenizes.get(feature, EQUAL)
            if why != EQUAL:
                return Unknown(
                    "unverified", f"the engine's /tokenize is not what it makes of a request ({feature}: {why})"
                )
        return Unknown("unsupported", f"only the engine's render endpoint could tell its tokens ({HOW_TO_RENDER})")

    def status(self, model: str, url: str | None) -> TokensStatus:
        """How the tokens of texts for this worker are found, and what is wrong with that."""
        judged = None if url is None else self._judged.get((model, url))
        if url is None:
            return TokensStatus("local" if model in self._local else "none", "it has no url to ask for tokens")
        if judged is None or judged.verdict is None:
            return TokensStatus("none", "" if judged is None else judged.problem)
        verdict = judged.verdict
        ways: dict[Source, bool] = {
            "local": EQUAL in verdict.local.values(),
            "render": verdict.renders,
            "tokenize": EQUAL in verdict.tokenizes.values(),
        }
        way = next((name for name, can in ways.items() if can), "none")
        return TokensStatus(way, "; ".join(self._problems(model, url, verdict)))

    def health(self) -> list[str]:
        """Which tokens are not what the engines make, for `/health`."""
        found = []
        for (model, url), judged in self._judged.items():
            if judged.verdict is not None:
                found += [
                    f"model {printable(model)} at {url}: {problem}"
                    for problem in self._problems(model, url, judged.verdict)
                ]
        for model in self._local.keys() & set(self._models()):
            if not self._engines(model):
                found.append(
                    f"model {printable(model)}: its tokenizer here is not held against any engine, as no worker has a url"
                )
        return found

    def _problems(self, model: str, url: str, verdict: Verdict) -> list[str]:
        found = []
        for name, judged in (("the tokenizer here", verdict.local), ("its /tokenize", verdict.tokenizes)):
            for feature, why in judged.items():
                # What the engine refuses itself is no difference.
                if why != EQUAL and not isinstance(verdict.truths.get(feature), str):
                    found.append(f"{name} makes other tokens of a {PROBE_NAMES[feature]} than the engine: {why}")
        others = (of.verdict for (of_model, of_url), of in self._judged.items() if of_model == model and of_url != url)
        if any(other is not None and not same_truths(verdict, other) for other in others):
            found.append(
                "engines of the model make different tokens of one text; give them the same template and flags"
            )
        return found


def _way(verdict: Verdict, asked: Asked) -> Source | None:
    """How this engine can be asked."""
    if verdict.renders:
        return "render"
    if all(verdict.tokenizes.get(feature) == EQUAL for feature in asked.features) and _tokenizable(asked):
        return "tokenize"
    return None


def _tokenizable(asked: Asked) -> bool:
    return asked.kind != "responses" and not any(asked.has(name) for name in ONLY_RENDERED)


def _whole(path: str, raw: bytes) -> Asked | NDArray[np.int64]:
    """`read`, with all that is worked out of a long body later."""
    asked = read(path, raw)
    if isinstance(asked, Asked) and asked.media_at is None:
        asked.key, asked.features  # noqa: B018
    return asked


def _unknown(unknown: Unknown, size_bytes: int) -> Prompt:
    return Prompt(
        estimated_tokens(size_bytes),
        None,
        "none",
        unknown.problem,
        reason=unknown.reason,
        refused=unknown.reason == "refused",
    )
