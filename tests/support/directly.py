# SPDX-License-Identifier: Apache-2.0
"""A coroutine run as a direct task, for tests and benchmarks that are asyncio's own tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from kvrouter.router.common.direct_task import DirectTask

T = TypeVar("T")


async def directly(work: Coroutine[Any, Any, T]) -> T:
    loop = asyncio.get_running_loop()
    found: asyncio.Future[T] = loop.create_future()

    async def run() -> None:
        try:
            found.set_result(await work)
        except Exception as error:
            found.set_exception(error)

    DirectTask(run(), loop, lambda task: None).resume()
    return await found
