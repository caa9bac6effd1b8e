# SPDX-License-Identifier: Apache-2.0
"""Faults that a replica can have, set over HTTP (POST /sim/faults) or from the command line.

Every field that is set takes effect at once; the others change nothing.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]


class Faults(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The faults of one request. None changes nothing."""

    # The next N batches are not sent, but a replay has them (PUB drops for a slow subscriber).
    drop_events: Count | None = None
    # The next N batches are lost, and only their numbers are used up (a failed encode in vLLM).
    lose_events: Count | None = None
    # No step ends for this time; HTTP keeps answering.
    stall_s: Seconds | None = None
    # Every step takes this many times as long; 1 ends the fault.
    slow: Annotated[float, msgspec.Meta(gt=0)] | None = None
    # The next N generation requests get `fail_status` and do not start.
    fail: Count | None = None
    fail_status: Annotated[int, msgspec.Meta(ge=400, le=599)] | None = None
    # /health answers 503 while true.
    unhealthy: bool | None = None
    # Requests below /v1 without one of these keys get 401, as with vLLM's --api-key. An empty list turns the check off.
    api_keys: tuple[str, ...] | None = None
    # Starts a new life: the cache is empty, the event stream begins at 0, running requests lose their connection, and
    # for `down_s` every connection is closed without an answer.
    restart: bool | None = None
    down_s: Seconds | None = None
