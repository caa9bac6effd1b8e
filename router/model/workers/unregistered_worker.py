# SPDX-License-Identifier: Apache-2.0
"""A worker that a source lists and that is not registered yet."""

from __future__ import annotations

import msgspec

from kvrouter.router.model.workers.registration import Registration


class Waiting(msgspec.Struct, frozen=True):
    """The reason why a worker is not registered yet."""

    reason: str
    # The remedy.
    fix: str


class UnregisteredWorker(msgspec.Struct, frozen=True):
    """A worker as its source describes it."""

    registration: Registration
    waiting: Waiting
