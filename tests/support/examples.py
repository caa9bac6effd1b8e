# SPDX-License-Identifier: Apache-2.0
"""The number of examples with which a property is tested."""

from __future__ import annotations

import os

# `make test` sets it to `few`, as it should end while a developer waits; `make test-all` tries all examples.
VARIABLE = "KVROUTER_TEST_EXAMPLES"
PART = 5


def examples(all_of_them: int) -> int:
    return max(1, all_of_them // PART) if os.environ.get(VARIABLE) == "few" else all_of_them
