# SPDX-License-Identifier: Apache-2.0
"""One answer that is being generated, with its tokens so far."""

from __future__ import annotations

from collections.abc import AsyncIterator

from kvrouter.simulator.cache.job import Job


class Run:
    """One of the answers to a request, which may have several prompts and several answers to each."""

    def __init__(self, job: Job, tokens: AsyncIterator[int]) -> None:
        self.job = job
        self.tokens = tokens
        self.sampled: list[int] = []
