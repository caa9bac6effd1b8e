# SPDX-License-Identifier: Apache-2.0
"""The check whether the tokens of a model's texts are found at all. Pure.

A prompt without tokens is placed by load alone and nothing fails, so without this check nobody would notice.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator

import msgspec

from kvrouter.router.base.common.escaping import printable
from kvrouter.router.route.tokens.prompt_tokens import Prompt, Reason

# A problem is reported if more than half of the last 64 texts, at least 8, had no tokens. A slow probe at a start costs
# only one or two.
WINDOW = 64
COUNTED_MIN = 8
HALF = 0.5
# Reasons that lie in the client's request: an engine refuses the request, or the request has no tokens by its nature.
OF_THE_REQUEST: frozenset[Reason] = frozenset({"refused", "media", "embeds"})


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

    def __init__(self) -> None:
        self._reasons: dict[str, deque[Reason | None]] = {}
        self._problems: dict[tuple[str, Reason], str] = {}

    def add(self, model: str, prompt: Prompt) -> None:
        """Count a text whose tokens were looked for; token ids from a client do not count."""
        if prompt.source == "given" or prompt.reason in OF_THE_REQUEST:
            return
        reasons = self._reasons.get(model)
        if reasons is None:
            reasons = self._reasons[model] = deque(maxlen=WINDOW)
        reasons.append(prompt.reason)
        if prompt.reason is not None:
            self._problems[model, prompt.reason] = prompt.problem

    def keep(self, models: Collection[str]) -> None:
        """Forget all other models."""
        for model in self._reasons.keys() - set(models):
            del self._reasons[model]
            for key in [key for key in self._problems if key[0] == model]:
                del self._problems[key]

    def found(self) -> Iterator[MissingTokens]:
        """Yield the models most of whose texts have no tokens."""
        for model, reasons in self._reasons.items():
            missing = Counter(reason for reason in reasons if reason is not None)
            if len(reasons) < COUNTED_MIN or missing.total() <= HALF * len(reasons):
                continue
            ((reason, _),) = missing.most_common(1)
            yield MissingTokens(model, missing.total(), len(reasons), reason, self._problems[model, reason])

    def health(self) -> list[str]:
        """Return a sentence for each model most of whose texts have no tokens, for `/health`."""
        return [f"model {printable(missing.model)}: {missing.text}" for missing in self.found()]
