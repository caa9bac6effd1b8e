# SPDX-License-Identifier: Apache-2.0
"""The facts about a request that are known once its answer has passed."""

from __future__ import annotations

from typing import Any

import msgspec

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.observe.quality.usage_reader import Usage


class PullReport(msgspec.Struct, frozen=True, gc=False):
    """The pull that a request named, and what came of it."""

    source: WorkerKey
    # Tokens that were to be reused beyond the engine's own tiers.
    predicted: int
    # Tokens that the engine reused beyond its own tiers, at most `predicted`; None if that is not known.
    delivered: int | None


class ReuseReport(msgspec.Struct, frozen=True, gc=False):
    """The reuse and latency of one request. Fields are in tokens or seconds, and None if unknown."""

    predicted: int | None
    # Tokens of the prompt that were reused, without those that were fetched.
    delivered: int | None
    usage: Usage | None
    # Seconds from the arrival of the whole request to the first event of the answer, for streams.
    ttft_s: float | None
    e2e_s: float
    # The prediction, with what the prompts ahead were expected to add.
    expected: int | None = None
    # None if the request named no source.
    pull: PullReport | None = None

    @property
    def fetched(self) -> int:
        """The reused tokens that were fetched from a source, as far as known."""
        return 0 if self.pull is None else self.pull.delivered or 0

    @property
    def reused(self) -> int | None:
        """All reused tokens, as the engine reports them; None if they are not known."""
        return None if self.delivered is None else self.delivered + self.fetched

    def fields(self) -> dict[str, Any]:
        """Return the fields of a request's line in the access log."""
        usage, pull = self.usage, self.pull
        fields: dict[str, Any] = {
            "predicted_tokens": self.predicted,
            "delivered_tokens": self.delivered,
            "prompt_tokens": None if usage is None else usage.prompt_tokens,
            "completion_tokens": None if usage is None else usage.completion_tokens,
            "ttft_s": self.ttft_s,
            "e2e_s": self.e2e_s,
        }
        if pull is not None:
            fields |= {
                "kv_source": pull.source.route_name,
                "peer_tokens_predicted": pull.predicted,
                "peer_tokens_delivered": pull.delivered,
            }
        return fields
