# SPDX-License-Identifier: Apache-2.0
"""An endpoint picker beside a proxy, without gRPC."""

from __future__ import annotations

import asyncio
import random
import time

from kvrouter.router.serve.access.tenants import Tenants
from kvrouter.router.serve.gateway.picker import Picker
from kvrouter.router.serve.gateway.process_stream import GatewayRequest, Route
from kvrouter.router.serve.proxy.body_decoding import OUTCOMES, BodyDecoding
from tests.contract.proxy_support import COMPLETIONS, WAIT_S, ProxyServer

MAX_BODY_BYTES = 100_000


class Door:
    """The picker of a proxy, on the proxy's loop."""

    def __init__(self, router: ProxyServer, tenants: Tenants | None = None) -> None:
        self._router = router
        self.picker = Picker(
            proxy=router.proxy,
            placer=router.placer,  # type: ignore[arg-type]
            admission=router.admission,
            quality=router.quality,
            metrics=router.metrics.gateway,
            decoding=BodyDecoding(MAX_BODY_BYTES, router.metrics.http.encoded_bodies),
            models=router.core.models,
            fallbacks=0,
            translated=frozenset(),
            tenants=lambda: tenants,
            clock=time.monotonic,
            rng=random.Random(0),
        )

    def pick(
        self,
        body: bytes,
        path: str = COMPLETIONS,
        *,
        method: bytes = b"POST",
        may_go_on: bool = False,
        **headers: str,
    ) -> Route:
        named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        lines = [(b":method", method), (b":path", path.encode()), *named]
        request = GatewayRequest(lines, body, None, may_go_on=may_go_on)
        return asyncio.run_coroutine_threadsafe(self.picker.pick(request), self._router.loop).result(WAIT_S)

    def decoded(self) -> dict[str, float]:
        """Return the numbers of compressed bodies by outcome, without those that are 0."""
        counts = {outcome: self._router.sample("encoded_bodies_total", outcome=outcome) for outcome in OUTCOMES}
        return {outcome: count for outcome, count in counts.items() if count}
