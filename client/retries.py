# SPDX-License-Identifier: Apache-2.0
"""Whether a call that failed is sent again, and when. Pure."""

from __future__ import annotations

import msgspec

from kvrouter.client.errors import AnswerLost, RequestRefused, RouterError


class Retries(msgspec.Struct, frozen=True, kw_only=True):
    """A call is sent again where that cannot do anything twice: if it never reached the router, if the router refused it
    and said when to come again (`Retry-After`), and if its answer was lost and repeating it changes nothing. An answer
    that is late is not waited for again.

    count: further attempts; 0 turns them off. A pause doubles from the first to the longest, and a `Retry-After` beyond
    the longest is not waited for."""

    count: int = 2
    # A router that is replaced listens again within a second or two.
    first_pause_s: float = 0.2
    longest_pause_s: float = 2.0

    def pause_s(self, error: RouterError, attempt: int, *, is_repeatable: bool, chance: float) -> float | None:
        """Seconds until the next attempt; None: there is none. attempt: how many were made before this one. chance: 0 to
        1, which spreads clients that failed at once."""
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
