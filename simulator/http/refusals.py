# SPDX-License-Identifier: Apache-2.0
"""Requests that a replica answers with an error."""

from __future__ import annotations


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Unreadable(Refused):
    """A body that has another form; vLLM words these alike on all paths."""
