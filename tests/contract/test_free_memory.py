# SPDX-License-Identifier: Apache-2.0
"""Free memory that glibc keeps is returned to the system, as the system sees it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvrouter.router.app.server.memory_release import trim_function

MIB = 1024**2
FRESH_PROCESS = """
import asyncio, os
from kvrouter.router.app.server import memory_release as m

async def main():
    m.LOOK_S = 0.05
    task = asyncio.create_task(m.release_memory(m.trim_function()))
    await asyncio.sleep(0.2)
    before = m.resident_bytes()
    # Larger than what Python has its own places for; with some kept all over, malloc gives nothing back by itself.
    pieces = [os.urandom(3_000) for _ in range(20_000)]
    kept = pieces[::50]
    del pieces
    print(m.resident_bytes() - before, flush=True)
    async with asyncio.timeout(20):
        while m.resident_bytes() - before > 15 * 1024**2:
            await asyncio.sleep(0.05)
    task.cancel()
    assert len(kept) == 400

asyncio.run(main())
"""


def test_memory_kept_by_malloc_is_returned() -> None:
    if trim_function() is None:
        pytest.skip("needs glibc and /proc")
    # The process is fresh, because one that has run other tests could take the pieces from its free memory.
    done = subprocess.run([sys.executable, "-c", FRESH_PROCESS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 40 * MIB
