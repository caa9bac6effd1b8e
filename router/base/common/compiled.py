# SPDX-License-Identifier: Apache-2.0
"""Modules with a `.pxd` or `.pyx` beside them are compiled at installation where there is a C compiler, and run as they
stand where there is none, up to 270 times slower. With KVROUTER_TEST_UNCOMPILED=1 they run as they stand all the
same, so that they can be read, debugged and covered; tests hold both ways equal."""

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
    "some modules are not compiled ({}), so questions and events take up to 90 times longer: install a wheel of "
    "this platform, or install again where there is a C compiler"
)
ROUTER = Path(__file__).parents[2]


class SourceFinder:
    """Finds our modules' sources, also where they are compiled. For `sys.meta_path`."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith("kvrouter."):
            return None
        found = PathFinder.find_spec(name, path, target)
        if found is None or not isinstance(found.loader, ExtensionFileLoader):
            return found
        return spec_from_file_location(name, Path(found.loader.path).with_name(name.rpartition(".")[2] + ".py"))


@functools.cache
def caution() -> str | None:
    """Which modules should be compiled and are not, and what to do; None where all are."""
    typed = (path.with_suffix("") for kind in ("*.pxd", "*.pyx") for path in ROUTER.rglob(kind))
    plain = [path.name for path in typed if not (wanted() and Path(f"{path}{EXTENSION_SUFFIXES[0]}").exists())]
    return SLOW.format(", ".join(sorted(plain))) if plain else None


def wanted() -> bool:
    return os.environ.get(UNCOMPILED) != "1"
