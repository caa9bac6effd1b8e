# SPDX-License-Identifier: Apache-2.0
"""The kinds of engines that a registration may name; `router/model/engines/` describes each."""

from __future__ import annotations

ENGINE_NAMES = ("vllm", "sglang")

# The kind that is assumed for a worker whose registration names none and whose engine does not show its kind.
DEFAULT_ENGINE = "vllm"


def engine_problem(name: str) -> str | None:
    """Return why `name` is not the name of a kind of engine, or None if it is."""
    return None if name in ENGINE_NAMES else f"must be one of {', '.join(ENGINE_NAMES)}"
