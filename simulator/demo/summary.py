# SPDX-License-Identifier: Apache-2.0
"""The results of a demo's prompts. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one prompt. Lists are by replica; counts are tokens."""

    # From 1.
    number: int
    conversation: int
    turn: int
    prompt_tokens: int
    # The hit that the router predicted.
    predicted: list[int]
    # The hit that the replica would have.
    real: list[int]
    # The group that keeps the hit from being longer, and its kind.
    limited_by: list[str | None]
    # The hit that a router would expect that knows only full attention.
    full_attention: list[int]
    # The index of the replica that served the prompt, the router that chose it, and the reason.
    chosen: int
    by: str
    reason: str
    # The hit that was predicted for the chosen replica when it was chosen, and the one that it reported.
    promised: int
    reused: int
    # The replica that would be chosen by a router that knows only full attention.
    full_attention_choice: int

    @property
    def exact(self) -> bool:
        """Whether the prediction is right for every replica, and the chosen one reused the promised tokens."""
        return self.predicted == self.real and self.reused == self.promised == self.predicted[self.chosen]

    @property
    def full_attention_overpromised(self) -> bool:
        """Whether a router that knows only full attention expects a longer hit than its choice would give."""
        return self.full_attention[self.full_attention_choice] > self.real[self.full_attention_choice]

    @property
    def full_attention_wrong(self) -> bool:
        """Whether a router that knows only full attention picks a replica that reuses less than another would."""
        return self.real[self.full_attention_choice] < max(self.real)


@dataclass(slots=True)
class Summary:
    """Counts over all prompts. `*checked` count prompts times replicas; all others count prompts or tokens."""

    prompts: int = 0
    exact_prompts: int = 0
    checked: int = 0
    exact_checked: int = 0
    nonzero_checked: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    round_robin_reused_tokens: int = 0
    full_attention_reused_tokens: int = 0
    full_attention_overpromised: int = 0
    full_attention_wrong: int = 0
    seconds: float = 0.0
    wrong_numbers: list[int] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """Add one more prompt."""
        self.prompts += 1
        self.exact_prompts += row.exact
        self.checked += len(row.real)
        self.exact_checked += sum(a == b for a, b in zip(row.predicted, row.real, strict=True))
        self.nonzero_checked += sum(hit > 0 for hit in row.real)
        self.prompt_tokens += row.prompt_tokens
        self.reused_tokens += row.reused
        self.full_attention_overpromised += row.full_attention_overpromised
        self.full_attention_wrong += row.full_attention_wrong
        if not row.exact:
            self.wrong_numbers.append(row.number)
