# SPDX-License-Identifier: Apache-2.0
"""The README's commands for vLLM, word by word, with simulated replicas in place of the engines."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvrouter.simulator.cache.shapes import make_geometry
from kvrouter.simulator.http.server import ReplicaServer
from tests.support.exchange import run_cli
from tests.support.fleet import rows, until, wait_live
from tests.support.replica_process import served
from tests.support.router_process import RouterProcess

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/how-to/vllm.md", "docs/how-to/offload.md")
TIMEOUT_S = 30.0


def commands(page: str, program: str) -> list[list[str]]:
    """Return the words of each command in a page's code blocks that begins with `program`, without comments."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    word_lists = []
    for block in blocks:
        text = block.replace("\\\n", " ")
        for start in re.finditer(rf"^(?=[^\n]*{program} )", text, re.MULTILINE):
            # A quoted value may span lines.
            lines = text[start.start() :].splitlines()
            whole = next("\n".join(lines[:n]) for n in range(1, len(lines) + 1) if _is_whole("\n".join(lines[:n])))
            word_lists.append(shlex.split(whole, comments=True))
    return word_lists


def _is_whole(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return False
    return True


def value_of(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


@pytest.mark.parametrize("page", PAGES)
def test_every_start_of_vllm_names_the_flags_that_are_needed(page: str) -> None:
    starts = [words for words in commands(page, "vllm serve") if "--enable-prefix-caching" in words]
    assert starts
    for words in starts:
        events = json.loads(value_of(words, "--kv-events-config"))
        assert events["enable_kv_cache_events"] is True and events["publisher"] == "zmq"
        assert events["endpoint"].startswith("tcp://*:") and events["replay_endpoint"].startswith("tcp://*:")
        assert "--enable-prompt-tokens-details" in words
        assert "--disable-hybrid-kv-cache-manager" not in words


@pytest.fixture
def replicas(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[list[ReplicaServer]]:
    """Start as many replicas as the README has workers, serving the name that its start of vLLM gives."""
    (start,) = commands("README.md", "vllm serve")
    model = value_of(start, "--served-model-name") if "--served-model-name" in start else start[2]
    servers = [ReplicaServer(make_geometry("gemma3"), 256, context=context, model=model) for _ in range(2)]
    with served(*servers):
        yield servers


def serve_arguments(replicas: list[ReplicaServer]) -> list[str]:
    """Return the arguments of the README's `kvrouter serve`, with the replicas' addresses."""
    (words, *_) = commands("README.md", "kvrouter serve")
    text = shlex.join(words[2:])
    for number, replica in enumerate(replicas, 1):
        endpoints = replica.endpoints
        for written, port in ((endpoints["url"], 8000), (endpoints["events"], 5557), (endpoints["replay"], 5558)):
            scheme = "http" if port == 8000 else "tcp"
            text = text.replace(f"{scheme}://10.0.0.{number}:{port}", str(written))
    return shlex.split(text)


def test_the_readmes_commands_do_what_they_say(tmp_path: Path, replicas: list[ReplicaServer]) -> None:
    with RouterProcess(tmp_path, serve_arguments(replicas)) as router:
        wait_live(router)
        curls = commands("README.md", "curl")
        assert len(curls) >= 3
        for words in curls:
            # Send them as curl does, with its own content type if a command names none.
            text = shlex.join([*words, "--fail-with-body"]).replace("localhost:30000", f"127.0.0.1:{router.port}")
            done = subprocess.run(shlex.split(text), capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
            assert done.returncode == 0 and done.stdout, (words, done.stdout, done.stderr)
        (tmp_path / "prompt.json").write_text(json.dumps([2, 105, 2364, 107]))
        for words in commands("README.md", "kvrouter (?:workers|explain)"):
            output = run(words, router, tmp_path)
            assert "w1" in output, output
        assert not any("serves" in reason for reason in router.request("GET", "/health")["reasons"])


def run(words: list[str], router: RouterProcess, folder: Path) -> str:
    done = run_cli(*words[1:], "--url", f"http://127.0.0.1:{router.port}", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_name_that_the_engine_does_not_serve_is_reported_everywhere(
    tmp_path: Path, replicas: list[ReplicaServer]
) -> None:
    arguments = [f"{word},model=wrong" if "=http" in word else word for word in serve_arguments(replicas)]
    with RouterProcess(tmp_path, arguments) as router:
        wanted = f"start the engine with --served-model-name wrong, or register model={replicas[0].endpoints['model']}"
        until(lambda: all(wanted in row["reason"] for row in rows(router).values()), "the name is not reported")
        assert any(wanted in reason for reason in router.request("GET", "/health")["reasons"])
        assert wanted in router.log_tail()
        assert "--served-model-name" in run(["kvrouter", "workers"], router, tmp_path).replace("\n", "")
        assert router.metric("kvrouter_worker_unserved_models", worker="w0") == 1
