# SPDX-License-Identifier: Apache-2.0
"""The blocking and the asyncio client against a real router with a simulated replica."""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvrouter.client import (
    AsyncClient,
    BadRequest,
    Client,
    Conflict,
    NotFound,
    QueryBody,
    QueryByHashBody,
    RegisterBody,
    RequestRefused,
    Retries,
    RouterUnreachable,
    SelectBody,
    Unauthorized,
    Unavailable,
    UnregisterBody,
)
from kvrouter.simulator.cache.shapes import make_geometry
from kvrouter.simulator.http.server import ReplicaServer, ServerThread
from tests.support.client_callers import Caller
from tests.support.router_process import RouterProcess
from tests.support.tls_front import TlsFront
from tests.support.tls_redis import certificates

MODEL, WORKER = "gemma", "w0"
PROMPT = list(range(2, 402))
BLOCKS = 256
CHAT = [{"role": "user", "content": "What is a prefix cache?"}]
RESERVE, RELEASE = "/select_and_reserve", "/reservations/{selection_id}"
Make = Callable[..., Caller]


@pytest.fixture(scope="module")
def replica() -> Iterator[dict[str, Any]]:
    with zmq.Context[zmq.Socket[bytes]]() as context:
        served = ReplicaServer(make_geometry("gemma3"), BLOCKS, context=context, model=MODEL)
        thread = ServerThread([served])
        thread.start()
        yield dict(served.endpoints)
        thread.stop()


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory, replica: dict[str, Any]) -> Iterator[RouterProcess]:
    with RouterProcess(tmp_path_factory.mktemp("router")) as process:
        process.register(WORKER, MODEL, replica["events"], replica["replay"])
        process.request("PATCH", f"/workers/{WORKER}", {"url": replica["url"]})
        process.wait_connected(WORKER)
        yield process


def url_of(router: RouterProcess) -> str:
    return f"http://127.0.0.1:{router.port}"


def active(router: RouterProcess) -> int:
    """Return the number of active requests that the router counts at the worker."""
    router.reconnect()
    ((entry,),) = (model["loads"] for model in router.request("GET", "/loads") if model["model_name"] == MODEL)
    return int(entry["active_requests"])


def done(router: RouterProcess, path: str) -> float:
    """Return the number of successful requests of an endpoint."""
    router.reconnect()
    return router.metric("kvrouter_requests_total", path=path, code="200")


def test_every_call_is_answered(make: Make, router: RouterProcess, replica: dict[str, Any]) -> None:
    client = make(url_of(router))
    assert client.ask("health").status in ("ok", "degraded")
    (row,) = client.ask("workers")
    assert (row.worker_id, row.model, row.url, row.recovery.missed_batches) == (WORKER, MODEL, replica["url"], 0)

    reply = client.ask("query", QueryBody(model=MODEL, token_ids=PROMPT, explain=True, held=True))
    expected = router.request("POST", "/query", {"model": MODEL, "token_ids": PROMPT})
    assert reply.scores == expected["scores"] and reply.instances[WORKER].gpu == expected["instances"][WORKER]["gpu"]
    assert reply.instances[WORKER].groups is not None and reply.instances[WORKER].held is not None
    plain = client.ask("query", QueryBody(model=MODEL, token_ids=PROMPT, workers=[WORKER], cache_salt="s"))
    assert plain.instances[WORKER].groups is None and plain.instances[WORKER].limited_by is None
    hashes: list[int | str] = ["9ae16a3b2f90404f", 2**64 - 1]
    assert WORKER in client.ask("query_by_hash", QueryByHashBody(model=MODEL, block_hashes=hashes)).instances

    added = client.ask("register", RegisterBody(worker_id=7, model="other", endpoint="tcp://127.0.0.1:9"))
    assert (added.status, added.worker_id) == ("ok", 7)
    dropped = client.ask("unregister", UnregisterBody(worker_id=7, model="other"))
    assert (dropped.worker_id, dropped.dropped) == (7, 1)


