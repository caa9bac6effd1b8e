# SPDX-License-Identifier: Apache-2.0
"""What is known of a request once its answer has passed."""

from __future__ import annotations

from typing import Any

import msgspec

from kvrouter.router.observe.quality.usage_reader import Usage


class ReuseReport(msgspec.Struct, frozen=True, gc=False):
    """In tokens and seconds; None: not known. expected: the prediction, with what the prompts ahead were expected to add.
    delivered: what was reused of the prompt."""

    predicted: int | None
    delivered: int | None
    usage: Usage | None
    ttft_s: float | None
    e2e_s: float
    expected: int | None = None

    def fields(self) -> dict[str, Any]:
        """For the line of a request's end."""
        usage = self.usage
        return {
            "predicted_tokens": self.predicted,
            "delivered_tokens": self.delivered,
            "prompt_tokens": None if usage is None else usage.prompt_tokens,
            "completion_tokens": None if usage is None else usage.completion_tokens,
            "ttft_s": self.ttft_s,
            "e2e_s": self.e2e_s,
        }
