# SPDX-License-Identifier: Apache-2.0
"""A real Envoy in front of simulated replicas, with `kvrouter epp` as its endpoint picker.

The predicted hits are the tokens that the engines reuse, whatever the form of the request.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import anthropic
import grpc
import openai
import pytest

from tests.support.compression import CODINGS, COMPRESS
from tests.support.envoy_process import (
    BUFFERED,
    FULL_DUPLEX,
    ORIGINAL_DST,
    OVERRIDE_HOST,
    ROUND_ROBIN,
    SUBSET_HEADER,
    EnvoyProcess,
    endpoint_of,
)
from tests.support.exchange import exchange
from tests.support.fleet import settle, until, wait_live
from tests.support.ports import free_port
from tests.support.replica_process import MODEL, replicas, worker_flags
from tests.support.router_process import RouterProcess

pytestmark = pytest.mark.smoke

# Set KVROUTER_TEST_GATEWAY_REQUESTS=2000 for a longer run by hand.
REQUESTS = int(os.environ.get("KVROUTER_TEST_GATEWAY_REQUESTS", "60"))
CHATS = 6
REPLICAS = 3
COMPLETIONS = "/v1/completions"
MAX_BODY_BYTES = 4_000_000
CLIENTS = 8
TIMEOUT_S = 60.0


class Site(NamedTuple):
    """A router with simulated replicas, and two Envoys in front of them."""

    router: RouterProcess
    urls: list[str]
    gateway_port: int
    # Finds engines by the header alone, and sends bodies in FULL_DUPLEX_STREAMED.
    duplex: EnvoyProcess
    # Finds engines by metadata, and sends bodies BUFFERED.
    held: EnvoyProcess

    def active(self) -> int:
        """Return the number of requests under way, by the router's count."""
        loads = self.router.request("GET", "/loads")[0]["loads"]
        return sum(row["active_requests"] for row in loads)

    def wait_idle(self) -> None:
        until(lambda: self.active() == 0, "no reservation is left")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder, port = tmp_path_factory.mktemp("gateway"), free_port()
    flags = ["--gateway-port", str(port), "--model-alias", f"other={MODEL}", "--max-body-bytes", str(MAX_BODY_BYTES)]
    with (
        replicas(REPLICAS, "--shape", "gemma3", "--blocks", "2500") as endpoints,
        RouterProcess(folder / "router", [*flags, *worker_flags(endpoints)]) as router,
    ):
        urls = [endpoint["url"] for endpoint in endpoints]
        with (
            EnvoyProcess(folder / "duplex", urls, picker_port=port, how=ORIGINAL_DST) as duplex,
            EnvoyProcess(folder / "held", urls, picker_port=port, how=OVERRIDE_HOST, processing=BUFFERED) as held,
        ):
            started = Site(router, urls, port, duplex, held)
            for number in range(REPLICAS):
                # A replica without blocks has published nothing yet, so send each one a prompt.
                pin = {"x-kvrouter-worker": f"w{number}"}
                assert post(duplex.port, completion([number + 1] * 100), pin)[1]["x-kvrouter-worker"] == f"w{number}"
            wait_live(router)
            yield started


def completion(prompt: list[Any], **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 2, **more}


def post(
    port: int, body: Any, headers: dict[str, str] | None = None, path: str = COMPLETIONS, expected: int = 200
) -> tuple[Any, dict[str, str]]:
    """Return the decoded answer and its headers."""
    answer = exchange(port, "POST", path, body, headers)
    assert answer.status == expected, (answer.status, answer.content[:500])
    return answer.json(), answer.headers


def ended(site: Site, selection: str) -> dict[str, Any]:
    """Return a decision once its request has ended."""
    path = f"/decisions/{selection}"
    until(lambda: site.router.request("GET", path)["outcome"] is not None, "it ends")
    decision: dict[str, Any] = site.router.request("GET", path)
    return decision


def cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def exact(router: RouterProcess) -> float:
    return sum(
        router.metric("kvrouter_predictions_total", model=MODEL, worker=f"w{n}", outcome="exact")
        for n in range(REPLICAS)
    )


