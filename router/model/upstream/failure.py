# SPDX-License-Identifier: Apache-2.0
"""How an exchange with an engine can fail. Pure."""

from __future__ import annotations

from enum import StrEnum


class Kind(StrEnum):
    """The kinds, as the metrics and the header of a retried answer name them."""

    REFUSED = "refused"  # no connection: nobody listens, no route, no such name, TLS that fails
    CONNECT_TIMEOUT = "connect_timeout"
    STALE = "stale"  # a kept connection had been closed before the request came there
    RESET = "reset"  # the connection ended before the first byte of the answer
    LOST = "lost"  # its health checks stopped being answered while the request waited
    SILENT = "silent"  # not a byte for answer_timeout_s
    MALFORMED = "malformed"  # what came is no HTTP
    GONE = "gone"  # one of GONE_STATUSES
    CUT = "cut"  # the connection ended within the answer


class Failure(Exception):
    """An attempt failed. The text says what happened, for the client and `/workers`."""

    def __init__(self, kind: Kind, text: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text
