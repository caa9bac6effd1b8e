# SPDX-License-Identifier: Apache-2.0
"""Recordings that OpenAI's client sends through `kvrouter serve` to simulated replicas: forms pass byte for byte."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.support.replica_process import MODEL, STOP_S, replicas, worker_flags
from tests.support.router_process import RouterProcess

SOUND = bytes(range(256)) * 400
ALIAS = "whisper"


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    with replicas(2, "--shape", "gemma3", "--blocks", "2000", "--instant") as endpoints:
        flags = ["--model-alias", f"{ALIAS}={MODEL}", *worker_flags(endpoints)]
        with RouterProcess(tmp_path_factory.mktemp("router"), flags) as started:
            yield started


@pytest.fixture(scope="module")
def client(router: RouterProcess) -> Iterator[Any]:
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{router.port}/v1", api_key="x", max_retries=0, timeout=STOP_S
    ) as openai_client:
        yield openai_client


# OpenAI's client calls its translations deprecated; vLLM serves them.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("model", [MODEL, ALIAS])
def test_transcriptions_and_translations_reach_the_pinned_worker(
    client: Any, router: RouterProcess, model: str
) -> None:
    pin = {"x-kvrouter-worker": "w1", "x-request-id": f"audio-{model}"}
    file = ("speech.wav", SOUND, "audio/wav")
    answer = client.audio.transcriptions.with_raw_response.create(model=model, file=file, extra_headers=pin)
    assert answer.headers["x-kvrouter-worker"] == "w1" and "x-kvrouter-predicted-hit" not in answer.headers
    assert answer.parse().text
    decision = router.request("GET", f"/decisions/audio-{model}")
    assert (decision["proof"], decision["outcome"]["outcome"], decision["pinned_worker"]) == ("unknown", "ok", "w1")
    assert client.audio.translations.create(model=model, file=file).text


def test_a_transcription_is_streamed_to_its_end(client: Any) -> None:
    chunks = client.audio.transcriptions.create(model=MODEL, file=("a.mp3", SOUND), stream=True)
    assert len(list(chunks)) == 8


def test_errors_name_the_unknown_model_and_the_missing_file(client: Any, router: RouterProcess) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.audio.transcriptions.create(model="nobody", file=("a.wav", SOUND))
    assert caught.value.code == "unknown_model"
    # The engine's own error passes.
    answer = httpx.post(f"http://127.0.0.1:{router.port}/v1/audio/transcriptions", data={"x": "1"}, files={"f": b"x"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "the form has no file")
    answer = httpx.post(
        f"http://127.0.0.1:{router.port}/v1/audio/transcriptions",
        content=b"--other",
        headers={"content-type": "multipart/form-data; boundary=b0"},
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "malformed_body")
