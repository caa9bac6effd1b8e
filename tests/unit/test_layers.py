# SPDX-License-Identifier: Apache-2.0
"""Imports form one line of wings and rooms.

Data flows events -> ingest -> index -> matching -> placement -> api, and imports run the other way.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("contract", "client", "events", "router", "engine_patch", "simulator", "replay", "shadow")

# Packages of this project that each package may import.
ALLOWED_PACKAGES = {
    # The bodies and answers of the HTTP API, for both of its sides.
    "contract": {"contract"},
    # A client of a router needs nothing of the router.
    "client": {"client", "contract"},
    "events": {"events"},
    "router": {"router", "contract", "events"},
    "engine_patch": {"engine_patch", "events"},
    "simulator": {"simulator", "events"},
    # The replay lets the router's rule choose among simulated replicas, so it stands above both, and neither knows it:
    # a simulator that knew the router could agree with its mistakes.
    "replay": {"replay", "router", "contract", "simulator", "events"},
    # The shadow runs a router of its own to find the reuse that another router's choices miss.
    "shadow": {"shadow", "router", "contract", "events"},
}

# The tools beside the product. Only the command line imports them, inside functions, so that no other command waits for
# them.
TOOLS = ("simulator", "replay", "shadow")
COMMANDS = "app.cli"

# The rooms of each package, from the bottom up: a room imports only the rooms before it. A room inside another room
# stands with it, and "" is the package's root. The docstring of each room's `__init__.py` says what the room is for.
ROOMS: dict[str, tuple[str, ...]] = {
    "contract": ("",),
    "client": ("",),
    "events": ("transport", "vllm", "patch", "peer"),
    # Eight wings, from `base` to `app`: a wing imports only the wings before it. The entry points are in no wing,
    # because installed scripts name `router/cli`.
    "router": (
        *("base.common", "base.redis_client", "base.telemetry"),
        *("model.workers", "model.kvcache", "model.engines", "model.upstream", "model.config"),
        *("index.ingest", "index.store", "index.matching"),
        *("follow.feed", "follow.streams", "follow.fleet", "follow.discovery"),
        *("route.load", "route.placement", "route.tokens", "route.owners"),
        *("observe.decisions", "observe.findings", "observe.quality", "observe.history"),
        *("serve.access", "serve.proxy", "serve.gateway", "serve.page", "serve.api"),
        *("app.core", "app.diagnosis", "app.server", "app.cli"),
        "cli",
    ),
    "engine_patch": ("setup", "offload", "reporter", "hooks", "sglang", ""),
    "simulator": ("cache", "engine", "http", "demo", ""),
    "replay": ("traces", "fleet", "policies", "runs", "report", ""),
    "shadow": ("",),
}

ENGINE_SIDE_FORBIDDEN = {"fastapi", "uvicorn", "redis"}

# The modules of the offload tier that touch tensors, and those that vLLM calls; the other modules run and are tested
# without torch and vLLM.
OFFLOAD_WITH = {
    "torch": {"canonical", "copier", "cuda_copier", "region"},
    "vllm": {"cuda_copier", "manager", "slots", "spec", "worker"},
}


# In the patch's folder: the script that builds its distribution, and the folder that holds what it built.
NO_MODULES = (ROOT / "engine_patch" / "setup.py", ROOT / "engine_patch" / "build")


def python_files(folder: Path, pattern: str = "*.py") -> list[Path]:
    """Return the files of modules below a folder, without those of a build."""
    return [path for path in sorted(folder.rglob(pattern)) if not any(map(path.is_relative_to, NO_MODULES))]


def modules(package: str) -> Iterator[tuple[str, Path]]:
    """Yield each module of the package, as its dotted name within the package and its file."""
    for path in python_files(ROOT / package):
        parts = path.relative_to(ROOT / package).with_suffix("").parts
        yield ".".join(part for part in parts if part != "__init__"), path


def imports(path: Path) -> Iterator[str]:
    """Yield the absolute names of everything that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from named(node)