@pytest.mark.parametrize("name", ["duplex", "held"])
def test_a_list_of_prompts_goes_where_the_most_of_it_is(site: Site, name: str) -> None:
    port, rng = getattr(site, name).port, Random(f"lists {name}")
    held = [rng.randrange(1, 30_000) for _ in range(800)]
    for worker in ("w0", "w1", "w2"):
        # Only the second prompt is held, and only there.
        held = [*held[:-1], rng.randrange(1, 30_000)]
        fresh = [rng.randrange(1, 30_000), *held]
        post(port, completion(fresh), {"x-kvrouter-worker": worker})
        settle(site.router)
        prompts = [[rng.randrange(1, 30_000) for _ in range(20)], [*fresh, 5]]
        answer, headers = post(port, completion(prompts, n=2))
        assert headers["x-kvrouter-worker"] == worker
        assert int(headers["x-kvrouter-predicted-hit"]) > 700
        assert len(answer["choices"]) == 4
        answer, headers = post(port, completion([prompts[0], [*fresh, 6]]))
        decision = ended(site, headers["x-kvrouter-selection-id"])
        assert (decision["num_prompts"], decision["answers"], decision["worker_id"]) == (2, 1, worker)
        outcome = decision["outcome"]
        assert outcome["predicted_tokens"] == outcome["delivered_tokens"] == cached(answer)
    site.wait_idle()
    assert site.router.request("GET", "/health")["status"] == "ok"


@pytest.mark.parametrize("name", ["duplex", "held"])
def test_every_prediction_is_what_the_engine_reused(site: Site, name: str) -> None:
    port, rng = getattr(site, name).port, Random(name)
    chats: list[list[int]] = [[] for _ in range(CHATS)]
    before, reused, workers = exact(site.router), 0, set()
    for number in range(REQUESTS):
        chat = chats[number % CHATS]
        if len(chat) > 2_000:
            chat.clear()
        chat += [rng.randrange(1, 30_000) for _ in range(rng.randrange(50, 400))]
        streams = {"stream": True, "stream_options": {"include_usage": True}} if number % 7 == 0 else {}
        # Pin the first requests: chance decides where chats begin, and now and then leaves a worker out.
        pin = {"x-kvrouter-worker": f"w{number}"} if number < REPLICAS else {}
        settle(site.router)
        if streams:
            hit_tokens, headers = streamed(port, completion(list(chat), **streams), pin)
        else:
            answer, headers = post(port, completion(list(chat)), pin)
            hit_tokens = cached(answer)
        assert int(headers["x-kvrouter-predicted-hit"]) == hit_tokens, (number, headers)
        reused += hit_tokens
        workers.add(headers["x-kvrouter-worker"])
    assert reused > 0 and len(workers) == REPLICAS
    site.wait_idle()
    assert exact(site.router) - before == REQUESTS
    print(f"{name}: {REQUESTS} requests, {reused} tokens reused, all as predicted")


def streamed(port: int, body: Any, headers: dict[str, str] | None = None) -> tuple[int, dict[str, str]]:
    """Return the cached tokens and the headers of a stream."""
    answer = exchange(port, "POST", COMPLETIONS, body, headers)
    events = answer.content.split(b"\n\n")
    assert answer.status == 200 and events[-2:] == [b"data: [DONE]", b""]
    return cached(json.loads(events[-3].removeprefix(b"data: "))), answer.headers


def test_many_clients_at_once_lose_nothing(site: Site) -> None:
    def run(seed: int) -> list[int]:
        rng = Random(seed)
        ports = [site.duplex.port, site.held.port]
        return [
            len(post(ports[n % 2], completion([rng.randrange(1, 30_000) for _ in range(100)]))[0]["choices"])
            for n in range(10)
        ]

    with ThreadPoolExecutor(CLIENTS) as pool:
        assert [n for counts in pool.map(run, range(CLIENTS)) for n in counts] == [1] * 10 * CLIENTS
    site.wait_idle()
    assert site.router.metric("kvrouter_gateway_open_streams") == 0


def test_a_decision_is_explained_with_what_came_of_it(site: Site) -> None:
    settle(site.router)
    _, headers = post(site.duplex.port, completion([7] * 200), {"x-request-id": "from-the-client"})
    assert headers["x-request-id"] == "from-the-client"
    by_id = site.router.request("GET", f"/decisions/{headers['x-kvrouter-selection-id']}")
    assert by_id == site.router.request("GET", "/decisions/from-the-client")
    assert by_id["worker_id"] == headers["x-kvrouter-worker"]
    outcome = by_id["outcome"]
    assert outcome["outcome"] == "ok" and outcome["delivered_tokens"] == outcome["predicted_tokens"]


