# SPDX-License-Identifier: Apache-2.0
"""The code blocks of the client's page, against a real router with a simulated replica in place of the engine."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

import kvrouter.client
from kvrouter.client import RequestRefused, RouterError
from kvrouter.simulator.cache.shapes import make_geometry
from kvrouter.simulator.http.server import ReplicaServer, ServerThread
from tests.support.router_process import RouterProcess
from tests.support.tls_redis import certificates

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "client.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
MODEL = "gemma"
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Map the addresses on the page to the real ones that replace them."""
    with zmq.Context[zmq.Socket[bytes]]() as context, RouterProcess(tmp_path_factory.mktemp("router")) as router:
        replica = ReplicaServer(make_geometry("gemma3"), 256, context=context, model=MODEL)
        thread = ServerThread([replica])
        thread.start()
        yield {
            "http://127.0.0.1:30000": f"http://127.0.0.1:{router.port}",
            "http://10.0.0.1:8000": replica.endpoints["url"],
        }
        thread.stop()


# The order matters, because the first block registers the worker.
@pytest.mark.parametrize(
    ("number", "shown"),
    [(0, "w0 reuses 0 tokens"), (1, "http://"), (2, ""), (3, "404 unknown_model"), (4, "")],
)
def test_a_block_of_the_page_runs(addresses: dict[str, str], tmp_path: Path, number: int, shown: str) -> None:
    code = BLOCKS[number]
    if "ca.pem" in code:
        certificates(tmp_path)
    for written, here in addresses.items():
        code = code.replace(written, here)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout
    if number == 2:
        assert int(done.stdout) > 10


def test_every_block_is_tried() -> None:
    assert len(BLOCKS) == 5


def test_the_page_names_every_error() -> None:
    errors = {
        name
        for name, value in vars(kvrouter.client).items()
        if isinstance(value, type) and issubclass(value, (RouterError, RequestRefused))
    }
    assert not {name for name in errors if f"`{name}`" not in PAGE}
