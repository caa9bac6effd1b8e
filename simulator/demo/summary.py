# SPDX-License-Identifier: Apache-2.0
"""What came of the prompts of a demo. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Row:
    """What happened to one prompt. Lists are by replica; counts are tokens."""

    number: int
    conversation: int
    turn: int
    prompt_tokens: int
    predicted: list[int]
    real: list[int]
    limited_by: list[str | None]
    full_attention: list[int]
    chosen: int
    by: str
    reason: str
    promised: int
    reused: int
    full_attention_choice: int

    @property
    def exact(self) -> bool:
        """Right for every replica, and what the chosen one reused is what was promised."""
        return self.predicted == self.real and self.reused == self.promised == self.predicted[self.chosen]

    @property
    def full_attention_overpromised(self) -> bool:
        """A router that sees full attention only takes a hit for granted that its replica does not give."""
        return self.full_attention[self.full_attention_choice] > self.real[self.full_attention_choice]

    @property
    def full_attention_wrong(self) -> bool:
        """It picks a replica that reuses less than another one would."""
        return self.real[self.full_attention_choice] < max(self.real)


@dataclass(slots=True)
class Summary:
    """Over all prompts. Counts of `checked` are prompts times replicas; the rest are prompts or tokens."""

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
        """Count one more prompt in."""
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
