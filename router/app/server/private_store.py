# SPDX-License-Identifier: Apache-2.0
"""The private Valkey server of a router without a Redis URL, kept running."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from kvrouter.router.base.common import ticks
from kvrouter.router.base.common.task_supervisor import TaskSupervisor
from kvrouter.router.base.redis_client.embedded_valkey import EmbeddedStore, EmbeddedStoreError
from kvrouter.router.base.redis_client.errors import StoreError

log = logging.getLogger(__name__)

# The interval at which a dead private server is noticed; queries are answered from memory meanwhile.
STORE_CHECK_S = 1.0


@asynccontextmanager
async def private_store(data_dir: Path, supervisor: TaskSupervisor) -> AsyncIterator[str]:
    """Start the private Valkey server of `data_dir`, keep it running within the block, and yield its URL.

    Raises EmbeddedStoreError.
    """
    store = await EmbeddedStore.start(data_dir)
    keeper = supervisor.start("private_store", partial(_keep_running, store))
    try:
        yield store.url
    finally:
        keeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeper
        await store.stop()


async def _keep_running(store: EmbeddedStore) -> None:
    last_error = ""
    while True:
        await ticks.sleep(STORE_CHECK_S)
        try:
            if await store.ensure_running():
                log.warning("private store ended and was restarted", extra={"data_dir": store.data_dir})
            last_error = ""
        except (EmbeddedStoreError, StoreError, OSError) as error:
            if str(error) != last_error:
                last_error = str(error)
                log.error("private store cannot be started", extra={"error": last_error})
