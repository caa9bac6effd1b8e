# SPDX-License-Identifier: Apache-2.0
"""How a plain Python function becomes a kernel.

A kernel is compiled by numba without the GIL and cached on disk beside its source. With NUMBA_DISABLE_JIT=1 it runs as plain
Python, so that it can be read, debugged and covered; tests hold both ways equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import numba

P = ParamSpec("P")
R = TypeVar("R")


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, compiled at its first call. Only numpy arrays and scalars go in and out."""
    return cast("Callable[P, R]", numba.njit(nogil=True, cache=True)(function))
