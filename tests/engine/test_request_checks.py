# SPDX-License-Identifier: Apache-2.0
"""Check tests/golden/request_checks.json against a real vLLM.

It holds the requests that vLLM's HTTP server accepts and refuses before it computes anything. The simulator answers
alike (`tests/unit/test_simulator_requests.py`).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.engine.chat_model import write_chat_model
from tests.engine.chat_server import ChatServer
from tests.engine.engine_process import MAX_MODEL_LEN
from tests.support.request_checks import CONTEXT_TOKENS, statuses_of

pytestmark = pytest.mark.engine

GOLDEN = Path(__file__).parents[1] / "golden" / "request_checks.json"


def test_the_recorded_answers_are_vllms(tmp_path: Path) -> None:
    assert MAX_MODEL_LEN == CONTEXT_TOKENS
    with ChatServer(tmp_path, write_chat_model(tmp_path / "model")) as engine:
        statuses = statuses_of(engine.url, engine.name)
    # After a change of the requests, write `statuses` to that file.
    assert statuses == json.loads(GOLDEN.read_text())
