# SPDX-License-Identifier: Apache-2.0
"""The engine patch's distribution, as far as reading it shows: names in its copy of `events`, requirements, versions.

tests/system/test_distributions.py builds and installs it.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvrouter.engine_patch.reporter import reporter_start

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "engine_patch" / "pyproject.toml").read_text())
ROUTER = tomllib.loads((ROOT / "pyproject.toml").read_text())
# The engine brings these; the patch only runs inside it.
ENGINES = {"torch", "vllm", "sglang"}
PACKAGE_OF_MODULE = {"zmq": "pyzmq"}


def builder() -> Any:
    spec = importlib.util.spec_from_file_location("patch_setup", ROOT / "engine_patch" / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sources() -> list[Path]:
    patch = ROOT / "engine_patch"
    files = [path for path in patch.rglob("*.py") if not path.is_relative_to(patch / "build")]
    return sorted([*(path for path in files if path != patch / "setup.py"), *(ROOT / "events").rglob("*.py")])


@pytest.mark.parametrize(
    ("source", "rewritten"),
    [
        ("from kvrouter.events.vllm.wire import X\n", "from kvrouter.engine_patch.events.vllm.wire import X\n"),
        (
            "def f():\n    from kvrouter.events.vllm.wire import (\n        X,  # why\n        Y as Z,\n    )\n",
            "def f():\n    from kvrouter.engine_patch.events.vllm.wire import (\n        X,  # why\n        Y as Z,\n    )\n",
        ),
        ("from kvrouter.events import vllm\n", "from kvrouter.engine_patch.events import vllm\n"),
        ("import kvrouter.events.vllm as v, os\n", "import kvrouter.engine_patch.events.vllm as v, os\n"),
        ('load("kvrouter.events.patch")\n', 'load("kvrouter.engine_patch.events.patch")\n'),
        ("é = 'kvrouter.events'; load('kvrouter.events')\n", None),
        ('"""Uses `kvrouter.events`."""\nfrom kvrouter.engine_patch.plugin import a\n', ""),
        ("a = 'one \x0c form feed'\nfrom kvrouter.events.vllm import wire\n", None),
        ("# kvrouter.events is a comment\nevents = kvrouter_events = 'kvrouter'\n", ""),
    ],
)
def test_names_of_events_become_those_of_the_copy(source: str, rewritten: str | None) -> None:
    """Check the rewritten text; "" stands for the source itself, None for a plain replacement."""
    plain = source.replace("kvrouter.events", "kvrouter.engine_patch.events")
    assert builder().rewritten(source, "m.py") == (plain if rewritten is None else rewritten or source)


@pytest.mark.parametrize(
    "source",
    [
        "import kvrouter.events.vllm\n",
        "import kvrouter\nkvrouter.events.vllm\n",
        "from kvrouter import events\n",
        "from kvrouter import *\n",
        "from ..events import wire\n",
        "from . import wire\n",
        "from kvrouter.router.base import x\n",
        "from kvrouter.simulator import x\n",
        "import kvrouter.client as c\n",
        "load(f'kvrouter.events.{name}')\n",
        "load('kvrouter.' + name)\n",
        "load('kvrouter.events.' + name)\n",
        "load('kvrouter.' 'events')\n",
        "load('kvrouter.events:name')\n",
        "load(r'kvrouter.events')\n",
        "load('''kvrouter.events''')\n",
    ],
)
def test_a_form_that_is_not_renamed_fails_the_build(source: str) -> None:
    module = builder()
    with pytest.raises(module.NotRenamed, match=r"^m\.py[,:]"):
        module.rewritten(source, "m.py")


def test_the_build_renames_every_module_of_the_tree() -> None:
    module = builder()
    texts = {path: module.rewritten(path.read_text(), str(path)) for path in sources()}
    changed = [path for path, text in texts.items() if text != path.read_text()]
    assert any(path.is_relative_to(ROOT / "events") for path in changed)
    assert any(path.is_relative_to(ROOT / "engine_patch") for path in changed)
    assert not [path for path, text in texts.items() if re.search(r"(from|import) kvrouter\.events", text)]


def test_the_requirements_are_the_packages_that_are_imported() -> None:
    imported = set()
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.partition(".")[0])
    packages = {PACKAGE_OF_MODULE.get(name, name) for name in imported - sys.stdlib_module_names - {"kvrouter"}}
    required = {re.split(r"[^\w-]", need)[0] for need in PROJECT["project"]["dependencies"]}
    optional = {
        re.split(r"[^\w-]", need)[0] for needs in PROJECT["project"]["optional-dependencies"].values() for need in needs
    }
    # `data_plane.py` imports NIXL by its name, because it comes in several packages.
    assert packages - ENGINES == (required | optional) - {"nixl-cu12"}
    assert optional == {"xxhash", "nixl-cu12"}, "optional is what the code imports inside `try`"
    # An upper bound would let pip replace a package that the engine chose.
    assert not [need for need in PROJECT["project"]["dependencies"] if not re.fullmatch(r"[\w-]+>=[\d.]+", need)]


def test_nothing_is_compiled() -> None:
    (need,) = PROJECT["build-system"]["requires"]
    assert need.startswith("setuptools>=")
    files = [path for folder in ("engine_patch", "events") for path in (ROOT / folder).rglob("*.*")]
    compiled = [path for path in files if path.suffix in {".pyx", ".pxd", ".c", ".h"}]
    # The router compiles this one; the patch has its fallback alone.
    assert compiled == [ROOT / "events/transport/libzmq.pyx"]


def test_each_plugin_is_registered_by_the_patch_alone() -> None:
    assert PROJECT["project"]["entry-points"] == {
        "vllm.general_plugins": {"kvrouter": "kvrouter.engine_patch.plugin:register"},
        "sglang.srt.plugins": {"kvrouter": "kvrouter.engine_patch.sglang.plugin:register"},
    }
    assert "entry-points" not in ROUTER["project"]


def test_a_report_names_the_version_of_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PROJECT["project"]["name"] == reporter_start.DISTRIBUTION
    assert reporter_start.patch_version() == importlib.metadata.version("hybrid-kv-router")
    monkeypatch.setattr(reporter_start, "DISTRIBUTION", "hybrid-kv-nothing")
    assert reporter_start.patch_version() == reporter_start.NOT_INSTALLED
