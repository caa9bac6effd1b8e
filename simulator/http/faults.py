# SPDX-License-Identifier: Apache-2.0
"""Faults that a replica can have, set over HTTP (POST /sim/faults) or from the command line.

Every field that is given takes effect at once, the others change nothing.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]


class Faults(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What shall go wrong.

    drop_events: the next N batches are not sent, but a replay has them (PUB drops for a slow subscriber).
    lose_events: the next N batches are lost, only their numbers are used up (a failed encode in vLLM).
    stall_s: no step ends for this time; HTTP keeps answering. slow: every step takes F times as long; 1 ends it.
    fail: the next N generation requests get `fail_status` and do not start.
    unhealthy: /health answers 503 while true.
    restart: a new life: the cache is empty, the event stream begins at 0, running requests lose their connection, and
    for `down_s` every connection is closed without an answer.
    """

    drop_events: Count | None = None
    lose_events: Count | None = None
    stall_s: Seconds | None = None
    slow: Annotated[float, msgspec.Meta(gt=0)] | None = None
    fail: Count | None = None
    fail_status: Annotated[int, msgspec.Meta(ge=400, le=599)] | None = None
    unhealthy: bool | None = None
    restart: bool | None = None
    down_s: Seconds | None = None
