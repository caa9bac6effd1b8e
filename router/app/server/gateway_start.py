# SPDX-License-Identifier: Apache-2.0
"""The start of the gRPC port for gateways. Imported only if the port is wanted, because gRPC is an extra."""

from __future__ import annotations

import random
from collections.abc import Callable

from kvrouter.router.app.core.router_core import Core
from kvrouter.router.app.server.router_metrics import RouterMetrics
from kvrouter.router.base.common.errors import NoWorker
from kvrouter.router.base.common.shutdown import Shutdown
from kvrouter.router.model.config.settings import Config
from kvrouter.router.observe.quality.request_watch import Quality
from kvrouter.router.route.placement.placer import Placer
from kvrouter.router.serve.access.access import Access
from kvrouter.router.serve.gateway.grpc_server import Certificate, GatewayServer
from kvrouter.router.serve.gateway.picker import Picker
from kvrouter.router.serve.proxy.admission import Admission
from kvrouter.router.serve.proxy.proxy import Proxy

# The label under which internal errors of the port are counted.
WHERE = "gateway"


async def start_gateway(
    config: Config,
    core: Core,
    placer: Placer,
    proxy: Proxy,
    admission: Admission,
    quality: Quality,
    metrics: RouterMetrics,
    shutdown: Shutdown,
    access: Access,
    clock: Callable[[], float],
) -> tuple[GatewayServer, int]:
    """Start the server; return it and the port that it listens on. Raises SettingError."""
    assert config.gateway_port is not None

    def ready() -> str | None:
        if shutdown.begun:
            return "it is shutting down"
        reason = core.readiness()
        if reason is None:
            try:
                placer.takers(core.models())
            except NoWorker as error:
                reason = error.message
        return reason

    picker = Picker(
        proxy=proxy,
        placer=placer,
        admission=admission,
        quality=quality,
        metrics=metrics.gateway,
        models=core.models,
        fallbacks=config.gateway_fallbacks,
        clock=clock,
        rng=random.Random(),
    )
    errors = metrics.http.internal_errors.labels(WHERE)
    server = GatewayServer(picker.pick, ready, metrics.gateway, errors.inc, max_body_bytes=config.max_body_bytes)
    certificate = None
    if (pems := access.gateway_pems) is not None:
        certificate = Certificate(lambda: access.gateway_pems or pems)
    port = await server.start(config.host, config.gateway_port, certificate, shared=config.processes > 1)
    return server, port
