# SPDX-License-Identifier: Apache-2.0
"""The engines that may be queried for tokens, and their verification: done when needed, and again in each of
its lives.

With a tokenizer here engines are judged when they are registered; else when the first text of their model comes, so
that engines whose clients send ids are never probed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvrouter.router.base.common.escaping import printable
from kvrouter.router.model.workers.worker_status import TokensStatus
from kvrouter.router.route.tokens.engine.client import Engine, EngineClient
from kvrouter.router.route.tokens.engine.verification import EQUAL, LocalMaker, Verdict, Verifier, same_truths
from kvrouter.router.route.tokens.engine.wire import ONLY_RENDERED
from kvrouter.router.route.tokens.prompt_tokens import Reason, Source, TokensUnknown
from kvrouter.router.route.tokens.token_metrics import TokenMetrics
from kvrouter.router.route.tokens.token_request import Feature, TokenRequest

log = logging.getLogger(__name__)

# How often it is looked for new engines, and how soon one is tried again that did not answer.
LOOK_S = 0.25
RETRY_S = 2.0
# Some tens of probes, and an engine that is busy.
JUDGE_TIMEOUT_S = 15.0
# An engine's restarts are detected by its event stream, which may restart more often than the engine.
MIN_JUDGE_INTERVAL_S = 5.0

PROBE_NAMES: dict[Feature, str] = {
    "chat": "chat",
    "tools": "chat with tools",
    "continued": "chat that is to be continued",
    "text": "text",
    "messages": "message of Anthropic's API",
    "message tools": "message with tools",
    "inline system": "message with a system message among others",
}


class _Judged:
    """One engine of one model: its verdict, or the task that is to bring it."""

    def __init__(self) -> None:
        self.life = ""
        self.verdict: Verdict | None = None
        self.problem = "it was not probed yet"
        self.reason: Reason = "unreachable"
        self.task: asyncio.Task[None] | None = None
        self.next_s = 0.0


class VerifiedEngines:
    """engines: those of a model that may be queried now. local: tokenizers here, by model. changed: called with a model
    when one of its engines was verified again. clock: in seconds."""

    def __init__(
        self,
        *,
        models: Callable[[], Iterable[str]],
        engines: Callable[[str], Sequence[Engine]],
        client: EngineClient,
        local: Mapping[str, LocalMaker],
        changed: Callable[[str], None],
        metrics: TokenMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._models = models
        self.of = engines
        self._client = client
        self._local = local
        self._judge = Verifier(client, local)
        self._changed = changed
        self._metrics = metrics
        self._clock = clock
        self._judged: dict[tuple[str, str], _Judged] = {}
        # Models that have got a text.
        self._wanted: set[str] = set()

    async def stop(self) -> None:
        tasks = [judged.task for judged in self._judged.values() if judged.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def verdicts(self, model: str) -> dict[str, Verdict]:
        """Those that are known, by URL; waits for the first where none is and one is under way."""
        self._wanted.add(model)
        while True:
            self._begin_judging(model)
            mine = [(engine.url, self._judged[model, engine.url]) for engine in self.of(model)]
            found = {url: judged.verdict for url, judged in mine if judged.verdict is not None}
            tasks = [judged.task for _, judged in mine if judged.task is not None]
            if found or not tasks:
                return found
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)

    def _begin_judging(self, model: str) -> None:
        now = self._clock()
        for engine in self.of(model):
            judged = self._judged.setdefault((model, engine.url), _Judged())
            known = judged.verdict is not None and judged.life == engine.life
            if judged.task is None and not known and now >= judged.next_s:
                judged.task = asyncio.get_running_loop().create_task(self._judge_one(model, engine, judged))

    async def _judge_one(self, model: str, engine: Engine, judged: _Judged) -> None:
        try:
            async with asyncio.timeout(JUDGE_TIMEOUT_S):
                verdict = await self._judge.judge(model, engine)
        except (TokensUnknown, TimeoutError) as error:
            if isinstance(error, TokensUnknown):
                judged.problem, judged.reason = error.problem, error.reason
            else:
                judged.problem, judged.reason = f"no answers within {JUDGE_TIMEOUT_S:g} s", "unreachable"
            # The engine's verdict was about another life.
            judged.verdict = None
            judged.next_s = self._clock() + RETRY_S
            log.debug("engine not judged", extra={"url": engine.url, "reason": judged.problem})
        except Exception:
            judged.next_s = self._clock() + RETRY_S
            self._metrics.internal_errors.labels("tokens").inc()
            log.exception("engine not judged", extra={"url": engine.url})
        else:
            judged.verdict, judged.life, judged.problem = verdict, engine.life, ""
            judged.next_s = self._clock() + MIN_JUDGE_INTERVAL_S
            self._changed(model)
            for problem in self._problems(model, engine.url, verdict):
                log.warning("tokens differ", extra={"model": model, "url": engine.url, "reason": problem})
        finally:
            judged.task = None

    def doubt(self, model: str, url: str) -> None:
        """It is not what it was when it was judged."""
        judged = self._judged.get((model, url))
        if judged is not None:
            judged.life = ""

    def look(self) -> None:
        """Verifies new and restarted engines, and forgets those that are gone."""
        models = set(self._models())
        self._wanted &= models
        models &= self._wanted | self._local.keys()
        for model in models:
            self._begin_judging(model)
        there = {(model, engine.url) for model in models for engine in self.of(model)}
        for key in self._judged.keys() - there:
            judged = self._judged.pop(key)
            if judged.task is not None:
                judged.task.cancel()
            if all(url != key[1] for _, url in self._judged):
                self._client.forget(key[1])
        self._metrics.mismatches.set(
            sum(bool(self._problems(*key, judged.verdict)) for key, judged in self._judged.items() if judged.verdict)
        )

    def all_alike(self, model: str) -> bool:
        """Whether every engine of the model has been judged, and makes the same of the probes."""
        known = [self._judged.get((model, engine.url)) for engine in self.of(model)]
        verdicts = [judged.verdict for judged in known if judged is not None and judged.verdict is not None]
        return 0 < len(verdicts) == len(known) and all(same_truths(verdicts[0], other) for other in verdicts[1:])

    def why_none(self, model: str, asked: TokenRequest, verdicts: Mapping[str, Verdict]) -> TokensUnknown:
        if not verdicts:
            failed = [judged for (of, _), judged in self._judged.items() if of == model]
            if not failed:
                return TokensUnknown(
                    "no_engine", "no worker of the model has a url, so no engine can tokenize; register one with a url"
                )
            # An engine that refused a verification has not refused this request.
            reason = failed[0].reason if failed[0].reason == "unauthorized" else "unreachable"
            return TokensUnknown(reason, failed[0].problem)
        verdict = next(iter(verdicts.values()))
        for feature in asked.features:
            why = verdict.tokenizes.get(feature, EQUAL)
            if why != EQUAL:
                return TokensUnknown(
                    "unverified", f"the engine's /tokenize differs from how it reads a request ({feature}: {why})"
                )
        return TokensUnknown(
            "unsupported", f"only the engine's render endpoint could return its tokens ({verdict.ways.how_to_render})"
        )

    def status(self, model: str, url: str | None) -> TokensStatus:
        """How the tokens of texts for this worker are found, and what is wrong with that."""
        judged = None if url is None else self._judged.get((model, url))
        if url is None:
            return TokensStatus("local" if model in self._local else "none", "it has no url, so it cannot tokenize")
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
        return [
            f"model {printable(model)}{url and ' at '}{url}: {problem}" for model, url, problem in self.differences()
        ]

    def differences(self) -> list[tuple[str, str, str]]:
        """Model, URL of the engine (empty: of none) and problem, wherever tokens are not known to be the engine's."""
        found = []
        for (model, url), judged in self._judged.items():
            if judged.verdict is not None:
                found += [(model, url, problem) for problem in self._problems(model, url, judged.verdict)]
        for model in self._local.keys() & set(self._models()):
            if not self.of(model):
                found.append(
                    (model, "", "its tokenizer here is not verified against any engine, because no worker has a url")
                )
        return found

    def _problems(self, model: str, url: str, verdict: Verdict) -> list[str]:
        found = []
        for name, judged in (("the tokenizer here", verdict.local), ("its /tokenize", verdict.tokenizes)):
            for feature, why in judged.items():
                # A request that the engine refuses too is no difference.
                if why != EQUAL and not isinstance(verdict.truths.get(feature), str):
                    found.append(f"{name} makes other tokens of a {PROBE_NAMES[feature]} than the engine: {why}")
        others = (of.verdict for (of_model, of_url), of in self._judged.items() if of_model == model and of_url != url)
        if any(other is not None and not same_truths(verdict, other) for other in others):
            found.append(
                "engines of the model make different tokens of one text; give them the same template and flags"
            )
        return found


def token_path(verdict: Verdict, asked: TokenRequest) -> Source | None:
    """How this engine can be queried."""
    if verdict.renders_messages if asked.kind == "messages" else verdict.renders:
        return "render"
    if all(verdict.tokenizes.get(feature) == EQUAL for feature in asked.features) and _tokenizable(asked):
        return "tokenize"
    return None


def _tokenizable(asked: TokenRequest) -> bool:
    return asked.kind != "responses" and asked.media_at is None and not any(asked.has(name) for name in ONLY_RENDERED)
