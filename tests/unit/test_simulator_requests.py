# SPDX-License-Identifier: Apache-2.0
"""The simulator refuses the requests that vLLM refuses.

Each request of `request_checks.py` is compared with a real vLLM's answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvrouter.simulator.cache.shapes import gpt_oss
from kvrouter.simulator.http.server import ReplicaServer, ServerThread
from tests.support.request_checks import CHAT, COMPLETIONS, CONTEXT_TOKENS, JSON, Checked, answer_to, statuses_of

# `tests/engine/test_request_checks.py` compares these answers with vLLM.
GOLDEN: dict[str, int] = json.loads((Path(__file__).parents[1] / "golden" / "request_checks.json").read_text())
# docs/reference/simulator.md gives the reason for each.
ACCEPTED_HERE = {f"{COMPLETIONS} " + '{"prompt": [1000000]}'}
REFUSED_HERE = {
    *(
        f"{path} {change}"
        for path in (COMPLETIONS, CHAT)
        for change in ('{"max_tokens": true}', '{"temperature": true}')
    ),
    f"{COMPLETIONS} " + '{"prompt": [""]}',
    f"{CHAT} " + '{"messages": [{"role": "user", "content": {}}]}',
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with zmq.Context[zmq.Socket[bytes]]() as context:
        server = ReplicaServer(gpt_oss(16, 32), 400, context=context, model="m", max_text_tokens=CONTEXT_TOKENS)
        thread = ServerThread([server])
        thread.start()
        yield server.endpoints["url"]
        thread.stop()


def test_requests_that_vllm_refuses_are_refused(url: str) -> None:
    statuses = statuses_of(url, "m")
    assert statuses.keys() == GOLDEN.keys()
    differ = {name for name, status in statuses.items() if status != GOLDEN[name]}
    assert {name for name in differ if statuses[name] == 200} == ACCEPTED_HERE
    assert differ - ACCEPTED_HERE == REFUSED_HERE


def test_an_answer_ends_with_the_context(url: str) -> None:
    prompt = [5] * (CONTEXT_TOKENS - 3)
    body = {"prompt": prompt, "max_tokens": 10}
    status, answer = answer_to(url, Checked("", COMPLETIONS, JSON, json.dumps(body).encode()))
    assert status == 200 and json.loads(answer)["usage"]["completion_tokens"] == 3


def test_faults_need_no_content_type(url: str) -> None:
    assert answer_to(url, Checked("", "/sim/faults", None, b"{}"))[0] == 200
