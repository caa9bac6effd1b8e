# SPDX-License-Identifier: Apache-2.0
"""The renderers that the settings name, and their verification against the engines of their models.

A renderer returns the tokens of requests and runs no model (`vllm launch render`, `vllm-rs render`). It is no worker. Its
tokens of the probes are compared with those of each engine of the model, feature by feature, as for a tokenizer in the
router. Not all renderers say when they were started, so they are verified again at short intervals.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kvrouter.router.model.engines.engine import TokenEndpoints
from kvrouter.router.model.workers.renderer_spec import RendererSpec
from kvrouter.router.route.tokens.engine.client import Engine, EngineClient
from kvrouter.router.route.tokens.engine.probes import agrees, difference
from kvrouter.router.route.tokens.engine.verification import EQUAL, Verdict, Verifier
from kvrouter.router.route.tokens.prompt_tokens import TokensUnknown
from kvrouter.router.route.tokens.token_metrics import TokenMetrics
from kvrouter.router.route.tokens.token_request import LEFT_TO_THE_ENGINE, THINKING_OFF, Feature, TokenRequest

log = logging.getLogger(__name__)

# The time for one verification: some probes of a few tokens, which a renderer answers within milliseconds.
VERIFY_TIMEOUT_S = 5.0
# The interval of verifications. A renderer that restarts with another template is noticed within it, and its probes cost
# the renderer some 10 ms each time.
VERIFY_EVERY_S = 5.0
# The pause before a renderer that failed is tried again; it doubles with each failure up to the longest pause.
RETRY_S = 0.5
LONGEST_RETRY_S = 30.0
KEY_WANTED = "it wants an API key: --renderer MODEL=URL,key=NAME, with NAME of --worker-api-keys-file"


class _Renderer:
    """One renderer of one model."""

    def __init__(self, spec: RendererSpec) -> None:
        self.spec = spec
        # Its own tokens of the probes; None while it cannot be used.
        self.verdict: Verdict | None = None
        # Why it cannot be used; empty if it can, and before the first verification has ended.
        self.problem = ""
        self.task: asyncio.Task[None] | None = None
        # When it may be verified next, and the pause after the next failure.
        self.next_s = 0.0
        self.retry_s = RETRY_S

    @property
    def is_new(self) -> bool:
        """Whether no verification has ended yet."""
        return self.verdict is None and not self.problem


class _Comparison(NamedTuple):
    """A renderer's tokens of the probes, compared with those of one engine."""

    rendering: Verdict
    engine: Verdict
    # For each feature, EQUAL or how the tokens differ from the engine's.
    results: dict[Feature, str]


