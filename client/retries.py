# SPDX-License-Identifier: Apache-2.0
"""The decision whether and when a failed call is sent again. Pure."""

from __future__ import annotations

import msgspec

from kvrouter.client.errors import AnswerLost, RequestRefused, RouterError


class Retries(msgspec.Struct, frozen=True, kw_only=True):
    """The rule for repeating calls, which repeats a call only if that cannot do anything twice.

    A call is sent again if it never reached the router; if the router refused it and said when to come again
    (`Retry-After`); or if its answer was lost and repeating it changes nothing. A call whose answer is late is not sent
    again.
    """

    # Further attempts; 0 turns them off.
    count: int = 2
    # A pause doubles from the first to the longest; a router that is replaced listens again within a second or two.
    first_pause_s: float = 0.2
    # A longer `Retry-After` ends the attempts.
    longest_pause_s: float = 2.0

    def pause_s(self, error: RouterError, attempt: int, *, is_repeatable: bool, chance: float) -> float | None:
        """Return the seconds until the next attempt, or None if there is none.

        Args:
            error: The failure.
            attempt: How many attempts were made before the one that failed.
            is_repeatable: Whether repeating the call changes nothing.
            chance: A random number from 0 to 1, which spreads clients that failed at the same time.
        """
        if attempt >= self.count:
            return None
        if isinstance(error, RequestRefused):
            wait_s = error.retry_after_s
            if error.may_have_acted or wait_s is None or wait_s > self.longest_pause_s:
                return None
            return wait_s * (1 + chance / 4)
        if error.may_have_acted and not (is_repeatable and isinstance(error, AnswerLost)):
            return None
        pause_s: float = min(self.first_pause_s * 2**attempt, self.longest_pause_s)
        return pause_s * (1 + chance) / 2
