# SPDX-License-Identifier: Apache-2.0
"""The facts about a request that are known once its answer has passed."""

from __future__ import annotations

from typing import Any

import msgspec

from kvrouter.router.observe.quality.usage_reader import Usage


class ReuseReport(msgspec.Struct, frozen=True, gc=False):
    """The reuse and latency of one request. Fields are in tokens or seconds, and None if unknown."""

    predicted: int | None
    # Tokens of the prompt that were reused.
    delivered: int | None
    usage: Usage | None
    # Seconds from the arrival of the whole request to the first event of the answer, for streams.
    ttft_s: float | None
    e2e_s: float
    # The prediction, with what the prompts ahead were expected to add.
    expected: int | None = None

    def fields(self) -> dict[str, Any]:
        """Return the fields of a request's line in the access log."""
        usage = self.usage
        return {
            "predicted_tokens": self.predicted,
            "delivered_tokens": self.delivered,
            "prompt_tokens": None if usage is None else usage.prompt_tokens,
            "completion_tokens": None if usage is None else usage.completion_tokens,
            "ttft_s": self.ttft_s,
            "e2e_s": self.e2e_s,
        }
