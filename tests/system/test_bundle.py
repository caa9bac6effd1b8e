# SPDX-License-Identifier: Apache-2.0
"""The archive of `kvrouter doctor --bundle`: all that explains a prediction, and neither prompts nor secrets."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvrouter.router.app.cli.api_client import Client
from kvrouter.router.app.cli.bundle import MAX_LAST, write_bundle
from kvrouter.router.base.common.errors import SettingError
from tests.support.exchange import run_cli
from tests.support.fleet import until
from tests.support.ports import free_port
from tests.support.replica_process import MODEL, replicas, worker_flags
from tests.support.router_process import RouterProcess

# A part of every text that must stay hidden, so that one search finds any of them.
MARK = "Hush"
API_KEY, ENGINE_KEY, SEED = f"{MARK}-api-key", f"{MARK}-engine-key", f"{MARK}-seed"
PROMPT = f"my {MARK} diagnosis " + "bada " * 60
# Pairs of them occur nowhere else.
TOKENS = [*range(48_887, 48_800, -1)]
SESSION, SALT = f"{MARK}-alice", f"{MARK}-salt"
NAMES = {
    *("README.txt", "command.json", "diagnosis.json", "version.json", "settings.json", "workers.json", "loads.json"),
    *("health.json", "store.json", "decisions.json", "metrics.txt"),
}


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    secrets = {"KVROUTER_API_KEY": API_KEY, "KVROUTER_WORKER_API_KEY": ENGINE_KEY, "KVROUTER_NONE_HASH_SEED": SEED}
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    digest = hashlib.sha256(f"{MARK}-narrow".encode()).hexdigest()
    keys.write_text(f"keys:\n- {{name: narrow, scopes: [proxy], sha256: {digest}}}\n")
    with replicas(2) as engines:
        flags = [*worker_flags(engines), "--api-keys-file", str(keys)]
        with RouterProcess(tmp_path_factory.mktemp("router"), flags, secrets, api_key=API_KEY) as router:
            for worker in ("w0", "w1"):
                router.wait_connected(worker)
            for prompt in (PROMPT, TOKENS):
                complete(router, prompt)
            until(lambda: hit(router) > 0, "the prompt's blocks are not known")
            complete(router, TOKENS)
            yield router


def complete(router: RouterProcess, prompt: str | list[int]) -> None:
    body = {"model": MODEL, "max_tokens": 1, "cache_salt": SALT, "prompt": prompt}
    router.request("POST", "/v1/completions", body, {"x-session-id": SESSION})


def hit(router: RouterProcess) -> int:
    """Return the tokens of TOKENS that the best worker would reuse."""
    body = {"model": MODEL, "token_ids": TOKENS, "cache_salt": SALT}
    instances = router.request("POST", "/query", body)["instances"]
    return max(instance["longest_matched"] for instance in instances.values())


def bundle(router: RouterProcess, *more: str, key: str = API_KEY) -> Any:
    address = f"http://127.0.0.1:{router.port}"
    return run_cli("doctor", "--url", address, "--api-key", key, "--bundle", *more)


def contents(file: Path) -> dict[str, str]:
    with zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name).decode() for name in archive.namelist()}


def test_an_archive_explains_the_decisions(router: RouterProcess, tmp_path: Path) -> None:
    file = tmp_path / "report.zip"
    done = bundle(router, str(file))
    assert done.returncode == 0, done.stderr
    members = contents(file)
    assert members.keys() == NAMES
    # The command says what it does, and what it has put in.
    assert all(name in done.stdout for name in NAMES) and "collecting decisions.json" in done.stderr
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    parsed = {name: json.loads(text) for name, text in members.items() if name.endswith(".json")}
    last, *_ = parsed["decisions.json"]
    assert len(parsed["decisions.json"]) == 3 <= MAX_LAST
    assert {candidate["worker_id"] for candidate in last["candidates"]} == {"w0", "w1"}
    assert last["outcome"]["predicted_tokens"] == last["outcome"]["delivered_tokens"] > 0
    assert last["session_id"] == "session-1"
    assert {worker["worker_id"] for worker in parsed["workers.json"]["workers"]} == {"w0", "w1"}
    assert parsed["settings.json"]["settings"]["api_key"] == "***"
    assert parsed["settings.json"]["settings"]["policy"] == "kv"
    assert parsed["diagnosis.json"]["checks"] and parsed["command.json"]["platform"]
    assert "kvrouter_predictions_total" in members["metrics.txt"]


def test_no_member_has_a_prompt_or_a_secret(router: RouterProcess, tmp_path: Path) -> None:
    file = tmp_path / "report.zip"
    assert bundle(router, str(file)).returncode == 0
    pair = re.compile(rf"{TOKENS[3]}\D{{1,20}}{TOKENS[4]}")
    for name, text in contents(file).items():
        assert MARK not in text and "bada" not in text and not pair.search(text), name
    # The router itself does not show them either.
    for path in ("/settings", "/workers", "/decisions", "/metrics"):
        text = router.text(path)
        assert API_KEY not in text and ENGINE_KEY not in text and SEED not in text and PROMPT not in text, path


def test_a_file_is_replaced_only_on_demand(router: RouterProcess, tmp_path: Path) -> None:
    file = tmp_path / "report.zip"
    file.write_text("mine")
    done = bundle(router, str(file))
    assert done.returncode == 2 and "--force" in done.stderr and file.read_text() == "mine"
    assert bundle(router, str(file), "--force").returncode == 0
    assert contents(file).keys() == NAMES
    assert list(tmp_path.iterdir()) == [file], "a temporary file is left"


def test_a_file_that_cannot_be_written_is_refused_with_its_cause(router: RouterProcess, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place, remedy in (
        ("nowhere/report.zip", "name a file in a folder that exists"),
        ("file/report.zip", "name a file in a folder that exists"),
        ("r" * 250 + ".zip", "a shorter name"),
        ("/proc/report.zip", "name a file in a folder that"),
        (".", "name a file in it"),
    ):
        done = bundle(router, str(tmp_path / place), "--force")
        assert done.returncode == 2 and remedy in done.stderr, (place, done.stderr)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EACCES, "that you may write to"),
        (errno.EROFS, "that you may write to"),
        (errno.ENOSPC, "free some space"),
        (errno.EIO, "name another file"),
    ],
)
def test_each_cause_has_its_remedy(
    number: int, remedy: str, router: RouterProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    # A test that runs as root may write anywhere, and no disk of its own is full.
    monkeypatch.setattr("tempfile.mkstemp", fail)
    client = Client(f"http://127.0.0.1:{router.port}", API_KEY)
    with pytest.raises(SettingError) as caught:
        write_bundle(client, tmp_path / "report.zip", force=False, progress=lambda name: None)
    assert os.strerror(number) in caught.value.message and remedy in caught.value.message


def test_a_key_without_the_scope_gets_the_refusal_in_place_of_the_answer(router: RouterProcess, tmp_path: Path) -> None:
    file = tmp_path / "report.zip"
    assert bundle(router, str(file), key=f"{MARK}-narrow").returncode == 0
    members = contents(file)
    assert "error" in json.loads(members["workers.json"]) and "error" in json.loads(members["decisions.json"])
    assert MARK not in str(members)


def test_without_a_router_nothing_is_written(tmp_path: Path) -> None:
    file = tmp_path / "report.zip"
    done = run_cli("doctor", "--url", f"http://127.0.0.1:{free_port()}", "--bundle", str(file))
    assert done.returncode == 1 and "no router answers" in done.stderr and not file.exists()
