# SPDX-License-Identifier: Apache-2.0
"""The check whether the tokens of a model's texts are found at all. Pure.

A prompt without tokens is placed by load alone and nothing fails, so without this check nobody would notice.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator

import msgspec

from kvrouter.router.base.common.escaping import printable
from kvrouter.router.route.tokens.prompt_tokens import Prompt, Reason

# A problem is reported if more than half of the last 64 texts, at least 8, had no tokens. A slow probe at a start costs
# only one or two.
WINDOW = 64
COUNTED_MIN = 8
HALF = 0.5
# A text counts for ten minutes, so that a problem without new texts ends.
COUNTED_S = 600.0
# Reasons that end as soon as an engine of the model is verified, and those that end when chats and texts have a source.
WITHOUT_ENGINE: frozenset[Reason] = frozenset({"no_engine", "unreachable", "unauthorized"})
WITHOUT_SOURCE: frozenset[Reason] = frozenset({"unverified", "unsupported"})
# Reasons that lie in the client's request: an engine refuses the request, the request has no tokens by its nature, or it is
# placed by load by design. No setting changes that.
OF_THE_REQUEST: frozenset[Reason] = frozenset({"refused", "media", "embeds", "not_looked_up"})


class MissingTokens(msgspec.Struct, frozen=True):
    """A model for which the router found no tokens for most of the last text prompts."""

    model: str
    # How many of the last `counted` texts had no tokens.
    missing: int
    counted: int
    # The most frequent reason, and the last sentence with it.
    reason: Reason
    problem: str

    @property
    def text(self) -> str:
        """The problem as a sentence for people."""
        return (
            f"{self.missing} of the last {self.counted} text prompts had no tokens, so they were placed by load alone "
            f"({self.reason}): {self.problem}"
        )


class UnknownPrompts:
    """The last texts of each model, each with the reason if its tokens were not found."""

    def __init__(self, clock: Callable[[], float]) -> None:
        # Returns seconds.
        self._clock = clock
        # For each model, the times at which texts came, each with the reason if its tokens were not found.
        self._reasons: dict[str, deque[tuple[float, Reason | None]]] = {}
        self._problems: dict[tuple[str, Reason], str] = {}

    def add(self, model: str, prompt: Prompt) -> None:
        """Count a text whose tokens were looked for; token ids from a client do not count."""
        if prompt.source == "given" or prompt.reason in OF_THE_REQUEST:
            return
        reasons = self._reasons.get(model)
        if reasons is None:
            reasons = self._reasons[model] = deque(maxlen=WINDOW)
        reasons.append((self._clock(), prompt.reason))
        if prompt.reason is not None:
            self._problems[model, prompt.reason] = prompt.problem

    def keep(self, models: Collection[str]) -> None:
        """Forget all other models."""
        for model in self._reasons.keys() - set(models):
            del self._reasons[model]
            for key in [key for key in self._problems if key[0] == model]:
                del self._problems[key]

    def end(self, model: str, reasons: Collection[Reason]) -> None:
        """Forget the texts of a model whose tokens were missing for reasons that have ended."""
        texts = self._reasons.get(model)
        if texts is not None:
            self._reasons[model] = deque((text for text in texts if text[1] not in reasons), maxlen=WINDOW)

    def found(self) -> Iterator[MissingTokens]:
        """Yield the models most of whose texts have no tokens."""
        oldest_s = self._clock() - COUNTED_S
        for model, texts in self._reasons.items():
            reasons = [reason for time_s, reason in texts if time_s >= oldest_s]
            missing = Counter(reason for reason in reasons if reason is not None)
            if len(reasons) < COUNTED_MIN or missing.total() <= HALF * len(reasons):
                continue
            ((reason, _),) = missing.most_common(1)
            yield MissingTokens(model, missing.total(), len(reasons), reason, self._problems[model, reason])

    def health(self) -> list[str]:
        """Return a sentence for each model most of whose texts have no tokens, for `/health`."""
        return [f"model {printable(missing.model)}: {missing.text}" for missing in self.found()]
