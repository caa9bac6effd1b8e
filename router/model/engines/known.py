# SPDX-License-Identifier: Apache-2.0
"""The kinds of engines that this router supports, by name."""

from __future__ import annotations

from kvrouter.router.model.engines.engine import Engine
from kvrouter.router.model.engines.sglang.description import SGLANG
from kvrouter.router.model.engines.vllm.description import VLLM
from kvrouter.router.model.workers.engine_name import DEFAULT_ENGINE

# The endpoints of a renderer without an engine, which are vLLM's (`vllm launch render`, `vllm-rs render`).
RENDERER_WAYS = VLLM.tokens
ENGINES = {engine.name: engine for engine in (VLLM, SGLANG)}


def engine_named(name: str | None) -> Engine:
    """Return the description of an engine by its name.

    Without a name, or with an unknown one that an older or newer router stored, return the default engine. Its schemes
    explain no hashes of other engines, so they lead to no wrong hits.
    """
    return ENGINES.get(name or DEFAULT_ENGINE, ENGINES[DEFAULT_ENGINE])
