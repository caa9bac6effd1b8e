# SPDX-License-Identifier: Apache-2.0
"""The router's API as a shadow uses it: one question to the index for each request, over kept connections."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import aiohttp
import msgspec

from kvrouter.router.base.common.bounded_read import read_whole
from kvrouter.shadow.observation import Skip, Unjudged
from kvrouter.shadow.worker_names import FleetNames, fleet_names

# Longer than any tokenizer takes; an older answer is of another index anyway.
TIMEOUT_S = 10.0
# Of an answer with 6,000 candidates.
MAX_ANSWER_BYTES = 16 << 20

# By the code of an error; all others are refusals.
REASONS = {"unknown_model": Skip.UNKNOWN_MODEL, "no_worker": Skip.NO_WORKER, "saturated": Skip.NO_WORKER}


class IndexClient:
    """session: with the key in its headers."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        self._timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)

    async def select(self, question: bytes) -> dict[str, Any]:
        """Raises Unjudged."""
        return await self._ask("POST", "/select", question)

    async def fleet(self) -> FleetNames:
        """Raises Unjudged."""
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
            found = msgspec.json.decode(content)
        except (msgspec.DecodeError, ValueError, RecursionError):
            raise Unjudged(Skip.REFUSED, f"what listens there is no router: it answers {status}") from None
        if status == HTTPStatus.OK and isinstance(found, dict):
            return found
        error_of = found.get("error") if isinstance(found, dict) else None
        detail = error_of if isinstance(error_of, dict) else {}
        reason = REASONS.get(str(detail.get("code")), Skip.REFUSED)
        raise Unjudged(reason, str(detail.get("message", f"it answers {status}")))
