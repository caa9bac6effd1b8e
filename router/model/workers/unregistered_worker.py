# SPDX-License-Identifier: Apache-2.0
"""Workers that a source lists but that are not registered yet."""

from __future__ import annotations

import msgspec

from kvrouter.router.model.workers.registration import Registration


class Waiting(msgspec.Struct, frozen=True):
    """The reason why a worker is not registered yet, and the remedy."""

    reason: str
    # The remedy, for the operator.
    fix: str


class UnregisteredWorker(msgspec.Struct, frozen=True):
    """A worker as its source describes it, before its registration."""

    registration: Registration
    waiting: Waiting
