# SPDX-License-Identifier: Apache-2.0
"""The errors that a replica answers requests with."""

from __future__ import annotations


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Unreadable(Refused):
    """A body that cannot be decoded; vLLM words these errors alike on all paths."""