@pytest.mark.parametrize(
    "prompt",
    [
        {"token_ids": PROMPT},
        {"token_ids": tuple(PROMPT)},
        {"block_hashes": ["9ae16a3b2f90404f"], "num_tokens": 400},
        {"prompt": "The capital of France"},
        {"prompt": PROMPT},
        {"messages": CHAT, "extra": {"chat_template_kwargs": {"x": 1}}},
    ],
    ids=lambda prompt: "-".join(prompt),
)
def test_a_prompt_is_placed_in_every_form(make: Make, router: RouterProcess, prompt: dict[str, Any]) -> None:
    client = make(url_of(router))
    body = SelectBody(model=MODEL, session_id="s", max_tokens=4, explain=True, workers=[WORKER], **prompt)
    choice = client.ask("select", body)
    assert (choice.worker_id, choice.model, choice.reserved) == (WORKER, MODEL, False)
    assert choice.candidates[0].parts.prefill >= 0 and choice.reason
    assert choice.effective_prefill_tokens >= 0 and choice.overlap.dp == {"0": choice.overlap.disk}
    is_text = "prompt" in prompt or "messages" in prompt
    assert (choice.tokens is not None) == is_text
    if is_text:
        assert choice.tokens.num_tokens == choice.tokens.known_tokens > 0


def test_a_dry_run_cannot_be_claimed(make: Make, router: RouterProcess) -> None:
    client = make(url_of(router))
    choice = client.ask("select", SelectBody(model=MODEL, token_ids=PROMPT, dry_run=True, selection_id="dry"))
    assert choice.selection_id == "dry"
    with pytest.raises(AssertionError, match="unknown_selection"):
        router.request("POST", "/reservations", {"selection_id": "dry"})


