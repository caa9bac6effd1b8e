# SPDX-License-Identifier: Apache-2.0
"""Comparison of the reference pages with the code: endpoints, error codes, commands and metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from fastapi import FastAPI
from fastapi.routing import APIRoute

from kvrouter.router.app.cli.commands import app as cli
from kvrouter.router.app.server.router_metrics import RouterMetrics
from kvrouter.router.base.common import errors
from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.route.tokens.proxied_paths import PATHS, STORED_PATHS
from kvrouter.router.serve.api.http import fastapi_app
from kvrouter.router.serve.api.openapi import EVENTS, HOT_OPERATIONS
from kvrouter.simulator.command import app as simulator
from tests.contract.api_support import TinyCore, build
from tests.support.metric_labels import label_names

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"
HTTP, CLI, METRICS = ((REFERENCE / name).read_text() for name in ("http.md", "cli.md", "metrics.md"))

FLAG = re.compile(r"--[a-z][a-z-]*")
# This metric exists with several processes only, and is made where their pages are joined.
JOINED_METRICS = {("kvrouter_processes_answering", "gauge", ())}
HELP = {"--help", "-h"}


def test_the_page_of_http_has_every_route(monkeypatch: pytest.MonkeyPatch) -> None:
    apps: list[FastAPI] = []

    class Recorded(FastAPI):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            apps.append(self)

    monkeypatch.setattr(fastapi_app, "FastAPI", Recorded)
    build(TinyCore())
    (app,) = apps
    routes = [route for route in app.state.routes if isinstance(route, APIRoute)]
    served = {f"{method} {route.path_format}" for route in routes for method in route.methods or ()}
    served |= {f"GET {EVENTS}"}
    served |= {f"POST {path}" for path in (*PATHS, *(operation[0] for operation in HOT_OPERATIONS))}
    served |= {f"{method} {path}" for path, methods in STORED_PATHS.items() for method in methods}
    assert set(re.findall(r"^### `([A-Z]+ /\S*)`$", HTTP, re.MULTILINE)) == served


def test_the_page_of_http_has_every_error_code() -> None:
    classes = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.RouterError)
    ]
    served = {(str(kind.status), kind.default_code) for kind in classes}
    starts = {kind.default_code for kind in (errors.SettingError, errors.StartError)}
    listed = {
        (status, code)
        for status, codes in re.findall(r"^\| (\d{3}) \| ([^|]+) \|", HTTP, re.MULTILINE)
        for code in re.findall(r"`(\w+)`", codes)
    }
    assert {(status, code) for status, code in served if code not in starts} <= listed
    source = "".join(path.read_text() for path in (ROOT / "router").rglob("*.py"))
    named = set(re.findall(r'\bcode="(\w+)"', source))
    assert {code for _, code in listed} == {code for _, code in served} - starts | named


# The flags of every command that queries a router.
CLIENT_FLAGS = {"--url", "--api-key", "--ca-file", "--client-certificate", "--client-key", "--json"}
# The flags of these commands are the settings.
RUNS = ("kvrouter serve", "kvrouter epp")


def commands(command: Any, name: str) -> Iterator[tuple[str, set[str]]]:
    """Yield each command below `command`, with its flags.

    Flags that the commands of a group have in common are listed under the name of the group.
    """
    if hasattr(command, "commands"):
        if common := {flag for parameter in command.params for flag in parameter.opts} - HELP:
            yield name, common
        for child, child_command in command.commands.items():
            yield from commands(child_command, f"{name} {child}")
        return
    yield name, {flag for parameter in command.params for flag in parameter.opts if flag.startswith("-")} - HELP


def test_the_page_of_the_command_line_has_every_command_and_flag() -> None:
    flags_of = dict(commands(typer.main.get_command(cli), "kvrouter"))
    flags_of["kvrouter sim"] = dict(commands(typer.main.get_command(simulator), "sim"))["sim"]
    common = flags_of.pop("kvrouter")
    head = CLI.partition("\n## ")[0]
    assert common | CLIENT_FLAGS <= set(FLAG.findall(head)), common
    # The other flags of the command are the settings, whose page is generated.
    settings = flags_of["kvrouter serve"] - {"--config"}
    assert all(flag in (REFERENCE / "settings.md").read_text() for flag in settings)
    sections = dict(re.findall(r"^## `(kvrouter [^`]+)`\n(.*?)(?=^## |\Z)", CLI, re.MULTILINE | re.DOTALL))
    assert set(sections) == set(flags_of)
    for name, flags in flags_of.items():
        listed = set(FLAG.findall(sections[name]))
        # The page lists the flags that all client commands have once, above the commands, with the commands' names.
        if flags >= CLIENT_FLAGS:
            assert f"`{name.removeprefix('kvrouter ')}`" in head, name
            listed |= CLIENT_FLAGS
        long = {flag for flag in flags if flag.startswith("--")} - (settings if name in RUNS else set())
        assert long <= listed <= flags, name


def test_the_page_of_metrics_has_every_metric_with_its_type_and_labels() -> None:
    registry = MetricRegistry()
    RouterMetrics(registry)
    served = {
        (family.name + ("_total" if family.type == "counter" else ""), family.type, label_names(metric))
        for metric in registry._collector_to_names
        for family in metric.collect()
    }
    listed = {
        (name, kind, tuple(re.findall(r"`(\w+)`", labels)))
        for name, kind, labels in re.findall(r"^\| `(kvrouter_\w+)` \| (\w+) \| ([^|]*)\|", METRICS, re.MULTILINE)
    }
    assert listed == served | JOINED_METRICS
