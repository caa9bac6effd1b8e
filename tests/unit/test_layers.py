# SPDX-License-Identifier: Apache-2.0
"""Imports form one line of rooms: data flows events -> ingest -> index -> matching -> placement -> api, imports the
other way."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("client", "events", "router", "engine_patch", "simulator", "replay")

# What each package may import of ours.
ALLOWED_PACKAGES = {
    # Whoever calls a router needs nothing of it.
    "client": {"client"},
    "events": {"events"},
    "router": {"router", "events"},
    "engine_patch": {"engine_patch", "events"},
    "simulator": {"simulator", "events"},
    # It asks the router's rule what simulated replicas do, so it stands above both, and neither knows it: a simulator
    # that knew the router could agree with its mistakes.
    "replay": {"replay", "router", "simulator", "events"},
}

# The rooms of each package from the bottom up, each with what it is for; a room imports only rooms above its own line
# here. A room inside another stands with it. "" is the package's root.
ROOMS: dict[str, dict[str, str]] = {
    "client": {
        "": "A client of the HTTP API: one core, a shell that blocks and one for asyncio.",
    },
    "events": {
        "transport": "What both streams share: connections, the receive loop, requests, bounds and permits.",
        "vllm": "The engines' own event stream, in vLLM's form, which SGLang has too.",
        "patch": "The reports of the engine patch.",
    },
    "router": {
        "common": "Values and helpers that do not depend on routing.",
        "workers": "What a worker is, who described it, and what may be connected to.",
        "kvcache": "Engines' caches rederived: groups, block hashes and the hit rule. Pure.",
        "engines": "What differs from engine to engine: a folder each, all else reads its description.",
        "ingest": "From one worker's events to net changes of its residency. Pure.",
        "upstream": "Connections to engines.",
        "redis_client": "Connections to Redis, to a cluster, through Sentinel, and the private server.",
        "index": "What Redis holds of each worker, and how it is written and followed.",
        "telemetry": "Metrics and log format of a process.",
        "config": "Settings from file, environment and flags.",
        "access": "Who may connect to the router's port and do what: certificate, API keys, rate of registrations.",
        "matching": "From a question to every worker's hit, in memory.",
        "load": "What is in flight where, and how fast each worker is.",
        "placement": "Which worker gets a request, why, and the reservation.",
        "watch": "What operators watch: the fleet's events as one stream, and why each request went where it went.",
        "tokens": "From a client's text to the engine's token ids.",
        "streams": "Follows one worker: its events, its lease, and whether its engine lives.",
        "fleet": "Which workers there are, which router follows each, and the mirror of all.",
        "core": "The router without its HTTP: questions answered, and how everything is.",
        "quality": "Predicted and delivered reuse.",
        "proxy": "An OpenAI request to an engine, and its answer back.",
        "gateway": "Endpoints picked for a gateway, over Envoy's external processing protocol.",
        "diagnosis": "What is wrong with a fleet, by what this shows, and what mends it.",
        "page": "The page for people: files that a browser loads.",
        "api": "The HTTP API, one module a resource.",
        "discovery": "Sources of workers besides registration.",
        "server": "Wiring, start, signals and processes.",
        "shadow": "What the choices of another router leave unused, by this router's index.",
        "cli": "The `kvrouter` command.",
    },
    "engine_patch": {
        "setup": "Settings, endpoints and features of the patch.",
        "offload": "An offload connector for vLLM with a CPU tier and a disk tier.",
        "reporter": "The stream of reports: what is held, counted, translated and sent.",
        "hooks": "Where vLLM's code is hooked.",
        "sglang": "SGLang: what its radix cache holds, by component, on the same stream of reports.",
        "": "What vLLM loads.",
    },
    "simulator": {
        "cache": "The KV cache of a simulated replica.",
        "engine": "Scheduler and clock of a simulated replica.",
        "http": "The HTTP server of a simulated replica.",
        "demo": "`kvrouter demo`.",
        "": "`python -m kvrouter.simulator`, and its options.",
    },
    "replay": {
        "traces": "A request trace, whatever it was written by.",
        "fleet": "Simulated replicas in virtual time, and this router's index over them.",
        "policies": "Who gets a request: one module for each family of routers.",
        "runs": "A trace under one policy, and what came of it.",
        "report": "Runs side by side: table, files, plots and a sentence.",
        "": "`kvrouter replay`.",
    },
}

ENGINE_SIDE_FORBIDDEN = {"fastapi", "uvicorn", "redis"}

# Of the offload tier, what touches tensors and what vLLM calls; the rest runs and is tested without either.
OFFLOAD_WITH = {
    "torch": {"canonical", "copier", "cuda_copier", "region"},
    "vllm": {"cuda_copier", "manager", "slots", "spec", "worker"},
}


def modules(package: str) -> Iterator[tuple[str, Path]]:
    """(dotted name within the package, file), tests and caches left out."""
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT / package).with_suffix("").parts
        yield ".".join(part for part in parts if part != "__init__"), path


def imports(path: Path) -> Iterator[str]:
    """Absolute names of everything a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def violations(package: str, name: str, imported: str) -> str | None:
    """Why `package.name` may not import `imported`, None when it may."""
    if not imported.startswith("kvrouter."):
        top = imported.partition(".")[0]
        if package in ("events", "engine_patch") and top in ENGINE_SIDE_FORBIDDEN:
            return f"{package} runs in the engine's environment and must not need {top}"
        return None
    _, target, *rest = imported.split(".")
    if target in ("simulator", "replay") and (package, room(package, name)) == ("router", "cli"):
        # The one command has them all; the simulator itself never knows the router.
        return None
    if target not in ALLOWED_PACKAGES[package]:
        return f"{package} must not import {target}"
    if target != package or not rest:
        return None
    order = list(ROOMS[package])
    own, other = room(package, name), room(package, ".".join(rest))
    if order.index(other) > order.index(own):
        return f"{package}.{name} must not import {imported}: that runs back"
    return None


