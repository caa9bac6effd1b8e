# SPDX-License-Identifier: Apache-2.0
"""The changes that loading the patch makes in vLLM, before any scheduler is built.

As a script, `version_footprint.py OUT` writes these changes alone. It runs under versions that the patch refuses, so it
needs nothing but their modules.
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

Places = dict[tuple[str, str], Any]

# Every module with a place that the patch may touch.
MODULES = (
    "vllm.config.vllm",
    "vllm.distributed.kv_events",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler",
    "vllm.v1.core.block_pool",
    "vllm.v1.core.kv_cache_coordinator",
    "vllm.v1.core.kv_cache_manager",
    "vllm.v1.core.kv_cache_utils",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.core",
)


def places() -> Places:
    """Return everything in those modules, and in the classes that they define, by (module, dotted name)."""
    contents: Places = {}
    for module in map(importlib.import_module, MODULES):
        for name, value in vars(module).items():
            contents[module.__name__, name] = kept(value)
            if inspect.isclass(value) and value.__module__ == module.__name__:
                for inner, inner_value in vars(value).items():
                    contents[module.__name__, f"{name}.{inner}"] = kept(inner_value)
    return contents


def kept(value: Any) -> Any:
    """Return a value to compare with later: a copy of a registry, which may be changed in place, else the value."""
    return dict(value) if isinstance(value, dict) else value


def changes(before: Places) -> list[str]:
    after = places()
    return sorted(".".join(place) for place in before.keys() | after.keys() if not same(before, after, place))


def same(before: Places, after: Places, place: tuple[str, str]) -> bool:
    old, new = before.get(place, ModuleType), after.get(place, ModuleType)
    return old is new or (isinstance(old, dict) and isinstance(new, dict) and old == new)


def main() -> None:
    before = places()
    log: list[list[str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: log.append([record.levelname, record.getMessage()])  # type: ignore[method-assign]
    from kvrouter.engine_patch import plugin

    logging.getLogger(plugin.LOGGER).addHandler(handler)
    plugin.register()
    version = importlib.import_module("vllm").__version__
    report = {"version": version, "changed": changes(before), "log": log}
    Path(sys.argv[1]).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