class Renderers:
    """All renderers, by model."""

    def __init__(
        self,
        specs: Sequence[RendererSpec],
        *,
        client: EngineClient,
        ways: TokenEndpoints,
        changed: Callable[[str], None],
        metrics: TokenMetrics,
        clock: Callable[[], float],
    ) -> None:
        """Create the renderers without starting anything.

        Args:
            specs: The renderers of the settings.
            client: Sends requests to renderers.
            ways: The endpoints of a renderer.
            changed: Called with a model when one of its renderers makes other tokens than before.
            metrics: The metrics of finding tokens.
            clock: Returns seconds.
        """
        self._renderers: dict[str, list[_Renderer]] = {}
        for spec in specs:
            self._renderers.setdefault(spec.model, []).append(_Renderer(spec))
        self._ways = ways
        self._verifier = Verifier(client, {})
        self._changed = changed
        self._metrics = metrics
        self._clock = clock
        # The keys are a model, a renderer's URL and an engine's URL.
        self._comparisons: dict[tuple[str, str, str], _Comparison] = {}
        # The models with a renderer.
        self.models: Collection[str] = self._renderers.keys()

    async def stop(self) -> None:
        """Cancel all verifications."""
        tasks = [renderer.task for renderer in self._all() if renderer.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _all(self) -> Iterator[_Renderer]:
        for renderers in self._renderers.values():
            yield from renderers

    def look(self, models: Collection[str], engines: Collection[tuple[str, str]]) -> None:
        """Start the verifications that are due, and forget engines that are gone.

        Args:
            models: The models that have workers.
            engines: Model and URL of each engine that is present.
        """
        for model in self._renderers.keys() & set(models):
            self._begin(model)
        for key in [key for key in self._comparisons if (key[0], key[2]) not in engines]:
            del self._comparisons[key]

    def _begin(self, model: str) -> None:
        now = self._clock()
        for renderer in self._renderers.get(model, ()):
            if renderer.task is None and now >= renderer.next_s:
                renderer.task = asyncio.get_running_loop().create_task(self._verify(renderer))

    async def known(self, model: str) -> None:
        """Wait until a renderer of the model can be used, or each of them was tried."""
        self._begin(model)
        renderers = self._renderers.get(model, ())
        while all(renderer.verdict is None for renderer in renderers):
            tasks = [renderer.task for renderer in renderers if renderer.is_new and renderer.task is not None]
            if not tasks:
                return
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)

    async def _verify(self, renderer: _Renderer) -> None:
        """Verify a renderer by its tokens of the probes, and record the result."""
        spec = renderer.spec
        try:
            async with asyncio.timeout(VERIFY_TIMEOUT_S):
                verdict = await self._verifier.judge(spec.model, Engine(spec.url, "", self._ways))
        except TokensUnknown as unknown:
            self._fail(renderer, _problem(unknown))
        except TimeoutError:
            self._fail(renderer, f"no answers within {VERIFY_TIMEOUT_S:g} s")
        except Exception:
            self._metrics.internal_errors.labels("tokens").inc()
            log.exception("renderer not verified", extra={"url": spec.url})
            self._fail(renderer, "its verification failed in the router, whose log says why")
        else:
            if verdict.renders:
                self._succeed(renderer, verdict)
            else:
                self._fail(renderer, "it has no render endpoints, so it is no renderer")
        finally:
            renderer.task = None

    def _fail(self, renderer: _Renderer, problem: str) -> None:
        if renderer.verdict is not None or not renderer.problem:
            log.warning("renderer away", extra={"url": renderer.spec.url, "reason": problem})
        renderer.verdict, renderer.problem = None, problem
        renderer.next_s = self._clock() + renderer.retry_s
        renderer.retry_s = min(LONGEST_RETRY_S, 2 * renderer.retry_s)

    def _succeed(self, renderer: _Renderer, verdict: Verdict) -> None:
        renderer.next_s = self._clock() + VERIFY_EVERY_S
        renderer.retry_s = RETRY_S
        if renderer.verdict is not None and _alike(renderer.verdict, verdict):
            # The comparisons with engines stay.
            return
        renderer.verdict, renderer.problem = verdict, ""
        log.info("renderer verified", extra={"url": renderer.spec.url})
        self._changed(renderer.spec.model)

    def doubt(self, model: str, url: str, problem: str) -> None:
        """Do not use a renderer that failed until it is verified again."""
        for renderer in self._renderers[model]:
            if renderer.spec.url == url and renderer.verdict is not None:
                log.warning("renderer away", extra={"url": url, "reason": problem})
                renderer.verdict, renderer.problem = None, problem
                renderer.next_s = self._clock() + RETRY_S

    def trusted(self, model: str, request: TokenRequest, engines: Mapping[str, Verdict]) -> list[str]:
        """Return the URLs of the renderers that make the engines' own tokens of such a request.

        Args:
            model: The model.
            request: The request.
            engines: The verdicts on the model's engines, by URL. If there are none, a renderer that makes tokens of the
                probes is trusted.
        """
        # No render endpoint applies thinking that is disabled.
        if request.has_media or THINKING_OFF in request.features or any(map(request.has, LEFT_TO_THE_ENGINE)):
            return []
        return [
            renderer.spec.url
            for renderer in self._renderers.get(model, ())
            if renderer.verdict is not None
            and renderer.verdict.renders_kind(request.kind)
            and all(
                self._equals(renderer.spec, renderer.verdict, feature, engines)
                for feature in renderer.verdict.decisive(request)
            )
        ]

    def _equals(self, spec: RendererSpec, rendering: Verdict, feature: Feature, engines: Mapping[str, Verdict]) -> bool:
        """Return whether a renderer makes the tokens of a feature's probe that each engine makes."""
        return isinstance(rendering.truths.get(feature), np.ndarray) and all(
            self._compared(spec, rendering, url, engine).get(feature) == EQUAL for url, engine in engines.items()
        )

    def _compared(self, spec: RendererSpec, rendering: Verdict, url: str, engine: Verdict) -> dict[Feature, str]:
        """Return the comparison with one engine, which is kept until either makes other tokens."""
        key = (spec.model, spec.url, url)
        comparison = self._comparisons.get(key)
        if comparison is None or comparison.rendering is not rendering or comparison.engine is not engine:
            comparison = self._comparisons[key] = _Comparison(rendering, engine, _compare(rendering, engine))
        return comparison.results

    def features(self, model: str, url: str, engine: Verdict) -> set[Feature]:
        """Return the features for which a renderer makes the own tokens of the engine at `url`."""
        return {
            feature
            for renderer in self._renderers.get(model, ())
            if renderer.verdict is not None
            for feature, result in self._compared(renderer.spec, renderer.verdict, url, engine).items()
            if result == EQUAL
        }

    def problems(
        self, model: str, engines: Mapping[str, Verdict], names: Mapping[Feature, str]
    ) -> Iterator[tuple[str, str]]:
        """Yield the URL of each renderer of the model that is away or differs, and the problem.

        Args:
            model: The model.
            engines: The verdicts on the model's engines, by URL.
            names: The name of each feature, for messages.
        """
        for renderer in self._renderers.get(model, ()):
            if renderer.problem:
                yield renderer.spec.url, f"it is not used until it is verified: {renderer.problem}"
            if renderer.verdict is None:
                continue
            differences: dict[Feature, list[str]] = {}
            for url, engine in engines.items():
                for feature, result in self._compared(renderer.spec, renderer.verdict, url, engine).items():
                    truths = (renderer.verdict.truths.get(feature), engine.truths.get(feature))
                    # A request that either of them does not take is no difference.
                    if result != EQUAL and not any(isinstance(truth, str) for truth in truths):
                        differences.setdefault(feature, []).append(f"{url}: {result}")
            for feature, reports in differences.items():
                more = f" (and at {len(reports) - 1} more)" if len(reports) > 1 else ""
                yield (
                    renderer.spec.url,
                    f"it makes other tokens of a {names[feature]} than the engine at {reports[0]}{more}",
                )

    def way(self, model: str, url: str) -> Verdict | None:
        """Return what is known of a renderer, or None if it cannot be used."""
        return next((found.verdict for found in self._renderers[model] if found.spec.url == url), None)


def _compare(rendering: Verdict, engine: Verdict) -> dict[Feature, str]:
    """Return for each feature EQUAL, or how the renderer's tokens differ from the engine's.

    An engine of another kind reads chats in another way and has other probes of them, so only texts are compared.
    """
    results: dict[Feature, str] = {}
    for feature, truth in engine.truths.items():
        if feature != "text" and engine.ways.reading != rendering.ways.reading:
            continue
        ids = rendering.truths.get(feature)
        if isinstance(ids, np.ndarray):
            results[feature] = EQUAL if agrees(truth, ids) else difference(truth, ids)
        else:
            results[feature] = f"the renderer makes no tokens of it: {ids}"
    return results


def _alike(former: Verdict, current: Verdict) -> bool:
    """Return whether a renderer makes the same tokens of all probes as before."""
    return former.renders_messages == current.renders_messages and all(
        np.array_equal(truth, current.truths.get(feature, ())) for feature, truth in former.truths.items()
    )


def _problem(unknown: TokensUnknown) -> str:
    return KEY_WANTED if unknown.reason == "unauthorized" else unknown.problem
