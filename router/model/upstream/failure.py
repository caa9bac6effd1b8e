# SPDX-License-Identifier: Apache-2.0
"""The ways in which an exchange with an engine can fail. Pure."""

from __future__ import annotations

from enum import StrEnum


class Kind(StrEnum):
    """The kind of a failure; metrics and the header of a retried answer use the values."""

    REFUSED = "refused"  # no connection: no listener, no route, an unknown name, or a TLS error
    CONNECT_TIMEOUT = "connect_timeout"
    STALE = "stale"  # the engine closed a kept connection before it received the request
    RESET = "reset"  # the connection ended before the first byte of the answer
    LOST = "lost"  # the engine stopped answering health checks while the request waited
    SILENT = "silent"  # the engine sent no byte for answer_timeout_s
    MALFORMED = "malformed"  # the received bytes are not HTTP
    GONE = "gone"  # the answer has one of GONE_STATUSES
    CUT = "cut"  # the connection ended within the answer


class Failure(Exception):
    """A failed exchange with an engine. Clients and `/workers` show its text, which says what happened."""

    def __init__(self, kind: Kind, text: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text