@pytest.mark.parametrize(
    ("method", "body", "kind", "status", "code", "sentence"),
    [
        ("query", QueryBody(model="nobody", token_ids=[1]), NotFound, 404, "unknown_model", "nobody"),
        ("query", QueryBody(model=MODEL, token_ids=[]), BadRequest, 400, "invalid_body", "token_ids is empty"),
        ("select", SelectBody(model=MODEL), BadRequest, 400, "invalid_body", "exactly one of"),
        ("unregister", UnregisterBody(worker_id="nobody"), NotFound, 404, "unknown_worker", "nobody"),
        ("prefill_complete", "nobody", NotFound, 404, "unknown_selection", "nobody"),
        ("select", SelectBody(model=MODEL, token_ids=[1], exclude_workers=[WORKER]), Unavailable, 503, "no_worker", ""),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_error_has_the_routers_code_and_sentence(
    make: Make,
    router: RouterProcess,
    method: str,
    body: Any,
    kind: type[RequestRefused],
    status: int,
    code: str,
    sentence: str,
) -> None:
    with pytest.raises(kind) as raised:
        make(url_of(router), retries=Retries(count=0)).ask(method, body)
    error = raised.value
    assert (type(error), error.status, error.code) == (kind, status, code)
    assert sentence in error.sentence and error.sentence in str(error) and code in str(error)
    assert not error.may_have_acted


def test_two_reservations_of_one_id_contradict_each_other(make: Make, router: RouterProcess) -> None:
    client, body = make(url_of(router)), SelectBody(model=MODEL, token_ids=PROMPT, selection_id="twice")
    before = active(router)
    client.ask("select_and_reserve", body)
    with pytest.raises(Conflict), client.reserve(body):
        pass
    # The second call must not release the reservation of the first.
    assert active(router) == before + 1
    client.ask("prefill_complete", "twice")
    assert client.ask("release", "twice") is True
    assert client.ask("release", "twice") is False
    assert active(router) == before


@pytest.mark.parametrize("selection_id", ["a b", "50%", "ü", "..", ".", "a.b", "x" * 128])
def test_an_id_of_any_characters_is_released(make: Make, router: RouterProcess, selection_id: str) -> None:
    client = make(url_of(router))
    body = SelectBody(model=MODEL, token_ids=PROMPT, selection_id=selection_id)
    assert client.ask("select_and_reserve", body).selection_id == selection_id
    client.ask("prefill_complete", selection_id)
    assert client.ask("release", selection_id) is True


class Left(BaseException):
    """An exception that no `except Exception` catches."""


@pytest.mark.parametrize("reason", [None, ValueError, Left, KeyboardInterrupt])
def test_a_reservation_ends_with_its_body(
    make: Make, router: RouterProcess, reason: type[BaseException] | None
) -> None:
    client, before = make(url_of(router)), active(router)
    body = SelectBody(model=MODEL, token_ids=PROMPT, max_tokens=8)

    def use() -> None:
        with client.reserve(body) as choice:
            assert choice.reserved and choice.endpoint
            client.ask("prefill_complete", choice.selection_id)
            assert active(router) == before + 1
            if reason is not None:
                raise reason

    if reason is None:
        use()
    else:
        with pytest.raises(reason):
            use()
    assert active(router) == before


def test_a_refused_reservation_is_an_error_and_leaves_nothing(make: Make, router: RouterProcess) -> None:
    before = done(router, RELEASE)
    with (
        pytest.raises(NotFound, match="nobody"),
        make(url_of(router)).reserve(SelectBody(model="nobody", token_ids=[1])),
    ):
        pass
    assert done(router, RELEASE) == before


def test_a_body_that_has_no_json_is_a_type_error(make: Make, router: RouterProcess) -> None:
    with pytest.raises(TypeError):
        make(url_of(router)).ask("query", QueryBody(model=MODEL, token_ids=object()))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(4))
def test_abandoned_reservations_of_a_client_are_released(router: RouterProcess, seed: int) -> None:
    """Count as many releases as reservations, however each task ends and wherever it is cancelled."""
    draw = random.Random(seed)
    reserved, released, before = done(router, RESERVE), done(router, RELEASE), active(router)

    async def use(client: AsyncClient, body: SelectBody, hold_s: float, raises: bool) -> None:
        with contextlib.suppress(Left):
            async with client.reserve(body) as choice:
                await asyncio.sleep(hold_s)
                if draw.random() < 0.5:
                    await client.prefill_complete(choice.selection_id)
                if raises:
                    raise Left

    async def run() -> None:
        async with AsyncClient(url_of(router)) as client:
            tasks = []
            for number in range(60):
                prompt: dict[str, Any] = {"token_ids": PROMPT[: draw.randrange(1, 400)]}
                if number % 3 == 0:
                    prompt = {"prompt": f"number {number}"}
                body = SelectBody(model=MODEL, **prompt)
                work = use(client, body, draw.random() * 0.02, draw.random() < 0.3)
                tasks.append(asyncio.create_task(work))
                await asyncio.sleep(0)
                if draw.random() < 0.5:
                    # The task is cancelled before it sends, while it waits for the answer, or while it holds the
                    # reservation.
                    asyncio.get_running_loop().call_later(draw.random() * 0.03, tasks[-1].cancel)
                await asyncio.sleep(draw.random() * 0.002)
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())
    assert done(router, RESERVE) - reserved == done(router, RELEASE) - released > 10
    assert active(router) == before


def test_threads_share_a_client(router: RouterProcess) -> None:
    before, failed = active(router), []
    with Client(url_of(router)) as client:

        def use(number: int) -> None:
            try:
                for _ in range(10):
                    with client.reserve(SelectBody(model=MODEL, token_ids=[number, 2, 3])) as choice:
                        assert choice.effective_prefill_tokens <= 3
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed and active(router) == before


def test_the_key_is_sent_as_the_router_wants_it(make: Make, tmp_path: Path) -> None:
    with RouterProcess(tmp_path, environment={"KVROUTER_API_KEY": "s3cret"}) as locked:
        assert make(url_of(locked)).ask("health").status
        for key in (None, "wrong"):
            with pytest.raises(Unauthorized) as raised:
                make(url_of(locked), api_key=key).ask("workers")
            assert raised.value.code == "invalid_api_key"
        assert make(url_of(locked), api_key="s3cret").ask("workers") == []


def test_tls_is_verified_by_the_given_context(make: Make, router: RouterProcess, tmp_path: Path) -> None:
    certificates(tmp_path)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    with TlsFront(router.port, server) as front:
        url = f"https://127.0.0.1:{front.port}"
        trusting = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        (row,) = make(url, tls=trusting).ask("workers")
        assert row.worker_id == WORKER
        with pytest.raises(RouterUnreachable, match="certificate"):
            make(url, retries=Retries(count=0)).ask("workers")
