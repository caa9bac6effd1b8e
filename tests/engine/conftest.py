# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests that compare the router with a real vLLM. Without vLLM, these tests are skipped."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

# vLLM reads these variables on import: no telemetry, no downloads, event sockets on the loopback interface, and one
# thread. These models are too small for more threads, and threads that wait for each other spin on cores that other
# engines need.
os.environ.update(
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
    HF_HUB_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_HOST_IP="127.0.0.1",
    OMP_NUM_THREADS="1",
    VLLM_LOGGING_LEVEL="ERROR",
)

SEED_VARIABLE = "KVROUTER_TEST_SEED"
DEFAULT_SEED = 20261

# These files start engines and take minutes, so they come first. If they came last, one process would still run them
# when the others are done.
LONGEST = (
    "hits",
    "offload_lives",
    "offload_engine",
    "patch_versions",
    "newest_version",
    "tokens_engine",
    "hand_over_engine",
    "real_engine",
    "proxy_engine",
    "peer_engine",
    "patch_router",
    "vllm_p2p_source",
    "peer_hits",
    "responses_vllm",
    "media_engine",
)

_tables = pytest.StashKey[dict[str, list[tuple[str, ...]]]]()
_ours = pytest.StashKey[dict[Path, bool]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--taken", type=Path, metavar="FOLDER", help="run the files that no other session with this folder has begun"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_tables] = {}
    config.stash[_ours] = {}
    for ignored in (
        # torch uses a deprecated decorator when vLLM imports it.
        "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning",
    ):
        config.addinivalue_line("filterwarnings", ignored)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        name = item.path.stem.removeprefix("test_")
        return LONGEST.index(name) if name in LONGEST else len(LONGEST)

    items.sort(key=rank)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Leave out a test of a file that another session has begun. The session that creates a file's mark is the first."""
    folder = item.config.getoption("--taken")
    if folder is None:
        return None
    ours = item.config.stash[_ours]
    if item.path not in ours:
        try:
            (folder / item.path.name).touch(exist_ok=False)
            ours[item.path] = True
        except FileExistsError:
            ours[item.path] = False
    return None if ours[item.path] else True


def pytest_sessionfinish(session: pytest.Session) -> None:
    # A worker process of pytest-xdist sends its tables to the controller, which prints them at the end of the run.
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["tables"] = session.config.stash[_tables]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    tables = node.config.stash[_tables]
    for title, rows in getattr(node, "workeroutput", {}).get("tables", {}).items():
        heading, *others = map(tuple, rows)
        tables.setdefault(title, [heading]).extend(others)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    if exitstatus != pytest.ExitCode.OK:
        # The tables take hundreds of lines and would hide the failures.
        return
    for title, rows in config.stash.get(_tables, {}).items():
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        terminalreporter.write_sep("-", title)
        for name, *numbers in rows:
            cells = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True)]
            terminalreporter.write_line("  ".join([name.ljust(widths[0]), *cells]))


@pytest.fixture
def table(request: pytest.FixtureRequest) -> Callable[[str, tuple[str, ...], tuple[str, ...]], None]:
    """Return `table(title, headings, row)`, which adds a row to a table that is printed at the end of the run."""

    def add(title: str, headings: tuple[str, ...], row: tuple[str, ...]) -> None:
        request.config.stash[_tables].setdefault(title, [headings]).append(row)

    return add


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    """Check that a test does not leave the patch in this process, where other tests need the unpatched vLLM."""
    yield
    scheduler = sys.modules.get("vllm.v1.core.sched.scheduler")
    if scheduler is not None:
        assert "engine_patch" not in scheduler.Scheduler.__init__.__code__.co_filename


@pytest.fixture(scope="session")
def seed() -> int:
    return int(os.environ.get(SEED_VARIABLE, DEFAULT_SEED))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.engine.engine_config import write_model

    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    from tests.support.router_process import RouterProcess

    with RouterProcess(tmp_path_factory.mktemp("router")) as process:
        yield process


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes a model of `offload_engine.py`, by its name, and returns its folder."""
    from tests.engine import offload_engine

    folder = tmp_path_factory.mktemp("models")
    return cache(lambda name: getattr(offload_engine, name)(folder / name))


@pytest.fixture(scope="module")
def plain(
    models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, seed: int
) -> Callable[[str], list[Any]]:
    """Return a function from a shape of `offload_workload.py` to the answers of an engine without offloading."""
    from tests.engine.offload_engine import OffloadEngine
    from tests.engine.offload_workload import SHAPES, workload

    @cache
    def answers(shape: str) -> list[Any]:
        sizes = SHAPES[shape]
        folder = tmp_path_factory.mktemp("plain") / "engine"
        with OffloadEngine(folder, models(sizes.model), sizes.gpu_blocks, None) as engine:
            return [engine.run(work.token_ids, work.max_tokens) for work in workload(shape, seed)]

    return answers
