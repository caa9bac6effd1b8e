# SPDX-License-Identifier: Apache-2.0
"""The queries in deploy/prometheus and deploy/grafana."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus" / "alerts.yaml"
DASHBOARD = ROOT / "deploy" / "grafana" / "kvrouter.json"

# The beginning of the names of an engine's metrics.
ENGINES = "vllm:"
# Values that Grafana would substitute for its variables.
VARIABLES = {"$__rate_interval": "5m", "$model": ".*", "$worker": ".*"}


def alert_rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    """Return the panels of the dashboard, without the rows that group them."""
    entries: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return [panel for panel in entries if panel["type"] != "row"]


def dashboard_queries(*, of_engines: bool = False) -> list[str]:
    """Return the dashboard's queries of the router's metrics or the engines' in PromQL, with Grafana's variables replaced."""
    queries = []
    for panel in panels():
        for target in panel["targets"]:
            query = str(target["expr"])
            for name, value in VARIABLES.items():
                query = query.replace(name, value)
            assert "$" not in query, query
            if (ENGINES in query) is of_engines:
                queries.append(query)
    return queries
