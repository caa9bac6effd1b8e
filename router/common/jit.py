# SPDX-License-Identifier: Apache-2.0
"""How a plain Python function becomes a kernel.

A kernel is compiled by numba without the GIL and cached on disk: in NUMBA_CACHE_DIR, beside its source, or in the
user's cache folder, whichever can be written first. Where none can (a read-only installation without a home), a private
folder under the temporary one does, and failing that each process compiles the kernel again. With
NUMBA_DISABLE_JIT=1 it runs as plain Python, so that it can be read, debugged and covered; tests hold both ways equal.
"""

from __future__ import annotations

import functools
import logging
import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import numba

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger(__name__)

# All that were declared, in the order of their modules.
_kernels: list[object] = []


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, compiled at its first call. Only numpy arrays and scalars go in and out."""
    declared = _declared(function)
    _kernels.append(declared)
    return cast("Callable[P, R]", declared)


class Progress(NamedTuple):
    """Kernels that can be called, of all; missed: those that had to be compiled, as no cache had them."""

    ready: int
    total: int
    missed: int


def progress() -> Progress:
    """How far the kernels of this process are."""
    dispatchers: list[Any] = [one for one in _kernels if hasattr(one, "stats")]
    ready = sum(bool(one.signatures) for one in dispatchers)
    return Progress(ready, len(dispatchers), sum(bool(one.stats.cache_misses) for one in dispatchers))


def _declared(function: Callable[P, R]) -> object:
    # RuntimeError is how numba says "no locator available", which means no folder to write to.
    with suppress(RuntimeError):
        return numba.njit(nogil=True, cache=True)(function)
    # A folder that the user named is not replaced by one he does not know of.
    settings: Any = numba.config  # its names are made at import, from the environment
    if not settings.CACHE_DIR and (folder := private_cache_folder()):
        settings.CACHE_DIR = str(folder)
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:
        _say_uncached()
        return numba.njit(nogil=True)(function)


def private_cache_folder() -> Path | None:
    """A folder for this user's kernels under the temporary one; None when it cannot be made or is not ours alone."""
    try:
        folder = Path(tempfile.gettempdir()) / f"kvrouter-numba-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    # A cache holds pickles, which run code when read: whoever could write here would run it as us.
    private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o077
    return folder if private else None


@functools.cache  # once a process, not once a kernel
def _say_uncached() -> None:
    # A whole sentence, not `extra` fields: kernels are declared before logs are set up.
    log.warning(
        "numba finds no folder for compiled kernels, so each start compiles them, which takes seconds: "
        "set NUMBA_CACHE_DIR to a folder that can be written"
    )
