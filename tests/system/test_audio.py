# SPDX-License-Identifier: Apache-2.0
"""OpenAI's own client with recordings, through `kvrouter serve` to simulated replicas: forms pass byte by byte."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fleet import until
from replica_process import MODEL, STOP_S, replicas
from router_process import RouterProcess

SOUND = ("sound.wav", b"RIFF" + bytes(range(256)) * 100, "audio/wav")
ALIAS = "whisper"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("audio")
    with replicas(2, "--shape", "gemma3", "--blocks", "2000") as found:
        flags = ["--model-alias", f"{ALIAS}={MODEL}"]
        for number, at in enumerate(found):
            flags += ["--worker", f"w{number}={at['url']},events={at['events']},replay={at['replay']},model={MODEL}"]
        with RouterProcess(folder / "router", flags) as router:
            until(lambda: len(router.request("GET", "/workers")["workers"]) == 2, "the workers are registered")
            base = f"http://127.0.0.1:{router.port}/v1"
            with openai.OpenAI(base_url=base, api_key="x", max_retries=0, timeout=STOP_S) as client:
                client.router = router
                yield client


@pytest.mark.parametrize("name", [MODEL, ALIAS])
def test_recordings_are_transcribed_and_translated(client: Any, name: str) -> None:
    raw = client.audio.transcriptions.with_raw_response.create(model=name, file=SOUND)
    assert raw.parse().text and raw.headers["x-kvrouter-worker"] in ("w0", "w1")
    with pytest.warns(DeprecationWarning):
        assert client.audio.translations.create(model=name, file=SOUND).text
    events = list(client.audio.transcriptions.create(model=name, file=SOUND, stream=True))
    assert len(events) > 1


def test_a_pin_is_honoured_and_the_decision_says_that_the_prompt_is_not_known(client: Any) -> None:
    for worker in ("w0", "w1"):
        headers = {"x-kvrouter-worker": worker, "x-request-id": f"sound-{worker}"}
        raw = client.audio.transcriptions.with_raw_response.create(model=MODEL, file=SOUND, extra_headers=headers)
        assert raw.headers["x-kvrouter-worker"] == worker
        decision = client.router.request("GET", f"/decisions/sound-{worker}")
        assert (decision["worker_id"], decision["proof"]) == (worker, "unknown")


def test_an_unknown_model_and_a_form_without_a_file_are_errors(client: Any) -> None:
    with pytest.raises(openai.NotFoundError):
        client.audio.transcriptions.create(model="nobody", file=SOUND)
    with pytest.raises(openai.BadRequestError, match="no file"):
        client.post("/audio/transcriptions", cast_to=object, files={"model": (None, MODEL)})
