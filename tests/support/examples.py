# SPDX-License-Identifier: Apache-2.0
"""How many examples a property is tried with."""

from __future__ import annotations

import os

# `make test` sets it to `few`: it should end while somebody waits, and `make test-all` tries them all.
VARIABLE = "KVROUTER_TEST_EXAMPLES"
PART = 5


def examples(all_of_them: int) -> int:
    return max(1, all_of_them // PART) if os.environ.get(VARIABLE) == "few" else all_of_them
