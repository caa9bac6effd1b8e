# SPDX-License-Identifier: Apache-2.0
"""A client of the router's API: one question to the index for each request, over connections that are kept open."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import aiohttp
import msgspec

from kvrouter.router.base.common.bounded_read import read_whole
from kvrouter.shadow.observation import Skip, Unjudged
from kvrouter.shadow.worker_names import FleetNames, fleet_names

# Longer than any tokenizer takes; a later answer would be of another state of the index anyway.
TIMEOUT_S = 10.0
# The size of an answer with 6,000 candidates.
MAX_ANSWER_BYTES = 16 << 20

# Reasons by the code of an error; every other error is a refusal.
REASONS = {"unknown_model": Skip.UNKNOWN_MODEL, "no_worker": Skip.NO_WORKER, "saturated": Skip.NO_WORKER}


class IndexClient:
    """A client over `session`, whose headers have the API key."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        self._timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)

    async def select(self, question: bytes) -> dict[str, Any]:
        """Return the answer of `/select`. Raises Unjudged."""
        return await self._ask("POST", "/select", question)

    async def fleet(self) -> FleetNames:
        """Return the names of the fleet's workers. Raises Unjudged."""
        answer = await self._ask("GET", "/workers", None)
        try:
            return fleet_names(answer["workers"])
        except (KeyError, TypeError, ValueError):
            raise Unjudged(Skip.REFUSED, "the answer does not come from a router of this version") from None

    async def _ask(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        try:
            async with self._session.request(
                method, self._url + path, data=body, headers={"content-type": "application/json"}, timeout=self._timeout
            ) as answer:
                content = await read_whole(answer, MAX_ANSWER_BYTES)
                status = answer.status
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise Unjudged(Skip.UNREACHABLE, str(error) or "no answer in time") from None
        try:
            decoded = msgspec.json.decode(content)
        except (msgspec.DecodeError, ValueError, RecursionError):
            raise Unjudged(Skip.REFUSED, f"what listens there is no router: it answers {status}") from None
        if status == HTTPStatus.OK and isinstance(decoded, dict):
            return decoded
        error_of = decoded.get("error") if isinstance(decoded, dict) else None
        detail = error_of if isinstance(error_of, dict) else {}
        reason = REASONS.get(str(detail.get("code")), Skip.REFUSED)
        raise Unjudged(reason, str(detail.get("message", f"it answers {status}")))
