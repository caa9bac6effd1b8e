# SPDX-License-Identifier: Apache-2.0
"""Settings that change while the router runs, and the report of those that cannot."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from kvrouter.router.base.common.yaml_text import read_yaml
from kvrouter.router.model.config import loading
from kvrouter.router.model.config.live_settings import LiveSettings
from kvrouter.router.model.config.loading import Origin, load_config
from kvrouter.router.model.config.reloaded import ReloadedFiles
from kvrouter.router.model.config.settings import RELOADS, Config

START = "queue_size: 5\nmodel_aliases: [short=m]\n"


class Watched:
    """The live settings of a file, and what a subscriber got."""

    def __init__(self, file: Path, flags: dict[str, str | list[str]] | None = None, **environ: str) -> None:
        self.environ = environ
        self.origin = Origin(str(file), flags or {}, load_config(file, environ, flags or {}))
        self.live = self.started()
        self.applied: list[Config] = []
        self.live.subscribe(self.applied.append)

    def started(self) -> LiveSettings:
        """Return the settings of a process of the router that starts now."""
        return LiveSettings(self.origin.loaded, self.origin, self.environ)

    def look(self) -> None:
        """Look at the file as often as a change needs to count."""
        assert self.live.file is not None
        for _ in range(2):
            asyncio.run(self.live.file.look())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "k.yaml"
    file.write_text(START)
    return file


def test_a_setting_that_reloads_is_applied_and_others_are_named(file: Path) -> None:
    watched = Watched(file)
    file.write_text("queue_size: 6\nport: 1\nmax_workers: 7\nmodel_aliases: [short=n]\n")
    watched.look()
    live = watched.live
    assert (live.config.queue_size, live.config.model_aliases) == (6, ("short=n",))
    assert (live.config.port, live.config.max_workers) == (Config().port, Config().max_workers), "never half applied"
    assert watched.applied == [live.config]
    (caution,) = live.cautions()
    assert "max_workers, port" in caution and "restart" in caution
    file.write_text("queue_size: 6\nmodel_aliases: [short=n]\n")
    watched.look()
    assert live.cautions() == [] and len(watched.applied) == 1, "nothing that reloads has changed"


def test_flags_and_environment_still_win(file: Path) -> None:
    watched = Watched(file, {"queue_size": "9"}, KVROUTER_MODEL_ALIASES="mine=m", KVROUTER_PORT="4")
    file.write_text("queue_size: 6\nport: 1\nqueue_deadline_s: 2\nmodel_aliases: [short=n]\n")
    watched.look()
    config = watched.live.config
    assert (config.queue_size, config.model_aliases, config.queue_deadline_s) == (9, ("mine=m",), 2.0)
    assert watched.live.cautions() == []


def test_the_settings_in_force_have_the_workers_of_the_file(file: Path) -> None:
    watched = Watched(file)
    assert watched.live.in_force == watched.live.config
    file.write_text("queue_size: 6\nport: 1\nworkers: [w0=http://127.0.0.1:1]\n")
    watched.look()
    in_force = watched.live.in_force
    assert (in_force.queue_size, in_force.port, in_force.workers) == (6, Config().port, ("w0=http://127.0.0.1:1",))
    file.write_text("workers: [x]\n")
    watched.look()
    assert watched.live.in_force == in_force, "a wrong file changes nothing"


@pytest.mark.parametrize("text", ["workers:\n", "workers: []\n", "workers: [w0=http://127.0.0.1:1]\n", "port: 1\n"])
def test_a_file_is_parsed_once(file: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watched, parsed = Watched(file), []

    def counted(text: str, *args: object) -> object:
        parsed.append(text)
        return read_yaml(text, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(loading, "read_yaml", counted)
    file.write_text(text)
    watched.look()
    assert watched.live.file is not None and parsed == [text]
    assert watched.live.file.value.lists_workers is text.startswith("workers:"), "an empty list is a list"


@pytest.mark.parametrize("content", ["queue_size: many\n", "queue_sise: 6\n", "queue_size: [", "", "workers: [x]\n"])
def test_a_file_that_is_wrong_changes_nothing(file: Path, content: str) -> None:
    watched = Watched(file)
    file.write_text(content)
    watched.look()
    assert watched.live.config == watched.origin.loaded and watched.applied == []
    (problem,) = watched.live.files.problems
    assert str(file) in problem and problem.endswith("the former is used")
    file.write_text("queue_size: 6\n")
    watched.look()
    assert watched.live.files.problems == [] and watched.live.config.queue_size == 6


def test_a_process_that_starts_again_takes_what_the_file_has(file: Path) -> None:
    watched = Watched(file)
    file.write_text("queue_size: 6\nport: 1\n")
    again = watched.started()
    assert (again.config.queue_size, again.config.port) == (6, Config().port) and "port" in again.cautions()[0]
    file.write_text("queue_size: many\n")
    broken = watched.started()
    assert broken.config == watched.origin.loaded
    assert "queue_size" in broken.files.problems[0], "it starts with the settings of the router's start"
    file.unlink()
    assert "cannot read" in watched.started().files.problems[0]


def test_a_signal_reads_a_file_that_shows_no_change(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrouter.router.base.common.file_watch.FileWatch._stamps", lambda watch: [])
    watched = Watched(file)
    assert watched.live.file is not None
    file.write_text("queue_size: 6\n")
    watched.look()
    assert watched.live.config.queue_size == 5
    assert watched.live.file is not None
    asyncio.run(watched.live.file.read_again())
    assert watched.live.config.queue_size == 6


def test_no_setting_reloads_that_names_a_file_or_an_address() -> None:
    assert {name for name in RELOADS if name.endswith(("_file", "_key", "host", "port", "redis"))} == {"worker_api_key"}


async def test_a_reader_that_fails_in_an_unforeseen_way_does_not_end_the_watch_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrouter.router.model.config.reloaded.POLL_S", 0.001)
    odd, plain = tmp_path / "odd", tmp_path / "plain"

    def read_odd() -> str:
        if odd.read_text() == "HUSH":
            raise KeyError("HUSH")
        return odd.read_text()

    for path in (odd, plain):
        path.write_text("1")
    files = ReloadedFiles(None)
    first, second = files.add("odd", [odd], read_odd), files.add("plain", [plain], plain.read_text)
    watching = asyncio.create_task(files.watch())

    async def until(holds: Callable[[], bool]) -> None:
        while not holds():
            assert not watching.done()
            await asyncio.sleep(0.001)

    odd.write_text("HUSH")
    await until(lambda: first.problem != "")
    assert first.problem == f"cannot use {odd} (KeyError): undo its last change" and first.value == "1"
    plain.write_text("22")
    await until(lambda: second.value == "22")
    assert first.problem, "the file that was refused has not changed"
    odd.write_text("333")
    await until(lambda: first.value == "333")
    watching.cancel()