def room(package: str, name: str) -> str:
    """The outermost room of a module, "" for the package's root."""
    first = name.partition(".")[0]
    return first if first in ROOMS[package] else ""


@pytest.mark.parametrize("package", PACKAGES)
def test_no_import_runs_back(package: str) -> None:
    found = []
    for name, path in modules(package):
        for imported in imports(path):
            problem = violations(package, name, imported) if name else None
            if problem:
                found.append(f"{path.relative_to(ROOT)}: {problem}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_room_is_listed_and_no_other_module_is_loose(package: str) -> None:
    folders = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
    loose = {path.stem for path in (ROOT / package).glob("*.py")} - {"__init__"}
    assert folders == {name for name in ROOMS[package] if name}
    for name in folders:
        assert ast.get_docstring(ast.parse((ROOT / package / name / "__init__.py").read_text())) == ROOMS[package][name]
    assert bool(loose) == ("" in ROOMS[package]), f"{package}/ holds {sorted(loose)}"


def test_no_modules_import_each_other() -> None:
    imported_by: dict[str, set[str]] = {}
    for package in PACKAGES:
        for name, path in modules(package):
            imported_by[f"kvrouter.{package}.{name}"] = set(imports(path))
    ordered: set[str] = set()
    while imported_by:
        free = {name for name, found in imported_by.items() if not (found & imported_by.keys()) - {name}}
        assert free, f"these import each other: {sorted(imported_by)}"
        ordered |= free
        imported_by = {name: found for name, found in imported_by.items() if name not in free}


def test_the_check_itself_sees_a_run_back() -> None:
    assert violations("client", "calls", "kvrouter.events.vllm.codec")
    assert violations("router", "kvcache.gpu_hit", "kvrouter.router.core.router_core")
    assert violations("events", "vllm.codec", "kvrouter.router.common.ids")
    assert violations("events", "vllm.codec", "kvrouter.events.patch.decode")
    assert violations("simulator", "cache.pool", "kvrouter.router.kvcache.block_hash")
    assert violations("simulator", "engine.replica", "kvrouter.replay.runs.simulate")
    assert violations("router", "core.router_core", "kvrouter.replay.runs.simulate")
    assert violations("replay", "traces.openai", "kvrouter.replay.runs.simulate")
    assert violations("replay", "runs.simulate", "kvrouter.router.placement.cost") is None
    assert violations("events", "vllm.codec", "redis")
    assert violations("router", "core.router_core", "kvrouter.router.kvcache.gpu_hit") is None


@pytest.mark.parametrize("library", OFFLOAD_WITH)
def test_the_offload_tiers_books_need_no_engine(library: str) -> None:
    folder = ROOT / "engine_patch" / "offload"
    users = {
        path.stem for path in folder.rglob("*.py") if any(name.partition(".")[0] == library for name in imports(path))
    }
    assert users == OFFLOAD_WITH[library]


def test_pyproject_lists_every_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    found = {
        "kvrouter." + ".".join(path.parent.relative_to(ROOT).parts)
        for package in PACKAGES
        for path in (ROOT / package).rglob("__init__.py")
    }
    assert listed == found
    for name, folder in project["tool"]["setuptools"]["package-dir"].items():
        assert (ROOT / folder / "py.typed").exists(), f"{name} has no py.typed"
