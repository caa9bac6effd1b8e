# SPDX-License-Identifier: Apache-2.0
"""Name resolution for aiohttp that omits the addresses to which the router must not connect."""

from __future__ import annotations

import socket

from aiohttp.abc import ResolveResult
from aiohttp.resolver import ThreadedResolver

from kvrouter.router.model.workers.allow_list import LINK_LOCAL, AllowList


class CheckedResolver(ThreadedResolver):
    """The system's resolver without the refused addresses."""

    def __init__(self, allowed: AllowList) -> None:
        super().__init__()
        self._allowed = allowed

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the admitted addresses of a host. Raises OSError if no address is admitted."""
        results = await super().resolve(host, port, family)
        admitted = [result for result in results if self._allowed.admits_address(host, result["host"])]
        if not admitted:
            raise OSError(None, LINK_LOCAL.format(host=host))
        return admitted
