# SPDX-License-Identifier: Apache-2.0
"""Settings of all tests, and which of them `make test` leaves to `make test-all`.

Nothing that hypothesis does is timed: a busy machine is no fault of the code.
In CI it draws the same examples each time: what chance finds is found at a desk, not in somebody else's landing.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings

from kvrouter.router.base.common.compiled import wanted
from tests.support.compiled_reach import reaches_compiled
from tests.support.examples import examples

os.environ.setdefault("KVROUTER_TEST_PRELOAD", "1")

settings.register_profile(
    "here", deadline=None, max_examples=examples(100), suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("ci", settings.get_profile("here"), derandomize=True, database=None, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")

# Whole routers, schedules of faults and fuzzing take minutes: of these folders `make test` runs what is marked `smoke`.
SLOW_FOLDERS = {"system", "chaos", "fuzz"}

# Only a failing test waits this long.
PATIENCE_S = 60.0


# These files take the longest in `make test-all`, so they come first. If they came last, one process would still run them
# when the others are done.
LONGEST = (
    "test_installation",
    "test_docs_run",
    "test_page",
    "test_simulation",
    "test_demo",
    "test_redis_garbage",
    "test_chaos",
    "test_containers",
    "test_history",
    "test_distributions",
    "test_bench_peers",
    "test_redis_cluster",
    "test_docs_site",
    "test_api_fuzz",
    "test_prompts_ahead",
    "test_rollout",
    "test_offload_disk_crash",
)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out the files in which no compiled module decides, if those modules are to run uncompiled."""
    is_test = collection_path.match("test_*.py")
    return True if is_test and not wanted() and not reaches_compiled(collection_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(ranks)))
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        # The other tests of the folder are the same with few examples, so `make test-all` need not repeat them. A test with
        # a loop over `examples(...)` has the mark at its place.
        if folder == "property" and isinstance(item, pytest.Function) and is_hypothesis_test(item.obj):
            item.add_marker(pytest.mark.property)
        if folder in SLOW_FOLDERS and item.get_closest_marker("smoke") is None:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an asynchronous test in an event loop of its own, made by the test's parameter `loop_factory` if it has one.

    Fixtures are made before the loop and end after it. For one that is an asynchronous context manager, the test gets
    what it yields within the loop.
    """
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None

    async def run() -> None:
        async with asyncio.timeout(PATIENCE_S), AsyncExitStack() as stack:
            arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
            for name, argument in arguments.items():
                if isinstance(argument, AbstractAsyncContextManager):
                    arguments[name] = await stack.enter_async_context(argument)
            await pyfuncitem.obj(**arguments)

    loop_factory: Any = pyfuncitem.funcargs.get("loop_factory")
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(run())
    return True


class Unhandled(logging.Handler):
    """The errors that event loops reported because nobody handled them."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(self.format(record))


@pytest.fixture(autouse=True)
def no_unhandled_error() -> Iterator[None]:
    """Fail every test that leaves an unhandled error in an event loop of its process."""
    unhandled = Unhandled()
    logger = logging.getLogger("asyncio")
    logger.addHandler(unhandled)
    yield
    logger.removeHandler(unhandled)
    assert not unhandled.found, unhandled.found[0]