def test_openais_client_sees_an_openai_server(site: Site) -> None:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{site.duplex.port}/v1", api_key="x", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "bada bede " * 100}]
        for _ in range(2):
            settle(site.router)
            raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=messages, max_tokens=2)
            usage: Any = raw.parse().usage
            hit_tokens = usage.prompt_tokens_details.cached_tokens
            assert int(raw.headers["x-kvrouter-predicted-hit"]) == hit_tokens
        assert hit_tokens > 0
        stream = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=3, stream=True)
        assert "".join(part.choices[0].delta.content or "" for part in stream)
        # A worker answers this request, which has no prompt.
        assert [model.id for model in client.models.list()] == [MODEL]
        with pytest.raises(openai.NotFoundError, match="no worker is registered for model 'nope'"):
            client.completions.create(model="nope", prompt="x")
        with pytest.raises(openai.BadRequestError, match="the body is not JSON"):
            client.post("/completions", content=b'{"model"', cast_to=object)
        with pytest.raises(openai.APIStatusError, match="max_body_bytes") as error:
            client.completions.create(model=MODEL, prompt="x" * (MAX_BODY_BYTES + 1))
        assert error.value.status_code == 413
    site.wait_idle()


def test_anthropics_client_sees_an_anthropic_server(site: Site) -> None:
    system: Any = "You are brief." + " bada bede" * 200
    with anthropic.Anthropic(base_url=f"http://127.0.0.1:{site.held.port}", api_key="x", max_retries=0) as client:
        for _ in range(2):
            settle(site.router)
            raw = client.messages.with_raw_response.create(
                model=MODEL, max_tokens=4, system=system, messages=[{"role": "user", "content": "hi"}]
            )
            usage = raw.parse().usage
            assert int(raw.headers["x-kvrouter-predicted-hit"]) == usage.cache_read_input_tokens
        assert usage.cache_read_input_tokens


def test_an_alias_is_the_engines_model(site: Site) -> None:
    for envoy in (site.duplex, site.held):
        assert post(envoy.port, completion([3] * 50) | {"model": "other"})[0]["model"] == MODEL


@pytest.mark.parametrize("name", ["duplex", "held"])
def test_a_stored_response_stays_where_it_was_made(site: Site, name: str) -> None:
    port = getattr(site, name).port
    client: Any = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0, timeout=TIMEOUT_S)
    with client:
        for number in range(REPLICAS):
            worker, pin = f"w{number}", {"x-kvrouter-worker": f"w{number}"}
            made = client.responses.create(model=MODEL, input="hello", max_output_tokens=4, extra_headers=pin)
            with client.responses.create(
                model=MODEL, input="more", max_output_tokens=4, previous_response_id=made.id, stream=True
            ) as stream:
                streamed = list(stream)[-1].response
            turn = client.responses.with_raw_response.create(
                model=MODEL, input="more", max_output_tokens=4, previous_response_id=streamed.id
            )
            assert turn.headers["x-kvrouter-worker"] == worker
            found = client.responses.with_raw_response.retrieve(streamed.id)
            assert found.headers["x-kvrouter-worker"] == worker and found.parse() == streamed
            assert client.responses.input_items.list(made.id).data[0].content[0].text == "hello"
            client.responses.delete(made.id)
            for call in (client.responses.retrieve, client.responses.cancel):
                with pytest.raises(openai.NotFoundError, match="not found"):
                    call(made.id)
    site.wait_idle()


def test_a_session_stays_where_it_was(site: Site) -> None:
    session, rng = {"x-session-id": "s-1"}, Random(11)
    prompt = [rng.randrange(1, 30_000) for _ in range(40)]
    first = post(site.duplex.port, completion(prompt), session)[1]["x-kvrouter-worker"]
    for _ in range(4):
        prompt += [rng.randrange(1, 30_000) for _ in range(8)]
        assert post(site.duplex.port, completion(prompt), session)[1]["x-kvrouter-worker"] == first


@pytest.mark.parametrize("number", range(REPLICAS))
def test_a_subset_is_honoured(site: Site, number: int) -> None:
    subset = {SUBSET_HEADER: f"10.9.9.9:1,{endpoint_of(site.urls[number])}"}
    for _ in range(4):
        assert post(site.duplex.port, completion([5] * 90), subset)[1]["x-kvrouter-worker"] == f"w{number}"


