# SPDX-License-Identifier: Apache-2.0
"""The engines that may be queried for tokens, and their verification, which is repeated after each restart.

A model with a local tokenizer has its engines judged as soon as they are registered. The engines of other models are
judged when the model's first text comes, so engines whose clients send ids are never probed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from kvrouter.contract.worker_status import TokensStatus
from kvrouter.router.base.common.escaping import printable
from kvrouter.router.route.tokens.engine.client import Engine, EngineClient
from kvrouter.router.route.tokens.engine.probes import RESPONSE_PROBES
from kvrouter.router.route.tokens.engine.renderers import Renderers
from kvrouter.router.route.tokens.engine.verification import EQUAL, LocalMaker, Verdict, Verifier, same_truths
from kvrouter.router.route.tokens.engine.wire import ONLY_RENDERED
from kvrouter.router.route.tokens.prompt_tokens import Reason, Source, TokensUnknown
from kvrouter.router.route.tokens.token_metrics import TokenMetrics
from kvrouter.router.route.tokens.token_request import Feature, TokenRequest

log = logging.getLogger(__name__)

# How often to look for new engines, and how soon to try an engine again that did not answer.
LOOK_S = 0.25
RETRY_S = 2.0
# The time for judging an engine: some tens of probes, one after another. An engine without render endpoints runs ten of
# them, each of which may wait in its queue for some seconds; nothing is verified if one of them is too late.
JUDGE_TIMEOUT_S = 40.0
# The shortest interval between two verifications. Restarts are detected by the engine's event stream, which may restart
# more often than the engine.
MIN_JUDGE_INTERVAL_S = 5.0

PROBE_NAMES: dict[Feature, str] = {
    "chat": "chat",
    "tools": "chat with tools",
    "continued": "chat that is to be continued",
    "text": "text",
    "messages": "message of Anthropic's API",
    "message tools": "message with tools",
    "inline system": "message with a system message among others",
    "responses": "request to /v1/responses",
    "response tools": "request to /v1/responses with tools",
    "unused response tools": "request to /v1/responses with tools that may not be used",
    "response tool kinds": "request to /v1/responses with tools that are no functions",
    "response calls": "request to /v1/responses with calls of functions",
    "response call kinds": "request to /v1/responses with calls of custom tools or in a namespace",
    "message thinking": "message with earlier thinking",
    "thinking on": "message that switches thinking on",
    "thinking off": "message that switches thinking off",
    "message effort": "message with output_config.effort",
}


# The features that only some requests to /v1/responses have.
FURTHER_RESPONSES = RESPONSE_PROBES.keys() - {"responses"}


class UnreadResponses(NamedTuple):
    """A model whose requests to `/v1/responses` are placed by load."""

    model: str
    # Which requests are placed by load, and why, as a sentence.
    problem: str
    # Whether its engines can be started with a render endpoint, which reads them all.
    can_render: bool


class _Judged:
    """One engine of one model, with its verdict or the task that will produce it."""

    def __init__(self) -> None:
        # The life of the engine that was judged.
        self.life = ""
        self.verdict: Verdict | None = None
        # Why there is no verdict; empty if there is one.
        self.problem = "it was not probed yet"
        self.reason: Reason = "unreachable"
        self.task: asyncio.Task[None] | None = None
        # When the engine may be judged next.
        self.next_s = 0.0


class VerifiedEngines:
    """The engines of all models, with their verdicts."""

    def __init__(
        self,
        *,
        models: Callable[[], Iterable[str]],
        engines: Callable[[str], Sequence[Engine]],
        client: EngineClient,
        local: Mapping[str, LocalMaker],
        renderers: Renderers,
        changed: Callable[[str], None],
        metrics: TokenMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._models = models
        # Returns the engines of a model that may be queried now.
        self.of = engines
        self._client = client
        # Local tokenizers, by model.
        self._local = local
        self._renderers = renderers
        self._judge = Verifier(client, local)
        # Called with a model when one of its engines was verified again.
        self._changed = changed
        self._metrics = metrics
        metrics.mismatches.set_function(self._num_mismatches)
        metrics.renderers_unusable.set_function(lambda: len({url for _, url, _ in self.renderer_problems()}))
        # Returns seconds.
        self._clock = clock
        self._judged: dict[tuple[str, str], _Judged] = {}
        # Models for which a text has come.
        self._wanted: set[str] = set()
        # The features of requests to /v1/responses whose tokens no engine could make, by model.
        self._unread_responses: dict[str, set[Feature]] = {}

    async def stop(self) -> None:
        """Cancel all verifications."""
        tasks = [judged.task for judged in self._judged.values() if judged.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def verdicts(self, model: str) -> dict[str, Verdict]:
        """Return the known verdicts on a model's engines, by URL.

        If there is none, it waits for the first of the verifications under way.
        """
        self._wanted.add(model)
        while True:
            self._begin_judging(model)
            states = [(engine.url, self._judged[model, engine.url]) for engine in self.of(model)]
            verdicts = {url: judged.verdict for url, judged in states if judged.verdict is not None}
            tasks = [judged.task for _, judged in states if judged.task is not None]
            if verdicts or not tasks:
                return verdicts
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)

    def _begin_judging(self, model: str) -> None:
        """Start verifying the model's engines that are new, have restarted, or did not answer."""
        now = self._clock()
        for engine in self.of(model):
            judged = self._judged.setdefault((model, engine.url), _Judged())
            current = judged.verdict is not None and judged.life == engine.life
            if judged.task is None and not current and now >= judged.next_s:
                judged.task = asyncio.get_running_loop().create_task(self._judge_one(model, engine, judged))

    async def _judge_one(self, model: str, engine: Engine, judged: _Judged) -> None:
        """Verify one engine, and store its verdict or the problem."""
        try:
            async with asyncio.timeout(JUDGE_TIMEOUT_S):
                verdict = await self._judge.judge(model, engine)
        except (TokensUnknown, TimeoutError) as error:
            if isinstance(error, TokensUnknown):
                judged.problem, judged.reason = error.problem, error.reason
            else:
                judged.problem, judged.reason = f"no answers within {JUDGE_TIMEOUT_S:g} s", "unreachable"
            # The former verdict may be about an earlier life of the engine.
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
        """Have an engine judged again, because it differs from its verdict."""
        judged = self._judged.get((model, url))
        if judged is not None:
            judged.life = ""

    def look(self) -> None:
        """Start verifying new and restarted engines, and forget engines that are gone."""
        models = set(self._models())
        self._wanted &= models
        for model in self._unread_responses.keys() - models:
            del self._unread_responses[model]
        models &= self._wanted | self._local.keys() | set(self._renderers.models)
        for model in models:
            self._begin_judging(model)
        present = {(model, engine.url) for model in models for engine in self.of(model)}
        for key in self._judged.keys() - present:
            judged = self._judged.pop(key)
            if judged.task is not None:
                judged.task.cancel()
            if all(url != key[1] for _, url in self._judged):
                self._client.forget(key[1])
        self._renderers.look(models, present)

    def _num_mismatches(self) -> int:
        return sum(bool(self._problems(*key, judged.verdict)) for key, judged in self._judged.items() if judged.verdict)

    def reads_differently(self, model: str, request: TokenRequest) -> bool:
        """Return whether the model's engines are of kinds that make different chats of such a request."""
        return request.kind in ("messages", "responses") and len({e.ways.reading.name for e in self.of(model)}) > 1

    def all_alike(self, model: str) -> bool:
        """Return whether every engine of the model is judged and all make the same tokens of the probes."""
        states = [self._judged.get((model, engine.url)) for engine in self.of(model)]
        verdicts = [judged.verdict for judged in states if judged is not None and judged.verdict is not None]
        return 0 < len(verdicts) == len(states) and all(same_truths(verdicts[0], other) for other in verdicts[1:])

    def why_none(self, model: str, request: TokenRequest, verdicts: Mapping[str, Verdict]) -> TokensUnknown:
        """Return the error that says why none of the model's engines can make a request's tokens."""
        if not verdicts:
            failed = [judged for (judged_model, _), judged in self._judged.items() if judged_model == model]
            if not failed:
                return TokensUnknown(
                    "no_engine",
                    "no worker of the model that has a url is up, so no engine can tokenize; start an engine, or register "
                    "workers with their url",
                )
            # An engine that refused a verification has not refused this request.
            reason = failed[0].reason if failed[0].reason == "unauthorized" else "unreachable"
            return TokensUnknown(reason, failed[0].problem)
        if self.reads_differently(model, request):
            return TokensUnknown(
                "unverified",
                "the model is served by engines of different kinds, which make different prompts of a "
                f"{PROBE_NAMES[request.kind]}; let each kind serve the model under a name of its own",
            )
        verdict = next(iter(verdicts.values()))
        if request.kind == "responses":
            self._unread_responses.setdefault(model, set()).update(request.features)
            if not verdict.ways.reading.converts_responses:
                return TokensUnknown(
                    "not_looked_up",
                    f"what this engine makes of a {PROBE_NAMES['responses']} is not known, so it is placed by load; clients can "
                    "send x-session-id, which keeps a conversation at its worker",
                )
        for feature in request.features:
            result = verdict.tokenizes.get(feature, EQUAL)
            if result != EQUAL:
                return TokensUnknown(
                    "unverified",
                    f"the engine's /tokenize makes other tokens than the engine itself ({feature}: {result})",
                )
        return TokensUnknown(
            "unsupported", f"only the engine's render endpoint could return its tokens ({verdict.ways.how_to_render})"
        )

    def status(self, model: str, url: str | None) -> TokensStatus:
        """Return how the tokens of texts are found for a worker, and the problems with that."""
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
        problems = self._problems(model, url, verdict)
        if model in self._renderers.models:
            ways["render"] |= bool(self._renderers.features(model, url, verdict))
            own = self._renderers.problems(model, {url: verdict}, PROBE_NAMES)
            problems += [f"renderer {renderer}: {problem}" for renderer, problem in own]
        way = next((name for name, can in ways.items() if can), "none")
        return TokensStatus(way, "; ".join(problems))

    def health(self) -> list[str]:
        """Return the differences to the engines' own tokens, and the renderers' problems, as sentences for `/health`."""
        return [
            f"model {printable(model)}{url and ' at '}{url}: {problem}" for model, url, problem in self.differences()
        ] + [f"model {printable(model)}, renderer {url}: {problem}" for model, url, problem in self.renderer_problems()]

    def renderer_problems(self) -> list[tuple[str, str, str]]:
        """Return the renderers that are away or differ from an engine: model, URL and problem."""
        verdicts: dict[str, dict[str, Verdict]] = {}
        for model, url, verdict in self._present():
            verdicts.setdefault(model, {})[url] = verdict
        return [
            (model, url, problem)
            for model in sorted(set(self._renderers.models) & set(self._models()))
            for url, problem in self._renderers.problems(model, verdicts.get(model, {}), PROBE_NAMES)
        ]

    def has_source(self, model: str) -> bool:
        """Return whether a verified source makes an engine's own tokens of the model's chats and texts."""
        verdicts = [(url, verdict) for judged_model, url, verdict in self._present() if judged_model == model]
        return any(
            verdict.renders
            or {"chat", "text"}
            <= {
                feature
                for results in (verdict.tokenizes, verdict.local)
                for feature, result in results.items()
                if result == EQUAL
            }
            | self._renderers.features(model, url, verdict)
            for url, verdict in verdicts
        )

    def differences(self) -> list[tuple[str, str, str]]:
        """Return where tokens are not known to be the engines' own: model, engine's URL and problem.

        The URL is empty if the problem belongs to no single engine.
        """
        differences = [
            (model, url, problem)
            for model, url, verdict in self._present()
            for problem in self._problems(model, url, verdict)
        ]
        for model in self._local.keys() & set(self._models()):
            if not self.of(model):
                differences.append(
                    (model, "", "its tokenizer here is not verified against any engine, because no worker has a url")
                )
        return differences

    def front_ends(self) -> list[tuple[str, str, str]]:
        """Return the front ends without the engine's render endpoints: model, URL, and what they lack.

        A front end is left out if the router's own tokenizer, or a renderer, makes the tokens of its engine.
        """
        lacking = []
        for model, url, verdict in self._present():
            lost = self._lost(model, url, verdict, verdict.truths)
            if verdict.front_end and lost:
                lacking.append((model, url, _lack(verdict, lost)))
        return lacking

    def unread_responses(self) -> Iterator[UnreadResponses]:
        """Yield the models whose clients sent requests to `/v1/responses` that no engine's verified way can read.

        A model is left out if `front_ends` has it, or if its engines do not serve that path.
        """
        for model, features in self._unread_responses.items():
            verdicts = []
            lost = [feature for feature in PROBE_NAMES if feature in features]
            for other, url, verdict in self._present():
                if other == model:
                    verdicts.append(verdict)
                    lost = self._lost(model, url, verdict, lost)
            if not verdicts or not lost or verdicts[0].front_end:
                continue
            problem = f"{_names(lost)} is placed by load"
            if reason := verdicts[0].tokenizes.get(lost[0]):
                problem += f", because the engine's /tokenize makes other tokens than the engine itself ({reason})"
            yield UnreadResponses(model, problem, bool(verdicts[0].ways.render_paths))

    def _lost(self, model: str, url: str, verdict: Verdict, features: Iterable[Feature]) -> list[Feature]:
        """Return the features for which no renderer, no tokenizer in the router and no endpoint makes the engine's tokens."""
        rendered = self._renderers.features(model, url, verdict)
        return [feature for feature in features if feature not in rendered and not _reads(verdict, feature)]

    def _present(self) -> Iterator[tuple[str, str, Verdict]]:
        """Yield model, URL and verdict of each judged engine that is registered and not down.

        `look` forgets the others later; until then, nothing is reported about them.
        """
        models = {model for model, _ in self._judged}
        urls = {model: {engine.url for engine in self.of(model)} for model in models}
        for (model, url), judged in self._judged.items():
            if judged.verdict is not None and url in urls[model]:
                yield model, url, judged.verdict

    def _problems(self, model: str, url: str, verdict: Verdict) -> list[str]:
        """Return a sentence for each source and kind of request whose tokens differ from this engine's own.

        The sources are the local tokenizer, the engine's /tokenize, and the model's other engines.
        """
        problems = []
        # A feature for which a renderer makes the tokens needs no other source.
        rendered = self._renderers.features(model, url, verdict)
        tokenizes = {feature: result for feature, result in verdict.tokenizes.items() if feature not in rendered}
        for name, results in (("the tokenizer here", verdict.local), ("its /tokenize", tokenizes)):
            for feature, result in results.items():
                # A request that the engine itself refuses is no difference. Requests to /v1/responses are reported only if
                # clients send some (`unread_responses`), because versions of vLLM read them differently.
                if (
                    result != EQUAL
                    and feature not in RESPONSE_PROBES
                    and not isinstance(verdict.truths.get(feature), str)
                ):
                    problems.append(f"{name} makes other tokens of a {PROBE_NAMES[feature]} than the engine: {result}")
        others = (
            state.verdict
            for (other_model, other_url), state in self._judged.items()
            if other_model == model and other_url != url
        )
        if any(other is not None and not same_truths(verdict, other) for other in others):
            problems.append(
                "engines of the model make different tokens of one text; give them the same template and flags"
            )
        return problems


