# SPDX-License-Identifier: Apache-2.0
"""Holds the ways to tokens against one engine, by probes: what the engine makes of each, and whether a way makes the
same.

Where the engine has a render endpoint that is the truth, as it is the code by which the engine reads requests. Else the
engine runs each probe for one token and returns its prompt: /tokenize is other code, and differs for some models
(gpt-oss) and flags.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrouter.router.base.common.errors import BadQuestion
from kvrouter.router.model.engines.engine import TokenEndpoints
from kvrouter.router.route.tokens.engine.client import Absent, Engine, EngineClient
from kvrouter.router.route.tokens.engine.probes import (
    MESSAGE_PROBES,
    PLAIN_CHAT,
    PROBES,
    Truth,
    agrees,
    difference,
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
from kvrouter.router.route.tokens.token_request import Feature, TokenRequest

# The same as the engine.
EQUAL = ""

# Quirks that can matter with /tokenize, which handles a template's content parts itself.
TOKENIZE_HABITS = tuple(
    RenderQuirks(keeps_unused_tools=keeps, merges_system=merges) for merges in (False, True) for keeps in (True, False)
)

Make = Callable[[TokenRequest, RenderQuirks], NDArray[np.int64]]


class LocalMaker(Protocol):
    """A tokenizer here; `local.LocalTokenizer` is one."""

    @property
    def held_bytes(self) -> int: ...

    def ids(self, asked: TokenRequest, habits: RenderQuirks) -> NDArray[np.int64]:
        """Raises Unknown where only the engine can say."""
        ...

    def likely_habits(self) -> tuple[RenderQuirks, ...]:
        """What an engine may do with this tokenizer's template, the likeliest first."""
        ...


class Verdict(msgspec.Struct, frozen=True, eq=False):
    """What is known of one engine. ways: its endpoints. renders, renders_messages: it has a render endpoint, for
    messages of Anthropic's API too. tokenizes, local: for each feature EQUAL where that way makes what the engine makes,
    else why not. truths: what the engine made of the probes."""

    ways: TokenEndpoints
    renders: bool
    renders_messages: bool = False
    tokenizes: dict[Feature, str] = {}
    tokenize_habits: RenderQuirks = RenderQuirks()
    local: dict[Feature, str] = {}
    local_habits: RenderQuirks = RenderQuirks()
    truths: dict[Feature, Truth] = {}


class Verifier:
    """client: asks engines. local: tokenizers here, by model."""

    def __init__(self, client: EngineClient, local: Mapping[str, LocalMaker]) -> None:
        self._client = client
        self._local = local

    async def judge(self, model: str, engine: Engine) -> Verdict:
        """Raises Unknown when the engine does not answer."""
        ways = engine.ways
        probes = dict(PROBES)
        truths: dict[Feature, Truth] = {}
        renders = bool(ways.render_paths)
        for feature, probe in PROBES.items():
            renders, truth = await self._truth(model, engine, probe, renders)
            if feature == "chat" and isinstance(truth, str):
                probes[feature] = PLAIN_CHAT
                renders, truth = await self._truth(model, engine, PLAIN_CHAT, renders)
            truths[feature] = truth
        renders_messages = renders
        # Where nobody here knows what the engine makes of them, there is nothing to compare.
        message_probes = MESSAGE_PROBES if ways.reads_messages else {}
        for feature, probe in message_probes.items():
            renders_messages, truths[feature] = await self._truth(model, engine, probe, renders_messages)
        probes |= message_probes
        tokenizes: dict[Feature, str] = {}
        tokenize_habits = RenderQuirks()
        if not renders_messages:
            unrendered = message_probes if renders else probes
            tokenizes, tokenize_habits = await self._tokenizes(engine, unrendered, truths)
        local: dict[Feature, str] = {}
        local_habits = RenderQuirks()
        maker = self._local.get(model)
        if maker is not None:
            local, local_habits = best(
                [(compared(maker.ids, habits, probes, truths), habits) for habits in maker.likely_habits()]
            )
        return Verdict(ways, renders, renders_messages, tokenizes, tokenize_habits, local, local_habits, truths)

    async def _truth(self, model: str, engine: Engine, probe: TokenRequest, renders: bool) -> tuple[bool, Truth]:
        """Whether the engine renders, and what it makes of the probe; of a message that is not rendered, the length."""
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
            # Many engines have no messages: whatever is wrong with these must not keep chats from being verified.
            if unknown.reason != "refused" and probe.kind != "messages":
                raise
            return renders, unknown.problem

    async def _tokenizes(
        self, engine: Engine, probes: dict[Feature, TokenRequest], truths: dict[Feature, Truth]
    ) -> tuple[dict[Feature, str], RenderQuirks]:
        found: list[tuple[dict[Feature, str], RenderQuirks]] = []
        for habits in TOKENIZE_HABITS:
            judged: dict[Feature, str] = {}
            for feature, probe in probes.items():
                judged[feature] = await self._tokenized(engine, probe, truths[feature], habits)
            found.append((judged, habits))
            if all(why == EQUAL or isinstance(truths[feature], str) for feature, why in judged.items()):
                break
        return best(found)

    async def _tokenized(self, engine: Engine, probe: TokenRequest, truth: Truth, habits: RenderQuirks) -> str:
        if isinstance(truth, str) and probe.kind == "messages":
            return difference(truth, np.empty(0, np.int64))
        try:
            body = tokenize_body(probe, habits, engine.ways)
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


def compared(
    make: Make, habits: RenderQuirks, probes: dict[Feature, TokenRequest], truths: dict[Feature, Truth]
) -> dict[Feature, str]:
    """For each feature EQUAL, or how what is made here differs from what the engine made."""
    found: dict[Feature, str] = {}
    for feature, probe in probes.items():
        try:
            ids = make(probe, habits)
        except (TokensUnknown, BadQuestion) as error:
            found[feature] = f"not read here: {error}"
        else:
            found[feature] = EQUAL if agrees(truths[feature], ids) else difference(truths[feature], ids)
    return found


def best(found: list[tuple[dict[Feature, str], RenderQuirks]]) -> tuple[dict[Feature, str], RenderQuirks]:
    """The habits that explain the most probes, the first of equals."""
    return max(found, key=lambda pair: sum(why == EQUAL for why in pair[0].values()))


def same_truths(one: Verdict, other: Verdict) -> bool:
    """Whether two engines make the same of every probe, as far as they tell."""
    for feature, truth in one.truths.items():
        others = other.truths.get(feature)
        if isinstance(truth, np.ndarray) and isinstance(others, np.ndarray) and not np.array_equal(truth, others):
            return False
    return True
