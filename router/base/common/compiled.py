# SPDX-License-Identifier: Apache-2.0
"""Compiled modules: those that have a `.pxd` or a `.pyx` beside them.

They are compiled at installation if there is a C compiler, unless KVROUTER_COMPILE=0 is set. Uncompiled, their Python
source runs unchanged, up to 270 times slower. With KVROUTER_TEST_UNCOMPILED=1, the source runs even if a compiled
module exists, so that it can be stepped through, debugged and covered. Tests check that both give equal results.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

UNCOMPILED = "KVROUTER_TEST_UNCOMPILED"
SLOW = (
    "{} not compiled, so questions and events take up to 90 times longer: install a wheel of this platform, or install "
    "again with a C compiler and without KVROUTER_COMPILE=0 (in a clone: make .venv/installed)"
)
SOURCES = [Path(__file__).parents[3] / folder for folder in ("events", "router")]


class SourceFinder:
    """A finder for `sys.meta_path` that returns the Python source of our modules even if they are compiled."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the module's Python source; None for modules that are not ours or do not exist."""
        if not name.startswith("kvrouter."):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or not isinstance(spec.loader, ExtensionFileLoader):
            return spec
        return spec_from_file_location(name, Path(spec.loader.path).with_name(name.rpartition(".")[2] + ".py"))


@functools.cache
def caution() -> str | None:
    """Return a warning with the fix if modules run uncompiled, else None. It names them if others are compiled."""
    typed = {path.with_suffix("") for folder in SOURCES for kind in ("*.pxd", "*.pyx") for path in folder.rglob(kind)}
    plain = [path.name for path in typed if not (wanted() and Path(f"{path}{EXTENSION_SUFFIXES[0]}").exists())]
    if not plain:
        return None
    every = len(plain) == len(typed)
    return SLOW.format("the modules that decide are" if every else f"some modules ({', '.join(sorted(plain))}) are")


def wanted() -> bool:
    """Return whether compiled modules are to be used: KVROUTER_TEST_UNCOMPILED is not 1."""
    return os.environ.get(UNCOMPILED) != "1"