@pytest.mark.parametrize("subset", [",", "10.9.9.9:1", "nonsense"])
def test_a_subset_without_a_worker_is_answered_503(site: Site, subset: str) -> None:
    body, headers = post(site.duplex.port, completion([5] * 90), {SUBSET_HEADER: subset}, expected=503)
    assert body["error"]["code"] == "no_worker" and "endpoints that the gateway allows" in body["error"]["message"]
    assert headers["content-type"] == "application/json"
    site.wait_idle()


def test_only_the_picker_says_where_a_request_goes(site: Site) -> None:
    tricks = {
        "x-gateway-destination-endpoint": "127.0.0.1:1",
        "x-prefiller-host-port": "127.0.0.1:1",
        "x-kvrouter-selection-id": "mine",
    }
    for envoy in (site.duplex, site.held):
        assert post(envoy.port, completion([9] * 30), tricks)[1]["x-kvrouter-selection-id"] != "mine"


def test_json_continues_as_json_whatever_it_is_called(site: Site) -> None:
    for envoy in (site.duplex, site.held):
        post(envoy.port, completion([7] * 40), {"content-type": "application/x-www-form-urlencoded"})


def test_a_body_in_many_chunks_arrives_whole(site: Site) -> None:
    body = json.dumps(completion(list(range(1, 400)))).encode()
    for envoy in (site.duplex, site.held):
        connection = http.client.HTTPConnection("127.0.0.1", envoy.port, timeout=TIMEOUT_S)
        pieces = (body[at : at + 7] for at in range(0, len(body), 7))
        connection.request("POST", COMPLETIONS, pieces, {"content-type": "application/json"}, encode_chunked=True)
        answer = connection.getresponse()
        assert json.loads(answer.read())["usage"]["prompt_tokens"] == 399
        connection.close()


def test_a_huge_body_arrives_whole(site: Site) -> None:
    body = completion([4] * 100, user="x" * (MAX_BODY_BYTES - 10_000))
    for envoy in (site.duplex, site.held):
        assert post(envoy.port, body)[0]["usage"]["prompt_tokens"] == 100


