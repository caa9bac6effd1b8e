# SPDX-License-Identifier: Apache-2.0
"""The verification of the ways to find tokens for one engine, by probes that compare them with the engine itself.

If the engine has a render endpoint, that endpoint shows the engine's own tokens, because it is the code by which the
engine reads requests. Otherwise the engine runs each probe for one token and returns its prompt. /tokenize is other
code, and differs for some models (gpt-oss) and flags.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrouter.router.base.common.errors import BadQuestion
from kvrouter.router.model.engines.engine import TokenEndpoints
from kvrouter.router.route.tokens.engine.client import Absent, Engine, EngineClient
from kvrouter.router.route.tokens.engine.probes import (
    PLAIN_PROBES,
    RESPONSE_PROBES,
    Truth,
    agrees,
    chat_probes,
    difference,
    message_probes,
    running,
)
from kvrouter.router.route.tokens.engine.wire import (
    COUNT_PATH,
    REAL_PATHS,
    TOKENIZE_PATH,
    RenderQuirks,
    count_body,
    counted_tokens,
    real_ids,
    render_body,
    rendered,
    tokenize_body,
    tokenized_ids,
)
from kvrouter.router.route.tokens.prompt_tokens import TokensUnknown
from kvrouter.router.route.tokens.thinking import HISTORIES, SWITCHES
from kvrouter.router.route.tokens.token_request import THINKING_OFF, THINKING_ON, Feature, Kind, TokenRequest

# The result for tokens that equal the engine's; any other text is the reason why they do not.
EQUAL = ""

# The quirks that can matter with /tokenize, which handles a template's content parts itself.
TOKENIZE_QUIRKS = tuple(
    RenderQuirks(keeps_unused_tools=keeps, merges_system=merges) for merges in (False, True) for keeps in (True, False)
)

Make = Callable[[TokenRequest, RenderQuirks], NDArray[np.int64]]

# The features that an engine's reasoning parser decides. Each group is tried with quirks of its own.
HISTORY: tuple[Feature, ...] = ("message thinking",)
SWITCH: tuple[Feature, ...] = (THINKING_ON, THINKING_OFF)
EFFORT: tuple[Feature, ...] = ("message effort",)


class LocalMaker(Protocol):
    """A tokenizer in this process; `LocalTokenizer` is one."""

    @property
    def held_bytes(self) -> int:
        """The memory held by its cache."""
        ...

    def ids(self, request: TokenRequest, quirks: RenderQuirks) -> NDArray[np.int64]:
        """Return the token ids that an engine with these quirks of reading chats would make of the request.

        Raises:
            TokensUnknown: Only the engine can read the request.
        """
        ...

    def likely_quirks(self) -> tuple[RenderQuirks, ...]:
        """Return the quirks that an engine may have with this tokenizer's template, the most likely first."""
        ...


class Verdict(msgspec.Struct, frozen=True, eq=False):
    """The results of verifying one engine."""

    # The engine's endpoints that turn text into tokens.
    ways: TokenEndpoints
    # Whether it has a render endpoint, one for messages of Anthropic's API, and one for Responses.
    renders: bool
    renders_messages: bool = False
    renders_responses: bool = False
    # For each feature, EQUAL if /tokenize makes the engine's tokens, or the reason why not; and the quirks with which
    # it does.
    tokenizes: dict[Feature, str] = {}
    tokenize_quirks: RenderQuirks = RenderQuirks()
    # The same for the local tokenizer.
    local: dict[Feature, str] = {}
    local_quirks: RenderQuirks = RenderQuirks()
    # The engine's own result for each probe.
    truths: dict[Feature, Truth] = {}
    # The front end before the engine that lacks its render endpoints, for people, or "" if there is none.
    front_end: str = ""

    def renders_kind(self, kind: Kind) -> bool:
        """Return whether it has a render endpoint for requests of this kind."""
        return {"messages": self.renders_messages, "responses": self.renders_responses}.get(kind, self.renders)

    def decisive(self, request: TokenRequest) -> Iterator[Feature]:
        """Yield the request's features that have an influence on the prompt of this engine; it may not take thinking."""
        ignored: tuple[Feature, ...] = () if self.ways.reading.takes_thinking else (*HISTORY, *SWITCH, *EFFORT)
        yield from (feature for feature in request.features if feature not in ignored)

    def unequal(self, results: Mapping[Feature, str], request: TokenRequest) -> Feature | None:
        """Return the first feature of the request for which a way does not make the engine's tokens, or None."""
        return next((feature for feature in self.decisive(request) if results.get(feature) != EQUAL), None)


