# SPDX-License-Identifier: Apache-2.0
"""No import runs back: data flows events -> ingest -> index -> mirror -> match -> choose -> api, and imports the other way."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("events", "router", "engine_patch", "simulator")

# What each package may import of ours.
ALLOWED_PACKAGES = {
    "events": {"events"},
    "router": {"router", "events"},
    "engine_patch": {"engine_patch", "events"},
    "simulator": {"simulator", "events"},
}

# Modules of the router from the bottom up; a module may import only from lines above its own, or from its own line.
ROUTER_LAYERS = (
    {
        "names",
        "states",
        "jit",
        "errors",
        "version",
        "printable",
        "owners",
        "role",
        "bounded",
        "multimodal",
        "sockets",
        "shutdown",
    },
    {
        "registration",
        "registration_bodies",
        "connectors",
        "question",
        "probing",
        "status",
        "vitals",
        "load.gauges",
        "engine_disk",
    },
    {"worker_spec", "hashing", "copy_kernels", "allow_list", "numbers"},
    {"arrays", "model_names", "discovery.told"},
    {"engine_lists", "provenance"},
    {"quality.usage", "quality.predictions", "quality.flights"},
    {"config", "metrics", "logs", "checkup", "siblings", "supervision"},
    {"cautions"},
    {"quality.measures", "quality.tap", "quality.told"},
    {"segments", "approximate", "copies", "transitions", "catalog", "identity", "declared"},
    {"geometry", "residency"},
    {"ingest"},
    {"report_ingest", "backlog"},
    {"lead"},
    {"index.resp", "index.keys", "index.kernels"},
    {"index.connection"},
    {"index.log", "index.mirror", "index.servers"},
    {"index.commit", "registry"},
    {"index.store"},
    {"index.follower", "index.embedded"},
    {"gpu_hit"},
    {"offload_hit"},
    {"match"},
    {"load.table", "load.rates", "load.sessions", "load.pending", "load.waiting"},
    {"load.messages", "load.weights"},
    {"cost"},
    {"load.share", "policies"},
    {"choose", "candidates"},
    {"load.selections"},
    {"disaggregation", "losses"},
    {"placement"},
    {"line"},
    {"deciding"},
    {"tokens.prompt"},
    {"tokens.asked", "tokens.pieces", "tokens.template"},
    {"tokens.engine_forms", "tokens.memory", "tokens.forwarding"},
    {"tokens.probes", "tokens.conversation", "tokens.engine_client"},
    {"tokens.judging", "tokens.local"},
    {"tokens.engines"},
    {"tokens.tokenizing"},
    {"hold", "told", "shares", "heartbeat"},
    {"membership"},
    {"stream"},
    {"following"},
    {"reporting", "fleet"},
    {"core", "placing"},
    {"quality.tracing"},
    {"quality.watching"},
    {"proxy.target", "proxy.breaker", "proxy.failure", "proxy.body", "proxy.handover"},
    {"proxy.headers", "proxy.addresses"},
    {"proxy.connection"},
    {"proxy.pool", "proxy.admission", "proxy.client"},
    {"proxy.reading"},
    {"proxy.sending"},
    {"proxy.prefilling"},
    {"proxy"},
    {"api"},
    {"discovery.file_watch"},
    {"discovery.candidate", "discovery.asking", "discovery.reconciling"},
    {
        "discovery.source",
        "discovery.pods",
        "discovery.workers_file",
        "discovery.settings_file",
        "discovery.file_source",
    },
    {"discovery.cluster_api"},
    {"discovery.kubernetes"},
    {"discovery.sources", "discovery.discovery"},
    {"warm"},
    {"app", "client", "tables"},
    {"supervise"},
    {"cli"},
)

# Packages whose modules stand in several layers; they hold nothing themselves.
PACKAGE_NAMES = ("discovery", "index", "load", "quality", "tokens")

ENGINE_SIDE_FORBIDDEN = {"numba", "fastapi", "uvicorn", "redis"}

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
    if (package, name, target) == ("router", "cli", "simulator"):
        # The one command has them all; the simulator itself never knows the router.
        return None
    if target not in ALLOWED_PACKAGES[package]:
        return f"{package} must not import {target}"
    if package != "router" or target != "router" or not rest:
        return None
    own, other = layer(name), layer(".".join(rest))
    if own is None:
        return f"router/{name.replace('.', '/')}.py has no place in ROUTER_LAYERS"
    if other is not None and other > own:
        return f"router.{name} must not import router.{'.'.join(rest)}: that runs back"
    return None


def layer(name: str) -> int | None:
    """The line of a module, by its longest known prefix."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        prefix = ".".join(parts[:end])
        for line, names in enumerate(ROUTER_LAYERS):
            if prefix in names:
                return line
    return None


@pytest.mark.parametrize("package", PACKAGES)
def test_no_import_runs_back(package: str) -> None:
    found = []
    for name, path in modules(package):
        if package == "router" and name and name not in PACKAGE_NAMES:
            assert layer(name) is not None, f"router/{name}: give it a place in ROUTER_LAYERS"
        for imported in imports(path):
            problem = violations(package, name, imported) if name and name not in PACKAGE_NAMES else None
            if problem:
                found.append(f"{path.relative_to(ROOT)}: {problem}")
    assert not found, "\n".join(found)


def test_the_check_itself_sees_a_run_back() -> None:
    assert violations("router", "gpu_hit", "kvrouter.router.core")
    assert violations("events", "codec", "kvrouter.router.names")
    assert violations("simulator", "pool", "kvrouter.router.hashing")
    assert violations("events", "codec", "numba")
    assert violations("router", "core", "kvrouter.router.gpu_hit") is None


@pytest.mark.parametrize("library", OFFLOAD_WITH)
def test_the_offload_tiers_books_need_no_engine(library: str) -> None:
    folder = ROOT / "engine_patch" / "offload"
    users = {
        str(path.relative_to(folder).with_suffix(""))
        for path in folder.rglob("*.py")
        if any(name.partition(".")[0] == library for name in imports(path))
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
