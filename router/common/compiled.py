# SPDX-License-Identifier: Apache-2.0
"""Modules with a `.pxd` or `.pyx` beside them are compiled at installation where there is a C compiler, and run as they
stand where there is none, some hundred times slower. With KVROUTER_TEST_UNCOMPILED=1 they run as they stand all the
same, so that they can be read, debugged and covered; tests hold both ways equal."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

UNCOMPILED = "KVROUTER_TEST_UNCOMPILED"
SLOW = (
    "the compiled modules are missing, so questions and events take some hundred times longer: install a wheel of this "
    "platform, or install again where there is a C compiler"
)


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
    """SLOW where nothing is compiled."""
    found = find_spec("kvrouter.router.matching.judge")
    return None if found is not None and isinstance(found.loader, ExtensionFileLoader) else SLOW


def wanted() -> bool:
    return os.environ.get(UNCOMPILED) != "1"
