# SPDX-License-Identifier: Apache-2.0
"""No C function that reads the wire reads a byte beyond its input.

The functions run under the address and undefined-behaviour sanitizers, over pieces of vLLM's own batches with random
bytes in them.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.examples import examples

TESTS = Path(__file__).parents[1]
PIECES = 400_000


@pytest.mark.property
def test_no_byte_beyond_a_piece_is_read(tmp_path: Path) -> None:
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("no C compiler")
    harness = tmp_path / "harness"
    build = [
        gcc,
        "-O1",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover",
        "-I",
        str(TESTS.parent / "router/index/ingest"),
    ]
    built = subprocess.run([*build, str(TESTS / "fuzz/msgpack_values.c"), "-o", str(harness)], capture_output=True)
    if b"asan" in built.stderr or b"ubsan" in built.stderr:
        pytest.skip("the compiler has no sanitizers")
    assert built.returncode == 0, built.stderr.decode()
    batches = tmp_path / "batches"
    vectors = json.loads((TESTS / "golden/events_vllm_0_32.json").read_text())
    batches.write_bytes(b"".join(bytes.fromhex(vector["payload"]) for vector in vectors))
    for seed in (1, 2):
        ran = subprocess.run([str(harness), str(batches), str(examples(PIECES)), str(seed)], capture_output=True)
        assert ran.returncode == 0, ran.stderr.decode()
        assert int(ran.stdout) > examples(PIECES)