class Verifier:
    """The comparison of engines with the ways to find tokens."""

    def __init__(self, client: EngineClient, local: Mapping[str, LocalMaker]) -> None:
        # Sends requests to engines.
        self._client = client
        # Local tokenizers, by model.
        self._local = local

    async def judge(self, model: str, engine: Engine) -> Verdict:
        """Verify an engine by all probes.

        Raises:
            TokensUnknown: The engine does not answer.
        """
        ways = engine.ways
        truths: dict[Feature, Truth] = {}
        renders, probes = await self._add_truths(
            model, engine, chat_probes(ways.reading), bool(ways.render_paths), truths
        )
        front_end = ""
        if ways.render_paths and not renders and ways.version_path:
            front_end = ways.front_end_in(await self._client.get(engine.url, ways.version_path))
        renders_messages, of_messages = await self._add_truths(
            model, engine, message_probes(ways.reading), renders, truths
        )
        of_responses = RESPONSE_PROBES if ways.reading.converts_responses else {}
        renders_responses, of_responses = await self._add_truths(model, engine, of_responses, renders, truths)
        unrendered = {} if renders else dict(probes)
        unrendered |= {} if renders_messages else of_messages
        unrendered |= {} if renders_responses else of_responses
        probes |= of_messages | of_responses
        tokenizes: dict[Feature, str] = {}
        tokenize_quirks = RenderQuirks()
        if unrendered:
            tokenizes, tokenize_quirks = await self._tokenizes(engine, unrendered, truths)
        local: dict[Feature, str] = {}
        local_quirks = RenderQuirks()
        maker = self._local.get(model)
        if maker is not None:
            tried = [msgspec.structs.replace(quirks, reading=ways.reading) for quirks in maker.likely_quirks()]
            trials = Trials(probes, tried)
            for some_probes, some_quirks in trials:
                attempts = []
                for quirks in some_quirks:
                    attempts.append((compared(maker.ids, quirks, some_probes, truths), quirks))
                    # All attempts together take some tens of milliseconds of the event loop.
                    await asyncio.sleep(0)
                trials.found(attempts)
            local, local_quirks = trials.results, trials.quirks
        return Verdict(
            ways,
            renders,
            renders_messages,
            renders_responses,
            tokenizes,
            tokenize_quirks,
            local,
            local_quirks,
            truths,
            front_end,
        )

    async def _add_truths(
        self,
        model: str,
        engine: Engine,
        probes: Mapping[Feature, TokenRequest],
        renders: bool,
        truths: dict[Feature, Truth],
    ) -> tuple[bool, dict[Feature, TokenRequest]]:
        """Add the engine's own results for some probes to `truths`.

        The first probe shows whether the engine renders; the others are sent at the same time, because clients wait for
        the verdict, and an engine that only runs requests takes a step for each.

        Returns:
            Whether the engine renders such requests, and the probes; a first one that its template refuses is replaced.
        """
        probes = dict(probes)
        if not probes:
            return renders, probes
        first, *others = probes
        renders, truths[first] = await self._truth(model, engine, probes[first], renders)
        if first in PLAIN_PROBES and isinstance(truths[first], str):
            probes[first] = PLAIN_PROBES[first]
            renders, truths[first] = await self._truth(model, engine, probes[first], renders)
        results = await asyncio.gather(*(self._truth(model, engine, probes[other], renders) for other in others))
        for other, (also_renders, truth) in zip(others, results, strict=True):
            renders, truths[other] = renders and also_renders, truth
        return renders, probes

    async def _truth(self, model: str, engine: Engine, probe: TokenRequest, renders: bool) -> tuple[bool, Truth]:
        """Return whether the engine renders, and its own result for the probe.

        For a message that is not rendered, the result is its length.
        """
        url = engine.url
        try:
            if renders:
                try:
                    path = engine.ways.render_paths[probe.kind]
                    answer = await self._client.post(url, path, render_body(probe, model))
                    return True, rendered(probe.kind, answer)[0]
                except Absent:
                    renders = False
            if probe.kind == "messages":
                return renders, counted_tokens(await self._client.post(url, COUNT_PATH, count_body(probe, model)))
            return renders, real_ids(await self._client.post(url, REAL_PATHS[probe.kind], running(probe)))
        except Absent as absent:
            return renders, str(absent)
        except TokensUnknown as unknown:
            # Many engines have neither: a problem with them must not keep chats from being verified.
            if unknown.reason != "refused" and probe.kind not in ("messages", "responses"):
                raise
            return renders, unknown.problem

    async def _tokenizes(
        self, engine: Engine, probes: dict[Feature, TokenRequest], truths: dict[Feature, Truth]
    ) -> tuple[dict[Feature, str], RenderQuirks]:
        """Return the results of /tokenize with the quirks that explain the most probes, and these quirks."""
        trials = Trials(probes, TOKENIZE_QUIRKS)
        for some_probes, some_quirks in trials:
            attempts: list[tuple[dict[Feature, str], RenderQuirks]] = []
            for quirks in some_quirks:
                answers = await asyncio.gather(
                    *(self._tokenized(engine, probe, truths[feature], quirks) for feature, probe in some_probes.items())
                )
                results = dict(zip(some_probes, answers, strict=True))
                attempts.append((results, quirks))
                if all(result == EQUAL or isinstance(truths[feature], str) for feature, result in results.items()):
                    break
            trials.found(attempts)
        return trials.results, trials.quirks

    async def _tokenized(self, engine: Engine, probe: TokenRequest, truth: Truth, quirks: RenderQuirks) -> str:
        """Return EQUAL if /tokenize makes the engine's own tokens of the probe, else the reason why not."""
        if isinstance(truth, str) and probe.kind in ("messages", "responses"):
            return difference(truth, np.empty(0, np.int64))
        try:
            body = tokenize_body(probe, quirks, engine.ways)
        except TokensUnknown as unknown:
            return unknown.problem
        try:
            ids = tokenized_ids(await self._client.post(engine.url, TOKENIZE_PATH, body))
        except Absent:
            return f"it has neither /tokenize nor a render endpoint ({engine.ways.how_to_render})"
        except TokensUnknown as unknown:
            if unknown.reason != "refused":
                raise
            return f"its /tokenize refuses the probe: {unknown.problem}"
        return EQUAL if agrees(truth, ids) else difference(truth, ids)


