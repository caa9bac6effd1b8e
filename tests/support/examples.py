# SPDX-License-Identifier: Apache-2.0
"""The number of examples with which a property is tested."""

from __future__ import annotations

import os

# `make test` sets it to `few`, as it should end while a developer waits; `make test-all` tries all examples. Set to `many`,
# it also brings back what CI leaves out, because each part of it takes minutes.
VARIABLE = "KVROUTER_TEST_EXAMPLES"
PART = 5


def examples(all_of_them: int) -> int:
    return max(1, all_of_them // PART) if os.environ.get(VARIABLE) == "few" else all_of_them


def many() -> bool:
    """Return whether tests that start whole engines, installations or worlds try as many as they can."""
    return os.environ.get(VARIABLE) == "many"
