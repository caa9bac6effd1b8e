# SPDX-License-Identifier: Apache-2.0
"""A worker that a source shows and that is not registered yet."""

from __future__ import annotations

import msgspec

from kvrouter.router.workers.registration import Registration


class Waiting(msgspec.Struct, frozen=True):
    """Why a worker is not registered yet."""

    reason: str
    # What to do about it.
    fix: str


class UnregisteredWorker(msgspec.Struct, frozen=True):
    """A worker as its source describes it."""

    registration: Registration
    waiting: Waiting
