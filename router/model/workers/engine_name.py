# SPDX-License-Identifier: Apache-2.0
"""What kinds of engines a registration may name; `router/model/engines/` says what each is."""

from __future__ import annotations

ENGINE_NAMES = ("vllm", "sglang")

# Of a worker that names none and whose engine does not show it.
DEFAULT_ENGINE = "vllm"


def engine_problem(name: str) -> str | None:
    """Why `name` names no engine."""
    return None if name in ENGINE_NAMES else f"must be one of {', '.join(ENGINE_NAMES)}"