def _lack(verdict: Verdict, lost: Sequence[Feature]) -> str:
    """Return a sentence that says which requests are placed by load because of a front end without render endpoints."""
    return (
        f"{verdict.front_end} has no render endpoints ({', '.join(sorted(verdict.ways.render_paths.values()))}), so these "
        f"are placed by load: {_names(lost)}"
    )


def _names(features: Sequence[Feature]) -> str:
    """Return the names of requests with these features, for messages."""
    whole = "responses" in features
    names = [PROBE_NAMES[feature] for feature in features if not whole or feature not in FURTHER_RESPONSES]
    return ", ".join(f"each {name}" for name in names)


def _reads(verdict: Verdict, feature: Feature) -> bool:
    """Return whether the tokens of requests with this feature are found, or the engine itself refuses such requests."""
    renders = verdict.renders_responses if feature in RESPONSE_PROBES else verdict.renders
    equal = EQUAL in (verdict.tokenizes.get(feature), verdict.local.get(feature))
    return renders or equal or isinstance(verdict.truths.get(feature), str)


def token_path(verdict: Verdict, request: TokenRequest) -> Source | None:
    """Return the way in which this engine can be queried for the request's tokens, or None if there is none."""
    if verdict.renders_kind(request.kind):
        return "render"
    if verdict.unequal(verdict.tokenizes, request) is None and _tokenizable(request):
        return "tokenize"
    return None


def _tokenizable(request: TokenRequest) -> bool:
    """Return whether /tokenize can read a request of this form."""
    return request.media_at is None and not any(request.has(name) for name in ONLY_RENDERED)