def refusal_of(port: int, size_bytes: int, *, chunked: bool) -> Any:
    """Return the error that answers a body of this size.

    The body itself is only sent if its length is not announced.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        if chunked:
            pieces = (b"x" * min(100_000, size_bytes - at) for at in range(0, size_bytes, 100_000))
            connection.request("POST", COMPLETIONS, pieces, encode_chunked=True)
        else:
            connection.putrequest("POST", COMPLETIONS)
            connection.putheader("content-length", str(size_bytes))
            connection.endheaders(b"x")
        answer = connection.getresponse()
        assert answer.status == 413
        return json.loads(answer.read())["error"]
    finally:
        connection.close()


def test_a_body_over_the_limit_is_413(site: Site) -> None:
    over, far_over = MAX_BODY_BYTES + 1, 3 * MAX_BODY_BYTES
    for port, size_bytes, chunked in (
        (site.duplex.port, over, True),
        (site.duplex.port, far_over, False),
        (site.held.port, over, True),
        (site.held.port, far_over, True),
        (site.held.port, far_over, False),
    ):
        error = refusal_of(port, size_bytes, chunked=chunked)
        assert error["code"] == "body_too_large" and "max_body_bytes" in error["message"]


def field(number: int, content: bytes) -> bytes:
    """Encode a length-delimited field, as protobuf writes it."""
    size, length = len(content), bytearray()
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    return bytes([number << 3 | 2, *length, size]) + content


def head(headers: dict[str, str] | None = None) -> bytes:
    """Return the ProcessingRequest with the headers of a POST to /v1/completions."""
    named = {":method": "POST", ":path": COMPLETIONS, **(headers or {})}
    listed = (field(1, field(1, name.encode()) + field(3, value.encode())) for name, value in named.items())
    return field(2, field(1, b"".join(listed)))


def piece(data: bytes, *, ends: bool = False) -> bytes:
    """Return the ProcessingRequest with a piece of the body."""
    return field(4, field(1, data) + b"\x10\x01" * ends)


# The headers of the engine's answer.
ANSWER = field(3, field(1, field(1, field(1, b":status") + field(3, b"200"))))


def replies_to(site: Site, *messages: bytes) -> list[bytes]:
    """Return the replies to one stream of ProcessingRequests, without a gateway."""
    with grpc.insecure_channel(f"127.0.0.1:{site.gateway_port}") as channel:
        return list(channel.stream_stream("/envoy.service.ext_proc.v3.ExternalProcessor/Process")(iter(messages)))


def test_pieces_behind_a_refusal_get_no_second_one(site: Site) -> None:
    replies = replies_to(site, head(), *[piece(b"x" * (MAX_BODY_BYTES // 2))] * 8)
    assert len(replies) == 1 and b"max_body_bytes" in replies[0]


@pytest.mark.parametrize("number", range(REPLICAS))
def test_headers_count_in_any_case(site: Site, number: int) -> None:
    named = {"X-KVRouter-Worker": f"w{number}", "X-Session-ID": "s-2", "X-Request-Id": f"any-case-{number}"}
    routed, *_ = replies_to(site, head(named), piece(json.dumps(completion([5] * 90)).encode(), ends=True), ANSWER)
    assert endpoint_of(site.urls[number]).encode() in routed and f"any-case-{number}".encode() in routed
    # The pin goes no further: its name is among the headers to remove.
    assert field(2, b"x-kvrouter-worker") in routed


def wrong_ends(site: Site, kind: str) -> float:
    return site.router.metric("kvrouter_gateway_wrong_ends_total", kind=kind)


def test_a_body_whose_end_comes_twice_is_answered_once(site: Site) -> None:
    body = json.dumps(completion([7] * 90)).encode()
    before = wrong_ends(site, "repeated")
    last = piece(body[60:], ends=True)
    alone = replies_to(site, head(), piece(body[:60]), last, ANSWER)
    repeated = replies_to(site, head(), piece(body[:60]), last, last, piece(b"", ends=True), ANSWER, last)
    assert len(alone) == len(repeated) == 4 and alone[1:3] == repeated[1:3]
    until(lambda: wrong_ends(site, "repeated") - before == 3, "each repeated piece is counted")
    site.wait_idle()


def test_other_data_behind_the_end_of_a_body_ends_the_stream(site: Site) -> None:
    body = json.dumps(completion([7] * 90)).encode()
    with pytest.raises(grpc.RpcError) as error:
        replies_to(site, head(), piece(body, ends=True), piece(b"more", ends=True))
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "4 bytes came after the end of the request's body" in error.value.details()
    site.wait_idle()


def test_a_body_whose_end_comes_too_early_is_completed(site: Site) -> None:
    body = json.dumps(completion([7] * 90)).encode()
    before = wrong_ends(site, "early")
    parts = [piece(body[:9], ends=True), piece(body[9:70], ends=True), piece(body[70:], ends=True)]
    replies = replies_to(site, head(), *parts, ANSWER)
    assert len(replies) == 5 and b"".join(replies).count(b"x-kvrouter-selection-id") == 1
    until(lambda: wrong_ends(site, "early") - before == 1, "the early end is counted")
    site.wait_idle()


@pytest.mark.parametrize("coding", CODINGS)
def test_a_compressed_body_whose_end_comes_too_early_is_completed(site: Site, coding: str) -> None:
    body = COMPRESS[coding](json.dumps(completion([7] * 90)).encode())
    before = wrong_ends(site, "early")
    encoded = head({"content-encoding": coding})
    replies = replies_to(site, encoded, piece(body[:9], ends=True), piece(body[9:], ends=True), ANSWER)
    assert b"".join(replies).count(b"x-kvrouter-selection-id") == 1
    until(lambda: wrong_ends(site, "early") - before == 1, "the early end is counted")
    (reply,) = replies_to(site, encoded, piece(body[:-1], ends=True))
    assert b"malformed_encoding" in reply
    site.wait_idle()


def test_a_body_that_stays_cut_is_malformed(site: Site) -> None:
    body = json.dumps(completion([7] * 90)).encode()
    for cut in (body[:-1], b""):
        (reply,) = replies_to(site, head(), piece(cut, ends=True))
        assert b"malformed_body" in reply and b"truncated" in reply
    for envoy in (site.duplex, site.held):
        connection = http.client.HTTPConnection("127.0.0.1", envoy.port, timeout=TIMEOUT_S)
        connection.request("POST", COMPLETIONS, iter([body[:50], body[50:-1]]), encode_chunked=True)
        answer = connection.getresponse()
        assert answer.status == 400 and json.loads(answer.read())["error"]["code"] == "malformed_body"
        connection.close()
    assert site.router.metric("kvrouter_internal_errors_total", where="gateway") == 0
    site.wait_idle()


def test_clients_of_http_2_are_served(site: Site, tmp_path: Path) -> None:
    # An Envoy before the gateway speaks HTTP/2 to it.
    gateway = f"http://127.0.0.1:{site.duplex.port}"
    with EnvoyProcess(tmp_path, [gateway], picker_port=None, how=ROUND_ROBIN, http2=True) as front:
        before = site.duplex.stat("http.in.downstream_rq_http2_total")
        with ThreadPoolExecutor(CLIENTS) as pool:
            prompts = [[n + 1] * 60 for n in range(20)]
            answers = list(pool.map(lambda prompt: post(front.port, completion(prompt)), prompts))
        assert len({headers["x-kvrouter-selection-id"] for _, headers in answers}) == 20
        streamed(front.port, completion([1] * 60, stream=True, stream_options={"include_usage": True}))
        assert site.duplex.stat("http.in.downstream_rq_http2_total") - before == 21


def with_trailers(port: int, body: bytes, method: str = "POST") -> bytes:
    """Return the answer to a request whose chunked body is followed by trailers."""
    head = f"{method} {COMPLETIONS} HTTP/1.1\r\nhost: e\r\nconnection: close\r\ncontent-type: application/json\r\n"
    chunk = b"%x\r\n%s\r\n" % (len(body), body) if body else b""
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as client:
        client.sendall(head.encode() + b"transfer-encoding: chunked\r\n\r\n" + chunk + b"0\r\nx-sum: 1\r\n\r\n")
        answer = bytearray()
        while piece := client.recv(65_536):
            answer += piece
    return bytes(answer)


# With a BUFFERED body, Envoy has sent the headers on before it knows that there is no body. The answer is 503, because
# no endpoint was picked.
@pytest.mark.parametrize(
    ("processing", "empty_post", "empty_get"),
    [
        (BUFFERED, b"503", b"503"),
        (BUFFERED | {"request_trailer_mode": "SEND"}, b"400", b"503"),
        (FULL_DUPLEX, b"400", b"405"),
    ],
)
def test_a_request_with_trailers_is_picked_at_once(
    site: Site, tmp_path: Path, processing: dict[str, str], empty_post: bytes, empty_get: bytes
) -> None:
    with (
        EnvoyProcess(
            tmp_path / "gateway",
            site.urls,
            picker_port=site.gateway_port,
            processing=processing,
            trailers=True,
            # Far longer than a pick takes, and shorter than the client's patience: waiting for it fails the test.
            message_timeout="20s",
        ) as gateway,
        # This turns trailers of HTTP/1 into HTTP/2's trailing HEADERS.
        EnvoyProcess(
            tmp_path / "front",
            [f"http://127.0.0.1:{gateway.port}"],
            picker_port=None,
            how=ROUND_ROBIN,
            http2=True,
            trailers=True,
        ) as front,
    ):
        body = json.dumps(completion(list(range(1, 90)))).encode()
        for port in (gateway.port, front.port):
            answer = with_trailers(port, body)
            assert answer.startswith(b"HTTP/1.1 200 ") and b"x-kvrouter-selection-id" in answer
            assert with_trailers(port, b"").startswith(b"HTTP/1.1 " + empty_post)
            assert with_trailers(port, b"", "GET").startswith(b"HTTP/1.1 " + empty_get)
        assert gateway.stat("http.in.ext_proc.message_timeouts") == 0
        site.wait_idle()


def test_the_health_service_answers_for_each_of_its_names(site: Site) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{site.gateway_port}") as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        for name in ("", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
            assert check(b"\x0a" + bytes([len(name)]) + name.encode()) == b"\x08\x01"
        with pytest.raises(grpc.RpcError) as error:
            check(b"\x0a\x04nope")
        assert error.value.code() is grpc.StatusCode.NOT_FOUND


def test_what_is_not_the_protocol_ends_its_stream_with_the_reason(site: Site) -> None:
    before = site.router.metric("kvrouter_gateway_protocol_errors_total")
    with grpc.insecure_channel(f"127.0.0.1:{site.gateway_port}") as channel:
        process = channel.stream_stream("/envoy.service.ext_proc.v3.ExternalProcessor/Process")
        for raw, reason in (
            (b"\xff", "no ProcessingRequest"),
            (b"", "without a request"),
            (b"\x2a\x00", "was to come"),
        ):
            with pytest.raises(grpc.RpcError) as error:
                list(process(iter([raw])))
            assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert reason in error.value.details()
    assert site.router.metric("kvrouter_gateway_protocol_errors_total") - before == 3
    assert site.router.metric("kvrouter_internal_errors_total", where="gateway") == 0
