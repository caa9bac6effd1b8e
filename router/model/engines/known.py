# SPDX-License-Identifier: Apache-2.0
"""The engines that this router knows, by name."""

from __future__ import annotations

from kvrouter.router.model.engines.engine import Engine
from kvrouter.router.model.engines.sglang.description import SGLANG
from kvrouter.router.model.engines.vllm.description import VLLM
from kvrouter.router.model.workers.engine_name import DEFAULT_ENGINE

ENGINES = {engine.name: engine for engine in (VLLM, SGLANG)}


def engine_named(name: str | None) -> Engine:
    """None, or a name that an older or newer router stored: the default, whose schemes explain no other's hashes."""
    return ENGINES.get(name or DEFAULT_ENGINE, ENGINES[DEFAULT_ENGINE])
