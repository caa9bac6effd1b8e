# SPDX-License-Identifier: Apache-2.0
"""OpenAI's client with `/v1/responses`, through two routers on one Redis to two simulated replicas.

A response stays with the worker and the API key that made it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.fleet import until, wait_well
from tests.support.replica_process import MODEL, STOP_S, ReplicaProcess
from tests.support.router_process import RouterProcess
from tests.support.store_server import StoreServer

REPLICA = ("--shape", "gemma3", "--blocks", "2000", "--instant", "--model", MODEL)
KEYS = {name: f"the-key-that-is-called-{name}" for name in ("alice", "bob", "watch")}
UNKNOWN = "resp_0123456789abcdef0123456789abcdef"


class Site:
    """Two replicas, and two routers that share a Redis."""

    def __init__(self, stack: ExitStack, folder: Path, *flags: str) -> None:
        self.store = stack.enter_context(StoreServer(folder / "store"))
        self.replicas = [stack.enter_context(ReplicaProcess(folder / f"w{n}", REPLICA)) for n in range(2)]
        shared = ["--redis", self.store.url, "--health-interval-s", "0.2", *flags]
        self.routers = [
            stack.enter_context(RouterProcess(folder / name, shared, api_key=KEYS["watch"])) for name in ("a", "b")
        ]
        for n, replica in enumerate(self.replicas):
            at = replica.endpoints
            body = {"worker_id": f"w{n}", "model": MODEL, "url": at["url"]}
            self.routers[0].request(
                "POST", "/workers", {**body, "endpoint": at["events"], "replay_endpoint": at["replay"]}
            )
        for router in self.routers:
            wait_well(router, 2)
        self._stack = stack

    def client(self, router: int = 0, key: str = "alice") -> Any:
        url = f"http://127.0.0.1:{self.routers[router].port}/v1"
        client = openai.OpenAI(base_url=url, api_key=KEYS[key], max_retries=0, timeout=STOP_S)
        return self._stack.enter_context(client)

    def count_workers(self) -> list[int]:
        return [len(router.request("GET", "/workers")["workers"]) for router in self.routers]

    def set_state(self, worker: str, state: str) -> None:
        self.routers[0].request("PATCH", f"/workers/{worker}", {"state": state})
        for router in self.routers:
            router.wait_row(worker, lambda row: row["draining"] == (state == "draining"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(stack, tmp_path_factory.mktemp("site"))


@pytest.fixture
def own_site(tmp_path: Path) -> Iterator[Site]:
    """Start a site that a test may damage."""
    with ExitStack() as stack:
        yield Site(stack, tmp_path)


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[Site]:
    file = tmp_path / "keys.yaml"
    scopes = {"alice": "proxy", "bob": "proxy", "watch": "admin"}
    lines = [f"- {{name: {name}, scopes: [{scopes[name]}], key: {key}}}" for name, key in KEYS.items()]
    file.write_text("\n".join(["keys:", *lines]))
    with ExitStack() as stack:
        yield Site(stack, tmp_path, "--api-keys-file", str(file))


def create(client: Any, text: str = "hello", **more: Any) -> tuple[Any, str]:
    """Create a response; return it with the worker that made it."""
    more = {"max_output_tokens": 4} | more
    answer = client.responses.with_raw_response.create(model=MODEL, input=text, **more)
    return answer.parse(), answer.headers["x-kvrouter-worker"]


def on(worker: str) -> dict[str, Any]:
    return {"extra_headers": {"x-kvrouter-worker": worker}}


def refused(call: Any, *args: Any, **more: Any) -> tuple[int, dict[str, Any]]:
    with pytest.raises(openai.APIStatusError) as caught:
        call(*args, **more)
    body: Any = caught.value.response.json()
    return caught.value.status_code, body["error"]


def not_found(response_id: str) -> tuple[int, dict[str, Any]]:
    return 404, {
        "message": f"Response with id '{response_id}' not found.",
        "type": "invalid_request_error",
        "param": "response_id",
        "code": 404,
    }


def test_all_turns_of_conversations_reach_their_owner_through_either_router(site: Site) -> None:
    clients = [site.client(router) for router in range(2)]
    reached = {}
    for conversation in range(4):
        # The sessions would send both conversations of a worker to it; the load and the answers' ends would not.
        session = {"extra_headers": {"x-session-id": f"s{conversation % 2}"}}
        response, owner = create(clients[conversation % 2], f"{conversation} " + "bada " * 300, **session)
        for turn in range(5):
            former = response
            response, worker = create(clients[turn % 2], f"turn {turn}", previous_response_id=former.id)
            reached[conversation, turn] = worker == owner
            assert response.usage.input_tokens > former.usage.total_tokens
            assert response.usage.input_tokens_details.cached_tokens > 200
    assert reached == dict.fromkeys(reached, True) and len(reached) == 20
    assert {create(clients[0], **on(name))[1] for name in ("w0", "w1")} == {"w0", "w1"}


def test_a_busy_owner_gets_its_turns_and_cancels_in_the_background(tmp_path: Path) -> None:
    with ExitStack() as stack:
        site = Site(stack, tmp_path, "--saturation-tokens", "1000", "--queue-deadline-s", "0.2")
        client = site.client()
        response, _ = create(client, **on("w1"))
        body = {"model": MODEL, "worker_id": "w1", "isl_tokens": 100_000, "effective_prefill_tokens": 100_000}
        for router in site.routers:
            router.request("POST", "/reservations", {**body, "selection_id": f"busy-{router.port}"})
        assert create(client)[1] == "w0"
        for _ in range(10):
            response, worker = create(client, previous_response_id=response.id)
            assert worker == "w1"
        assert create(client, previous_response_id=response.id, **on("w0"))[1] == "w1"
        site.replicas[1].faults(stall_s=600)
        queued, worker = create(client, background=True, previous_response_id=response.id)
        assert (queued.status, worker) == ("queued", "w1")
        assert site.client(1).responses.cancel(queued.id).status == "cancelled"
        # A cancelled response can still be retrieved, as with OpenAI.
        assert client.responses.retrieve(queued.id).status == "cancelled"


def test_a_response_is_retrieved_and_deleted_at_its_owner(site: Site) -> None:
    for name in ("w0", "w1"):
        response, _ = create(site.client(), **on(name))
        for router in range(2):
            client = site.client(router)
            answer = client.responses.with_raw_response.retrieve(response.id)
            assert answer.headers["x-kvrouter-worker"] == name
            assert answer.parse().output_text == response.output_text
            assert client.responses.input_items.list(response.id).data[0].content[0].text == "hello"
        site.client(1).responses.delete(response.id)
        for router in range(2):
            assert refused(site.client(router).responses.retrieve, response.id) == not_found(response.id)


def test_a_background_response_is_followed_and_resumed(site: Site) -> None:
    first, second = site.client(0), site.client(1)
    stream = first.responses.create(
        model=MODEL, input="a", max_output_tokens=8, background=True, stream=True, **on("w1")
    )
    events = list(stream)
    response_id = events[0].response.id
    resumed = list(second.responses.retrieve(response_id, stream=True, starting_after=4))
    assert resumed == events[5:]


def test_a_streamed_response_has_an_owner_while_it_is_streamed(site: Site) -> None:
    with site.client().responses.create(
        model=MODEL, input="a", max_output_tokens=512, stream=True, **on("w1")
    ) as stream:
        response_id = next(iter(stream)).response.id
        assert site.client(1).responses.retrieve(response_id).id == response_id


def test_a_draining_owner_gets_its_turns_and_no_other_requests(site: Site) -> None:
    response, _ = create(site.client(), **on("w1"))
    site.set_state("w1", "draining")
    for router in range(2):
        client = site.client(router)
        assert create(client, previous_response_id=response.id)[1] == "w1"
        assert client.responses.retrieve(response.id).id == response.id
        assert create(client)[1] == "w0"
    site.set_state("w1", "active")


def test_a_response_is_gone_with_its_owner(own_site: Site) -> None:
    clients = [own_site.client(router) for router in range(2)]
    gone = {}
    response, _ = create(clients[0], **on("w1"))

    def codes() -> set[tuple[int, Any]]:
        calls = [
            lambda client: refused(create, client, previous_response_id=response.id),
            lambda client: refused(client.responses.retrieve, response.id),
            lambda client: refused(client.responses.cancel, response.id),
            lambda client: refused(client.responses.delete, response.id),
        ]
        errors = [call(client) for call in calls for client in clients]
        return {(status, error["code"]) for status, error in errors}

    gone["restarted"] = until(lambda: _restart(own_site, response.id), "the restart is noticed") and codes()
    response, _ = create(clients[0], **on("w1"))
    own_site.replicas[1].kill()
    gone["killed"] = codes()
    own_site.routers[0].wait_row("w1", lambda row: row["state"] == "down")
    gone["down"] = codes()
    own_site.routers[0].request("DELETE", "/workers/w1")
    until(lambda: own_site.count_workers() == [1, 1], "w1 is removed")
    gone["removed"] = codes()
    assert set(map(tuple, gone.values())) == {((404, "response_owner_gone"),)}


def _restart(site: Site, response_id: str) -> bool:
    """Restart w1 once, and return whether both routers have noticed it."""
    if not hasattr(site, "is_restarted"):
        site.is_restarted = True  # type: ignore[attr-defined]
        site.replicas[1].faults(restart=True)
    errors = [refused(site.client(router).responses.retrieve, response_id)[1] for router in range(2)]
    return {error["code"] for error in errors} == {"response_owner_gone"}


def test_another_key_gets_the_answer_for_an_unknown_response(keyed: Site) -> None:
    alice, bob = (keyed.client(0, name) for name in ("alice", "bob"))
    response, owner = create(alice)
    for router in range(2):
        bob, alice = (keyed.client(router, name) for name in ("bob", "alice"))
        for response_id in (response.id, UNKNOWN):
            expected = not_found(response_id)
            assert refused(create, bob, previous_response_id=response_id) == expected
            for call in (bob.responses.retrieve, bob.responses.cancel, bob.responses.delete):
                assert refused(call, response_id) == expected
            assert refused(bob.responses.input_items.list, response_id) == expected
        assert create(alice, previous_response_id=response.id)[1] == owner
        # The other key cannot take the id over, either.
        status, error = refused(create, bob, extra_body={"request_id": response.id})
        assert (status, error["code"]) == (409, "response_id_taken")
    # The router's own key with every scope made none of them.
    assert refused(keyed.client(0, "watch").responses.retrieve, response.id) == not_found(response.id)


def test_an_unknown_response_gets_the_engines_answer(site: Site) -> None:
    client = site.client()
    assert refused(client.responses.retrieve, UNKNOWN) == not_found(UNKNOWN)
    assert refused(create, client, previous_response_id=UNKNOWN) == not_found(UNKNOWN)
    unstored, _ = create(client, store=False)
    assert refused(client.responses.retrieve, unstored.id) == not_found(unstored.id)


def test_without_redis_a_router_finds_its_own_responses_and_says_that_it_does_not_know_the_others(
    own_site: Site,
) -> None:
    own, _ = create(own_site.client(0), **on("w1"))
    other, _ = create(own_site.client(1), **on("w1"))
    own_site.store.stop()
    client = own_site.client(0)
    response, worker = create(client, previous_response_id=own.id)
    assert worker == "w1" and client.responses.retrieve(response.id).id == response.id
    status, error = refused(client.responses.retrieve, other.id)
    assert (status, error["code"]) == (503, "store_unavailable")
    own_site.store.resume()
    until(lambda: own_site.client(1).responses.retrieve(response.id), "what was made meanwhile is shared")
    assert own_site.routers[0].metric("kvrouter_response_lookups_total", outcome="failed") >= 1
