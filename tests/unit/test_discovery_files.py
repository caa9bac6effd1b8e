# SPDX-License-Identifier: Apache-2.0
"""Files of workers: their valid contents, and changes of real files, which are seen whole and never half."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.follow.discovery.files.file_source import FileSource
from kvrouter.router.follow.discovery.files.workers_file import parse_workers
from kvrouter.router.follow.discovery.sources import named_sources
from kvrouter.router.model.config import reloaded
from kvrouter.router.model.config.live_settings import LiveSettings
from kvrouter.router.model.config.loading import Origin, load_config
from kvrouter.router.model.config.settings import Config
from kvrouter.router.model.workers.registration import BASE_PATH_LEFT_OUT, CatalogSpec, GroupSpec, Registration
from kvrouter.router.model.workers.role import Role
from kvrouter.router.model.workers.source_precedence import CONFIG, FILE

WHOLE = """
- w0=http://h:8000,model=m,dp_rank=2
- worker_id: w1
  url: http://h:8001
- {worker_id: 7, url: "http://h:8002", endpoint: "tcp://h:5557", replay_endpoint: "tcp://h:5558", model: m, role: prefill,
   state: draining, catalog: {groups: [{group_idx: 0, kind: full_attention, block_size: 16}]}}
"""


def watched(path: Path) -> FileSource[Any]:
    (source,) = named_sources(LiveSettings(Config(workers_file=str(path))), Origin(), {}, alone=False)
    assert isinstance(source, FileSource) and source.name == FILE
    return source


def watched_file(folder: Path, text: str = "- a=http://h:1\n") -> tuple[Path, FileSource[Any]]:
    file = folder / "w.yaml"
    file.write_text(text)
    return file, watched(file)


def look(source: FileSource[Any], times: int = 2) -> list[str]:
    """Look at the file `times` times and return the workers' ids; a change counts at the second look."""
    for _ in range(times):
        asyncio.run(source.file.look())
    return [candidate.registration.worker.worker_id for candidate in source.shown or ()]


def test_an_entry_is_a_spec_or_the_fields_of_register() -> None:
    first, second, third = parse_workers(WHOLE, "w.yaml", FILE)
    assert first.registration == Registration(WorkerKey("m", "w0", 2), url="http://h:8000", source=FILE)
    assert not first.any_rank and not first.asks_model and first.asks_events
    assert second.registration.worker == WorkerKey("", "w1") and second.any_rank and second.asks_model
    assert third.registration == Registration(
        WorkerKey("m", "7"),
        url="http://h:8002",
        events="tcp://h:5557",
        replay="tcp://h:5558",
        role=Role.PREFILL,
        catalog=CatalogSpec(groups=(GroupSpec(0, "full_attention", 16),)),
        retiring=True,
        source=FILE,
        numbered=True,
    )
    assert not third.asks_events
    as_json = json.dumps([{"worker_id": "w0", "url": "http://h:1"}])
    assert [candidate.registration.worker.worker_id for candidate in parse_workers(as_json, "w.json", FILE)] == ["w0"]
    assert parse_workers("[]", "w.yaml", FILE) == parse_workers("workers: []", "w.yaml", FILE) == []


def test_the_settings_file_and_a_file_of_workers_take_the_same_list(tmp_path: Path) -> None:
    """Each form of an entry, in a document that is a valid file of both kinds."""
    file = tmp_path / "k.yaml"
    file.write_text("workers:" + WHOLE.replace("\n", "\n  "))
    [listed] = [parse_workers(file.read_text(), "k.yaml", CONFIG)]
    assert listed == parse_workers(WHOLE, "w.yaml", CONFIG)
    assert settings(file, {}, {}).shown == listed


def test_a_base_path_that_is_left_out_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        parse_workers("- a=http://h:1\n- b=http://h:2/v1/\n", "w.yaml", FILE)
    assert [(record.message, record.__dict__["worker"]) for record in caplog.records] == [(BASE_PATH_LEFT_OUT, "b")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        ("workers: {}", "line 1 is no list"),
        ("port: 1\nworkers: []", "line 1 is no list"),
        ("workers:\n- a=http://h:1\n- b\n", "line 3: write [ID=]HTTP_URL"),
        ("- a=http://h:1\n- [", "line 2 is not YAML"),
        ("- a=http://h:1\n- 5\n", "line 2: is not a worker"),
        ("- a=http://h:1\n\n- nothing\n", "line 3: write [ID=]HTTP_URL"),
        ("- worker_id: a\n  url: http://h:1\n  replay_endpoint: x\n", "line 3: replay_endpoint must be a ZMQ endpoint"),
        ("- worker_id: a\n  endpoint: tcp://h:1\n", "line 1: model is missing"),
        (
            "- worker_id: a\n  url: http://h:1\n  modell: m\n",
            "line 3: modell is not a field of a worker; did you mean model?",
        ),
        ("- worker_id: a\n  url: http://h:1\n  dp_rank: one\n", "line 3: dp_rank is wrong: Expected"),
        ("- worker_id: a\n  url: http://h:1\n  state: off\n", "line 3: state must be one of active, draining"),
        ("- url: http://h:1\n", "worker_id (or instance_id) is missing"),
        ("- a=http://h:1\n- a=http://h:2\n", "line 2: 'a' is in line 1 too"),
        ("- a=http://h:1\n- a@1=http://h:2\n", "line 2: ID must not end in '@1'"),
        ("- a=http://h:1\n- url: http://h:2\n  worker_id: a@1\n", "line 3: worker_id must not end in '@1'"),
        ("- !!python/object/apply:os.system [ls]\n", "is not YAML"),
        ("- &a [*a]\n", "line 1"),
    ],
)
def test_a_wrong_entry_is_named_with_its_line(text: str, words: str) -> None:
    with pytest.raises(SettingError) as caught:
        parse_workers(text, "w.yaml", FILE)
    assert caught.value.message.startswith("w.yaml ") and words in caught.value.message
    assert "\n" not in caught.value.message


