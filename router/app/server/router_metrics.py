# SPDX-License-Identifier: Apache-2.0
"""All metrics of a router process: those of each room, on one registry."""

from __future__ import annotations

from kvrouter.router.app.core.core_metrics import CoreMetrics
from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.follow.discovery.discovery_metrics import DiscoveryMetrics
from kvrouter.router.observe.history.history_metrics import HistoryMetrics
from kvrouter.router.observe.quality.quality_metrics import QualityMetrics
from kvrouter.router.route.owners.owner_metrics import OwnerMetrics
from kvrouter.router.route.placement.placement_metrics import PlacementMetrics
from kvrouter.router.route.tokens.token_metrics import TokenMetrics
from kvrouter.router.serve.api.http_metrics import HttpMetrics
from kvrouter.router.serve.gateway.gateway_metrics import GatewayMetrics
from kvrouter.router.serve.proxy.proxy_metrics import ProxyMetrics


class RouterMetrics:
    """The metrics of all parts, one attribute each. Each part gets only its own."""

    def __init__(self, registry: MetricRegistry) -> None:
        self.core = CoreMetrics(registry)
        self.placement = PlacementMetrics(registry)
        self.tokens = TokenMetrics(registry)
        self.owners = OwnerMetrics(registry)
        self.quality = QualityMetrics(registry)
        self.history = HistoryMetrics(registry)
        self.proxy = ProxyMetrics(registry)
        self.gateway = GatewayMetrics(registry)
        self.http = HttpMetrics(registry)
        self.discovery = DiscoveryMetrics(registry)