class Trials:
    """The quirks to try with an engine's probes, group by group: a later group builds on the quirks found before.

    Trying all combinations at once would take some thousand requests.
    """

    def __init__(self, probes: dict[Feature, TokenRequest], quirks: Sequence[RenderQuirks]) -> None:
        self._probes = probes
        self._first = quirks
        self.results: dict[Feature, str] = {}
        self.quirks = quirks[0]

    def __iter__(self) -> Iterator[tuple[dict[Feature, TokenRequest], Sequence[RenderQuirks]]]:
        """Yield the probes of each group with the quirks to try; call `found` before going on."""
        grouped = {*HISTORY, *SWITCH, *EFFORT}
        yield {feature: probe for feature, probe in self._probes.items() if feature not in grouped}, self._first
        for features, name, values in ((HISTORY, "history", HISTORIES), (SWITCH, "switch", SWITCHES), (EFFORT, "", ())):
            group = {feature: self._probes[feature] for feature in features if feature in self._probes}
            if group:
                options = [msgspec.structs.replace(self.quirks, **{name: value}) for value in values]
                yield group, options or [self.quirks]

    def found(self, attempts: list[tuple[dict[Feature, str], RenderQuirks]]) -> None:
        """Keep the results of the best attempt of a group, and its quirks."""
        results, self.quirks = best(attempts)
        self.results |= results


def compared(
    make: Make, quirks: RenderQuirks, probes: dict[Feature, TokenRequest], truths: dict[Feature, Truth]
) -> dict[Feature, str]:
    """Return for each feature EQUAL, or how the tokens made here differ from the engine's.

    Args:
        make: Makes the tokens of a probe.
        quirks: The quirks to make them with.
        probes: The probe of each feature.
        truths: The engine's own result for each probe.
    """
    results: dict[Feature, str] = {}
    for feature, probe in probes.items():
        try:
            ids = make(probe, quirks)
        except (TokensUnknown, BadQuestion) as error:
            results[feature] = f"not read here: {error}"
        else:
            results[feature] = EQUAL if agrees(truths[feature], ids) else difference(truths[feature], ids)
    return results


def best(found: list[tuple[dict[Feature, str], RenderQuirks]]) -> tuple[dict[Feature, str], RenderQuirks]:
    """Return the results with the most equal features, and their quirks; the first of equals."""
    return max(found, key=lambda pair: sum(result == EQUAL for result in pair[0].values()))


def same_truths(first: Verdict, second: Verdict) -> bool:
    """Return whether two engines make the same tokens of every probe, as far as they report them."""
    for feature, truth in first.truths.items():
        other_truth = second.truths.get(feature)
        if (
            isinstance(truth, np.ndarray)
            and isinstance(other_truth, np.ndarray)
            and not np.array_equal(truth, other_truth)
        ):
            return False
    return True