def named(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """Yield the absolute names that one statement imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    assert node.level == 0, f"line {node.lineno}: relative import"
    yield node.module or ""
    yield from (f"{node.module}.{alias.name}" for alias in node.names)


def violations(package: str, name: str, imported: str) -> str | None:
    """Return why `package.name` may not import `imported`, or None if it may."""
    if not imported.startswith("kvrouter."):
        top = imported.partition(".")[0]
        if package in ("events", "engine_patch") and top in ENGINE_SIDE_FORBIDDEN:
            return f"{package} runs in the engine's environment and must not need {top}"
        return None
    _, target, *rest = imported.split(".")
    if target in TOOLS and (package, room(package, name)) == ("router", COMMANDS):
        return None
    if target not in ALLOWED_PACKAGES[package]:
        return f"{package} must not import {target}"
    if target != package or not rest:
        return None
    order = ROOMS[package]
    own, other = room(package, name), room(package, ".".join(rest))
    if order.index(other) > order.index(own):
        return f"{package}.{name} must not import {imported}: that runs back"
    return None


def room(package: str, name: str) -> str:
    """Return the room of a module as `ROOMS` has it, or "" for the package's root."""
    return next((room for room in ROOMS[package] if room and (name == room or name.startswith(f"{room}."))), "")


@pytest.mark.parametrize("package", PACKAGES)
def test_no_import_runs_against_the_order_of_the_rooms(package: str) -> None:
    problems = []
    for name, path in modules(package):
        for imported in imports(path):
            problem = violations(package, name, imported) if name else None
            if problem:
                problems.append(f"{path.relative_to(ROOT)}: {problem}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_is_in_a_room_and_every_room_says_what_it_is_for(package: str) -> None:
    used = set()
    for name, path in modules(package):
        if path.name != "__init__.py":
            used.add(room(package, name))
        else:
            assert ast.get_docstring(ast.parse(path.read_text())), f"{path} does not say what it is for"
    assert used == set(ROOMS[package])


def test_the_command_line_imports_tools_inside_functions() -> None:
    for name, path in modules("router"):
        tree = ast.parse(path.read_text())
        at_import = {
            imported for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom) for imported in named(node)
        }
        tools = [imported for imported in at_import if imported.split(".")[1:2] and imported.split(".")[1] in TOOLS]
        assert not tools, f"router.{name} imports {tools} where it is loaded"


def test_no_modules_import_each_other() -> None:
    imported_by: dict[str, set[str]] = {}
    for package in PACKAGES:
        for name, path in modules(package):
            imported_by[f"kvrouter.{package}.{name}"] = set(imports(path))
    ordered: set[str] = set()
    while imported_by:
        free = {name for name, imported in imported_by.items() if not (imported & imported_by.keys()) - {name}}
        assert free, f"these import each other: {sorted(imported_by)}"
        ordered |= free
        imported_by = {name: imported for name, imported in imported_by.items() if name not in free}


def test_the_check_finds_an_import_against_the_order() -> None:
    assert violations("client", "calls", "kvrouter.events.vllm.codec")
    assert violations("router", "model.kvcache.gpu_hit", "kvrouter.router.app.core.router_core")
    assert violations("events", "vllm.codec", "kvrouter.router.base.common.ids")
    assert violations("events", "vllm.codec", "kvrouter.events.patch.decode")
    assert violations("simulator", "cache.pool", "kvrouter.router.model.kvcache.block_hash")
    assert violations("simulator", "engine.replica", "kvrouter.replay.runs.simulate")
    assert violations("router", "app.core.router_core", "kvrouter.replay.runs.simulate")
    assert violations("router", "route.placement.cost", "kvrouter.router.serve.proxy.headers")
    assert violations("router", "app.cli.replay", "kvrouter.replay.command") is None
    assert violations("replay", "traces.openai", "kvrouter.replay.runs.simulate")
    assert violations("replay", "runs.simulate", "kvrouter.router.route.placement.cost") is None
    assert violations("events", "vllm.codec", "redis")
    assert violations("router", "app.core.router_core", "kvrouter.router.model.kvcache.gpu_hit") is None


@pytest.mark.parametrize("library", OFFLOAD_WITH)
def test_the_books_of_the_offload_tiers_import_no_engine(library: str) -> None:
    folder = ROOT / "engine_patch" / "offload"
    users = {
        path.stem for path in folder.rglob("*.py") if any(name.partition(".")[0] == library for name in imports(path))
    }
    assert users == OFFLOAD_WITH[library]


@pytest.mark.parametrize(
    ("project", "packages"),
    [(ROOT, [package for package in PACKAGES if package != "engine_patch"]), (ROOT / "engine_patch", ["engine_patch"])],
    ids=["router", "engine patch"],
)
def test_pyproject_lists_every_package(project: Path, packages: list[str]) -> None:
    settings = tomllib.loads((project / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert set(settings["packages"]) == {
        "kvrouter." + ".".join(path.parent.relative_to(ROOT).parts)
        for package in packages
        for path in python_files(ROOT / package, "__init__.py")
    }
    for name, folder in settings["package-dir"].items():
        assert (project / folder / "py.typed").exists(), f"{name} has no py.typed"