def test_a_rename_is_seen(tmp_path: Path) -> None:
    file, source = watched_file(tmp_path)
    assert look(source) == ["a"]
    (tmp_path / "new").write_text("- b=http://h:1\n")
    (tmp_path / "new").rename(file)
    assert look(source, 1) == ["a"], "it may still be written"
    assert look(source, 1) == ["b"]


def test_a_config_maps_exchanged_link_is_seen(tmp_path: Path) -> None:
    for number, name in enumerate("ab"):
        (tmp_path / f"..{number}").mkdir()
        (tmp_path / f"..{number}" / "w.yaml").write_text(f"- {name}=http://h:1\n")
    (tmp_path / "..data").symlink_to("..0")
    (tmp_path / "w.yaml").symlink_to("..data/w.yaml")
    source = watched(tmp_path / "w.yaml")
    assert look(source) == ["a"]
    # The kubelet replaces a mounted file in this way.
    (tmp_path / "..data_tmp").symlink_to("..1")
    (tmp_path / "..data_tmp").rename(tmp_path / "..data")
    assert look(source) == ["b"]


def test_a_file_written_in_place_is_read_once_it_has_settled(tmp_path: Path) -> None:
    file, source = watched_file(tmp_path, "- a=http://h:1\n- b=http://h:1\n")
    # Each half is itself a valid file of workers.
    with file.open("w") as writer:
        for name in "abc":
            writer.write(f"- {name}=http://h:2\n")
            writer.flush()
            assert look(source, 1) == ["a", "b"]
    assert look(source, 1) == ["a", "b", "c"]
    assert look(source, 3) == ["a", "b", "c"]


@pytest.mark.parametrize("text", ["", "- {", "- a=http://h:1\n- b\n", "\x00", "{}"])
def test_a_wrong_file_keeps_the_known_workers(tmp_path: Path, text: str) -> None:
    file, source = watched_file(tmp_path)
    file.write_text(text)
    assert look(source) == ["a"] and str(file) in source.problem
    file.write_text("- b=http://h:1\n")
    assert look(source) == ["b"] and source.problem == ""


def test_a_missing_file_keeps_the_known_workers(tmp_path: Path) -> None:
    file, source = watched_file(tmp_path)
    file.rename(tmp_path / "away")
    assert look(source) == ["a"] and source.problem.endswith("put it back")
    (tmp_path / "away").rename(file)
    assert look(source) == ["a"] and source.problem == ""
    file.write_bytes(b"\xff\xfe")
    assert look(source) == ["a"] and "not UTF-8" in source.problem
    file.unlink()
    file.mkdir()
    assert look(source) == ["a"] and "cannot read" in source.problem


def test_a_file_that_is_too_large_keeps_the_known_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrouter.router.follow.discovery.sources.MAX_FILE_BYTES", 100)
    file, source = watched_file(tmp_path)
    file.write_text("- b=http://h:1\n" + "#" * 100)
    assert look(source) == ["a"] and "at most 100 are read" in source.problem


def test_an_unreadable_file_is_tried_again_without_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rights that are given back, or a mount's error that passes, leave the time of modification unchanged."""
    file, source = watched_file(tmp_path)
    file.write_text("- b=http://h:1\n")
    with monkeypatch.context() as refused:
        refused.setattr(reloaded, "read_regular", refuse)
        assert look(source) == ["a"] and "Permission denied" in source.problem
        assert look(source, 3) == ["a"] and "Permission denied" in source.problem
    assert look(source) == ["b"] and source.problem == ""


def refuse(path: Path, max_bytes: int) -> bytes:
    raise PermissionError(errno.EACCES, "Permission denied", str(path))


def settings(path: Path, flags: dict[str, str | list[str]], environ: dict[str, str]) -> FileSource[Any]:
    config = load_config(path, environ, flags)
    origin = Origin(str(path), flags, config)
    live = LiveSettings(config, origin, environ)
    (source,) = (
        source for source in named_sources(live, origin, environ, alone=False) if isinstance(source, FileSource)
    )
    assert source.name == CONFIG
    return source


def test_the_settings_file_names_workers_unless_a_flag_does(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "k.yaml"
    file.write_text("port: 1\nworkers: [a=http://h:1]\n")
    source = settings(file, {}, {})
    assert settings(file, {"workers": ["b=http://h:1"]}, {}).shown is None
    assert settings(file, {}, {"KVROUTER_WORKERS": "b=http://h:1"}).shown is None
    file.write_text("port: 2\nworkers: [b=http://h:1]\n")
    assert look(source) == ["b"]
    file.write_text("port: 2\nworkers: [c=http://h:1]\n")
    assert look(source) == ["c"]
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "settings changed: restart the router to apply them"
    ], "reported once"
    file.write_text("port: 1\nqueue_size: many\nworkers: [d=http://h:1]\n")
    assert look(source) == ["c"] and "queue_size" in source.problem, "never half"
    file.write_text("")
    assert look(source) == ["c"] and "is empty" in source.problem
    file.write_text("port: 1\n")
    assert look(source) == [] and source.problem == "", "who takes the list away wants none of it"


def test_a_settings_file_without_workers_declares_none(tmp_path: Path) -> None:
    file = tmp_path / "k.yaml"
    file.write_text("")
    assert settings(file, {}, {}).shown is None
    file.write_text("port: 1\n")
    source = settings(file, {}, {})
    assert source.shown is None
    file.write_text("port: 1\nworkers: []\n")
    assert look(source) == [] and source.shown is not None
