# SPDX-License-Identifier: Apache-2.0
"""A real vLLM that stores responses, and a simulated replica beside it, behind `kvrouter serve`: OpenAI's client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import openai

from tests.engine.chat_fleet import MODEL, client_of, until
from tests.engine.chat_model import write_chat_model
from tests.engine.chat_server import ChatServer
from tests.support.replica_process import ReplicaProcess
from tests.support.router_process import RouterProcess

pytestmark = pytest.mark.engine

UNKNOWN = "resp_0123456789abcdef0123456789abcdef"
TURNS = 6


class Site:
    """An engine w0, a simulated replica w1, and clients of the router and of the engine itself."""

    def __init__(self, router: RouterProcess, engine: ChatServer) -> None:
        self.router = router
        self.client = client_of(f"http://127.0.0.1:{router.port}")
        self.direct = client_of(engine.url)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder: Path = tmp_path_factory.mktemp("responses")
    model = write_chat_model(folder / "model")
    with (
        ChatServer(folder, model, environment={"VLLM_ENABLE_RESPONSES_API_STORE": "1"}) as engine,
        ReplicaProcess(folder / "replica", ["--instant", "--model", MODEL]) as replica,
        RouterProcess(folder / "router", ["--worker", engine.spec("w0"), "--worker", replica.spec("w1")]) as router,
    ):
        until(lambda: router.request("GET", "/ready"), "ready")
        site = Site(router, engine)
        with site.client, site.direct:
            yield site


def create(client: Any, text: str = "the cache of an engine", **more: Any) -> Any:
    options = {"max_output_tokens": 6, "temperature": 0.0} | more
    return client.responses.with_raw_response.create(model=MODEL, input=text, **options)


def on(worker: str) -> dict[str, Any]:
    return {"extra_headers": {"x-kvrouter-worker": worker}}


def error_of(call: Any, *args: Any, **more: Any) -> tuple[int, bytes]:
    with pytest.raises(openai.APIStatusError) as caught:
        call(*args, **more)
    return caught.value.status_code, caught.value.response.content


def test_turns_reach_the_engine_that_has_the_conversation(site: Site) -> None:
    for worker in ("w0", "w1"):
        response = create(site.client, **on(worker)).parse()
        for _ in range(TURNS):
            answer = create(site.client, "and a router", previous_response_id=response.id)
            assert answer.headers["x-kvrouter-worker"] == worker
            former, response = response, answer.parse()
            assert response.usage.input_tokens > former.usage.input_tokens
        assert site.client.responses.retrieve(response.id).output_text == response.output_text


def test_a_streamed_response_is_found_by_its_first_event(site: Site) -> None:
    with site.client.responses.create(
        model=MODEL, input="the cache", max_output_tokens=6, stream=True, **on("w0")
    ) as stream:
        events = list(stream)
    response_id = events[0].response.id
    assert site.client.responses.retrieve(response_id).status == events[-1].response.status
    answer = create(site.client, "more", previous_response_id=response_id)
    assert answer.headers["x-kvrouter-worker"] == "w0"


def test_a_background_stream_resumes(site: Site) -> None:
    body: dict[str, Any] = {"model": MODEL, "input": "the cache", "max_output_tokens": 6, "background": True}
    with site.client.responses.create(**body, stream=True, **on("w0")) as stream:
        events = list(stream)
    with site.client.responses.retrieve(events[0].response.id, stream=True, starting_after=3) as resumed:
        assert list(resumed) == events[4:]


def test_an_unknown_response_gets_the_same_answer_from_the_engine_and_the_router(site: Site, tmp_path: Path) -> None:
    calls = [
        lambda client: error_of(client.responses.retrieve, UNKNOWN),
        lambda client: error_of(client.responses.cancel, UNKNOWN),
        lambda client: error_of(create, client, previous_response_id=UNKNOWN),
    ]
    file = tmp_path / "keys.yaml"
    file.write_text("keys:\n- {name: alice, scopes: [proxy], key: the-key-of-alice-0123}\n")
    spec = f"w0={str(site.direct.base_url).removesuffix('/v1/')},model={MODEL}"
    with RouterProcess(tmp_path / "keyed", ["--worker", spec, "--api-keys-file", str(file)]) as router:
        url = f"http://127.0.0.1:{router.port}/v1"
        with openai.OpenAI(base_url=url, api_key="the-key-of-alice-0123", max_retries=0) as keyed:
            for call in calls:
                assert call(keyed) == call(site.client) == call(site.direct)
