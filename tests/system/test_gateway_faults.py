# SPDX-License-Identifier: Apache-2.0
"""Failures of an endpoint picker, its gateway, engines and clients, and their effects on each other.

No reservation outlives its request, and with fail-open no request is lost.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.support.certificates import Authority, Pair
from tests.support.envoy_process import BUFFERED, FULL_DUPLEX, ORIGINAL_DST, OVERRIDE_HOST, EnvoyProcess
from tests.support.exchange import exchange, listens
from tests.support.fleet import until
from tests.support.ports import free_port
from tests.support.prefill_pools import COMPLETIONS, POOL_FLAGS, Pools, tokens
from tests.support.replica_process import ReplicaProcess, worker_flags
from tests.support.router_process import RouterProcess
from tests.support.scripted_engine import STREAM_HEAD, Asked, ScriptedEngine, Wire, chunk, plain

pytestmark = pytest.mark.smoke

TIMEOUT_S = 60.0
CLIENTS = 4
EVENT = b'data: {"choices":[{"index":0,"text":" yes"}]}\n\n'
ANSWER = json.dumps(
    {
        "object": "text_completion",
        "choices": [{"index": 0, "text": " yes"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}},
    }
).encode()
BODY = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 4}
answers = plain(ANSWER)


async def endless(asked: Asked, wire: Wire) -> None:
    """Send one event, and then nothing until the other side has gone."""
    await wire.send(STREAM_HEAD, chunk(EVENT))
    await wire.gone.wait()


async def serve_text(asked: Asked, wire: Wire) -> None:
    await (endless if b'"stream"' in asked.body else answers)(asked, wire)


class Stage:
    """Scripted engines w0, w1 and so on behind a picker."""

    def __init__(self, folder: Path, stack: ExitStack, scripts: list[Any], *flags: str) -> None:
        self.engines = [stack.enter_context(ScriptedEngine(script)) for script in scripts]
        self.urls = [engine.url for engine in self.engines]
        self.gateway_port = free_port()
        workers = [part for n, url in enumerate(self.urls) for part in ("--worker", f"w{n}={url},model=m")]
        flags = ("--gateway-port", str(self.gateway_port), "--health-interval-s", "0", *flags)
        self.router = stack.enter_context(RouterProcess(folder / "router", [*flags, *workers]))
        self._stack, self._folder = stack, folder

    def envoy(self, how: str = ORIGINAL_DST, **options: Any) -> EnvoyProcess:
        started = EnvoyProcess(self._folder / "envoy", self.urls, picker_port=self.gateway_port, how=how, **options)
        return self._stack.enter_context(started)

    def kill_picker(self) -> None:
        """Kill the picker with SIGKILL, and end the store that it leaves behind."""
        self.router.kill()
        with self.router.store() as client:
            client.shutdown(nosave=True)

    def active(self) -> int:
        loads = self.router.request("GET", "/loads")[0]["loads"]
        return sum(row["active_requests"] for row in loads)

    def wait_active(self, count: int) -> None:
        until(lambda: self.active() == count, f"{count} requests are under way")

    def wait_idle(self) -> None:
        self.wait_active(0)
        until(lambda: self.router.metric("kvrouter_gateway_open_streams") == 0, "no stream is open")


@contextmanager
def stage(folder: Path, scripts: list[Any], *flags: str) -> Iterator[Stage]:
    with ExitStack() as stack:
        site = Stage(folder, stack, scripts, *flags)
        yield site
        assert "Traceback" not in site.router.log_tail()


def post(port: int, **more: Any) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body; the status is 0 if the connection broke."""
    headers = more.pop("headers", {})
    try:
        return exchange(port, "POST", COMPLETIONS, BODY | more, headers)
    except (OSError, http.client.HTTPException) as error:
        return 0, {}, repr(error).encode()


def begun_stream(port: int) -> tuple[socket.socket, str]:
    """Begin a stream, and return its connection after the first event, with its selection id."""
    body = json.dumps(BODY | {"stream": True}).encode()
    connection = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: e\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    data = b""
    while b" yes" not in data:
        piece = connection.recv(65_536)
        assert piece, data
        data += piece
    selection = next(line for line in data.split(b"\r\n") if line.startswith(b"x-kvrouter-selection-id: "))
    return connection, selection.partition(b": ")[2].decode()


def outcome(router: RouterProcess, selection: str) -> str:
    return str(router.request("GET", f"/decisions/{selection}")["outcome"]["outcome"])


MODES = pytest.mark.parametrize("processing", [FULL_DUPLEX, BUFFERED], ids=["duplex", "buffered"])


@MODES
def test_a_client_that_hangs_up_ends_its_reservation(tmp_path: Path, processing: Any) -> None:
    with stage(tmp_path, [serve_text]) as site:
        envoy = site.envoy(processing=processing)
        connection, selection = begun_stream(envoy.port)
        assert site.active() == 1
        connection.close()
        site.wait_idle()
        assert outcome(site.router, selection) == "client_gone"
        until(lambda: site.engines[0].given_up == 1, "the engine's request ends too")


def test_a_gateway_that_is_killed_ends_its_reservations(tmp_path: Path) -> None:
    with stage(tmp_path, [serve_text]) as site:
        envoy = site.envoy()
        streams = [begun_stream(envoy.port) for _ in range(3)]
        site.wait_active(3)
        envoy.kill()
        site.wait_idle()
        assert {outcome(site.router, selection) for _, selection in streams} == {"client_gone"}
        for connection, _ in streams:
            connection.close()


@MODES
def test_an_answer_that_breaks_off_ends_its_reservation(tmp_path: Path, processing: Any) -> None:
    release = threading.Event()

    async def broken(asked: Asked, wire: Wire) -> None:
        await wire.send(STREAM_HEAD, chunk(EVENT))
        while not release.is_set():
            await asyncio.sleep(0.01)
        wire.close()

    with stage(tmp_path, [broken]) as site:
        connection, selection = begun_stream(site.envoy(processing=processing).port)
        site.wait_active(1)
        release.set()
        rest = b""
        while piece := connection.recv(65_536):
            rest += piece
        assert not rest.endswith(b"0\r\n\r\n")
        connection.close()
        site.wait_idle()
        assert outcome(site.router, selection) == "client_gone"


def test_an_engine_that_is_gone_is_left_alone_after_some_failures(tmp_path: Path) -> None:
    with stage(tmp_path, [answers, answers]) as site:
        envoy = site.envoy()
        assert post(envoy.port)[0] == 200
        site.engines[0].kill()
        statuses = [post(envoy.port)[0] for _ in range(40)]
        assert set(statuses) == {200, 503}
        # The engine's breaker opens after five failures, for seconds.
        assert statuses.count(503) <= 8 and set(statuses[-10:]) == {200}
        assert site.router.metric("kvrouter_proxy_breaker_state", model="m", worker="w0", state="closed") == 0
        site.wait_idle()


def test_a_fallback_serves_in_place_of_an_engine_that_is_gone(tmp_path: Path) -> None:
    with stage(tmp_path, [answers, answers, answers], "--gateway-fallbacks", "2") as site:
        envoy = site.envoy(OVERRIDE_HOST, retries=2)
        site.engines[0].kill()
        served = Counter[str]()
        for _ in range(40):
            status, headers, data = post(envoy.port)
            assert status == 200, data
            served[headers["x-kvrouter-worker"]] += 1
        assert set(served) == {"w1", "w2"}
        moved = site.router.metric("kvrouter_gateway_served_elsewhere_total", model="m", worker="w0")
        assert 1 <= moved <= 8
        site.wait_idle()


def test_a_fallbacks_prediction_is_its_own(tmp_path: Path) -> None:
    arguments = ["--shape", "llama", "--blocks", "500", "--instant", "--model", "m"]
    port, prompt = free_port(), tokens(3, 300)
    with ReplicaProcess(tmp_path / "0", arguments) as first, ReplicaProcess(tmp_path / "1", arguments) as second:
        endpoints = [first.endpoints, second.endpoints]
        flags = ["--gateway-port", str(port), "--gateway-fallbacks", "1", "--health-interval-s", "0"]
        with (
            RouterProcess(tmp_path / "router", [*flags, *worker_flags(endpoints)]) as router,
            EnvoyProcess(
                tmp_path / "e",
                [endpoint["url"] for endpoint in endpoints],
                picker_port=port,
                how=OVERRIDE_HOST,
                retries=1,
            ) as envoy,
        ):
            for worker, length in (("w1", 100), ("w0", 300)):
                pin = {"x-kvrouter-worker": worker}
                assert post(envoy.port, prompt=prompt[:length], headers=pin)[1]["x-kvrouter-worker"] == worker

            def hits() -> list[int]:
                answer = router.request("POST", "/query", {"model": "m", "token_ids": [*prompt, 1]})["instances"]
                return [answer[worker]["disk"] for worker in ("w0", "w1")]

            until(lambda: hits()[0] > hits()[1] > 0, "both are indexed")
            first.kill()
            expected = hits()[1]
            status, headers, data = post(envoy.port, prompt=[*prompt, 1])
            assert status == 200, data
            assert headers["x-kvrouter-worker"] == "w1"
            cached = json.loads(data)["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert int(headers["x-kvrouter-predicted-hit"]) == cached == expected
            recorded = router.request("GET", f"/decisions/{headers['x-kvrouter-selection-id']}")["outcome"]
            assert recorded["predicted_tokens"] == recorded["delivered_tokens"] == expected
            assert router.metric("kvrouter_predictions_total", model="m", worker="w1", outcome="exact") >= 1
            loads = router.request("GET", "/loads")[0]["loads"]
            assert [row["active_requests"] for row in loads] == [0, 0]


@MODES
def test_fail_closed_says_so_while_the_picker_is_gone(tmp_path: Path, processing: Any) -> None:
    with stage(tmp_path, [answers, answers]) as site:
        envoy = site.envoy(OVERRIDE_HOST, processing=processing)
        assert post(envoy.port)[0] == 200
        site.kill_picker()
        assert {post(envoy.port)[0] for _ in range(5)} == {500}


def test_fail_open_loses_no_request_when_the_picker_is_killed(tmp_path: Path) -> None:
    with stage(tmp_path, [answers, answers, answers]) as site:
        envoy = site.envoy(OVERRIDE_HOST, processing=BUFFERED, failure_mode_allow=True)
        statuses: Counter[int] = Counter()
        stop = threading.Event()

        def ask() -> None:
            while not stop.is_set():
                statuses[post(envoy.port)[0]] += 1

        threads = [threading.Thread(target=ask) for _ in range(CLIENTS)]
        for thread in threads:
            thread.start()
        until(lambda: statuses[200] > 50, "requests are answered")
        picked = site.router.metric("kvrouter_gateway_requests_total", path=COMPLETIONS, outcome="ok")
        site.kill_picker()
        before = statuses[200]
        until(lambda: statuses[200] > before + 50, "they still are")
        stop.set()
        for thread in threads:
            thread.join()
        assert picked > 0 and set(statuses) == {200}, statuses


def test_fail_open_continues_without_a_picker_that_is_slow(tmp_path: Path) -> None:
    with stage(tmp_path, [answers, answers]) as site:
        envoy = site.envoy(OVERRIDE_HOST, processing=BUFFERED, failure_mode_allow=True, message_timeout="0.3s")
        assert "x-kvrouter-worker" in post(envoy.port)[1]
        os.kill(site.router.pid, signal.SIGSTOP)
        try:
            for _ in range(3):
                status, headers, _ = post(envoy.port)
                assert status == 200 and "x-kvrouter-worker" not in headers
        finally:
            os.kill(site.router.pid, signal.SIGCONT)
        site.wait_idle()
        until(lambda: "x-kvrouter-worker" in post(envoy.port)[1], "the picker is used again")


def test_responses_are_placed_and_followed(tmp_path: Path) -> None:
    usage = {"input_tokens": 7, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 0}}
    with stage(tmp_path, [plain(json.dumps({"object": "response", "usage": usage}).encode())]) as site:
        answer = exchange(site.envoy().port, "POST", "/v1/responses", {"model": "m", "input": "hello"})
        assert answer.json()["usage"] == usage
        recorded = site.router.request("GET", f"/decisions/{answer.headers['x-kvrouter-selection-id']}")["outcome"]
        assert (recorded["outcome"], recorded["prompt_tokens"], recorded["completion_tokens"]) == ("ok", 7, 2)


@pytest.mark.parametrize(
    ("flags", "code"), [(("--queue-size", "0"), "queue_full"), (("--queue-deadline-s", "0"), "saturated")]
)
def test_what_is_shed_is_answered_429(tmp_path: Path, flags: tuple[str, ...], code: str) -> None:
    with stage(tmp_path, [serve_text], "--saturation-tokens", "1", *flags) as site:
        envoy = site.envoy()
        site.router.request(
            "POST", "/reservations", {"model": "m", "worker_id": "w0", "isl_tokens": 60_000, "selection_id": "busy"}
        )
        for _ in range(2):
            status, headers, data = post(envoy.port)
            error = json.loads(data)["error"]
            assert (status, error["type"]) == (429, "rate_limit_error"), data
            assert error["code"] == code and int(headers["retry-after"]) >= 1
        site.router.request("DELETE", "/reservations/busy")
        assert post(envoy.port)[0] == 200
        site.wait_idle()


def test_a_prompt_that_waits_in_line_ends_with_its_client(tmp_path: Path) -> None:
    with stage(tmp_path, [serve_text], "--saturation-tokens", "1") as site:
        envoy = site.envoy()
        busy = {"model": "m", "worker_id": "w0", "isl_tokens": 60_000, "selection_id": "busy"}
        site.router.request("POST", "/reservations", busy)
        body = json.dumps(BODY).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: e\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", envoy.port), TIMEOUT_S) as waiting:
            waiting.sendall(head + body)
            until(lambda: site.router.metric("kvrouter_queue_requests", model="m") == 1, "it waits in line")
        until(lambda: site.router.metric("kvrouter_queue_requests", model="m") == 0, "it has left")
        site.router.request("DELETE", "/reservations/busy")
        site.wait_idle()
        assert not [asked for asked in site.engines[0].asked if asked.target == COMPLETIONS]


def test_a_drained_worker_gets_no_prompt_and_none_left_is_a_503(tmp_path: Path) -> None:
    with stage(tmp_path, [answers, answers]) as site:
        envoy = site.envoy()
        site.router.request("PATCH", "/workers/w0", {"state": "draining"})
        assert {post(envoy.port)[1]["x-kvrouter-worker"] for _ in range(6)} == {"w1"}
        site.router.request("PATCH", "/workers/w1", {"state": "draining"})
        status, headers, data = post(envoy.port)
        assert status == 503 and json.loads(data)["error"]["code"] == "no_worker", data
        assert headers["content-type"] == "application/json"
        with grpc.insecure_channel(f"127.0.0.1:{site.gateway_port}") as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            assert (check(b""), check(b"\x0a\x08liveness")) == (b"\x08\x02", b"\x08\x01")


def test_a_stream_under_way_outlives_the_end_of_the_picker(tmp_path: Path) -> None:
    release = threading.Event()

    async def slow(asked: Asked, wire: Wire) -> None:
        await wire.send(STREAM_HEAD, chunk(EVENT))
        while not release.is_set():
            await asyncio.sleep(0.01)
        await wire.send(chunk(EVENT), chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n")

    with stage(tmp_path, [slow]) as site:
        envoy = site.envoy()
        connection, _ = begun_stream(envoy.port)
        site.router.signal(signal.SIGTERM)
        until(lambda: not listens(site.gateway_port), "no new stream is taken")
        assert post(envoy.port)[0] == 500
        release.set()
        data = b""
        while b"0\r\n\r\n" not in data:
            piece = connection.recv(65_536)
            assert piece, data
            data += piece
        assert b"[DONE]" in data
        assert site.router.wait() == 0
        connection.close()


def test_a_stream_that_outlasts_the_picker_continues_without_it(tmp_path: Path) -> None:
    release = threading.Event()

    async def steady(asked: Asked, wire: Wire) -> None:
        await wire.send(STREAM_HEAD, chunk(EVENT))
        number = 0
        while not release.is_set():
            await asyncio.sleep(0.02)
            await wire.send(chunk(b"data: %d\n\n" % number))
            number += 1
        await wire.send(chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n")

    with stage(tmp_path, [steady], "--drain-s", "1") as site:
        # In FULL_DUPLEX_STREAMED, a piece on its way to the picker at that moment would be lost.
        connection, _ = begun_stream(site.envoy(processing=BUFFERED).port)
        site.router.signal(signal.SIGTERM)
        assert site.router.wait() == 0
        release.set()
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            piece = connection.recv(65_536)
            assert piece, data
            data += piece
        connection.close()
        events = [int(event) for event in re.findall(rb"data: (\d+)", data)]
        assert events == list(range(len(events))) and b"[DONE]" in data


def test_a_certificate_is_read_again_when_it_changes(tmp_path: Path) -> None:
    def write(name: str) -> None:
        subprocess.run(
            shlex.split(
                f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -keyout key.pem -out cert.pem -subj /CN={name}"
            ),
            cwd=tmp_path,
            check=True,
            capture_output=True,
        )

    def presented(port: int) -> str:
        s_client = subprocess.run(
            ["openssl", "s_client", "-connect", f"127.0.0.1:{port}", "-alpn", "h2"],
            input="",
            capture_output=True,
            text=True,
            errors="replace",
        )
        return next(line for line in s_client.stdout.splitlines() if line.startswith("subject="))

    write("one")
    flags = ("--gateway-certificate", str(tmp_path / "cert.pem"), "--gateway-key", str(tmp_path / "key.pem"))
    with stage(tmp_path, [answers], *flags) as site:
        envoy = site.envoy(picker_tls=True)
        assert post(envoy.port)[0] == 200
        assert "one" in presented(site.gateway_port)
        write("two")
        until(lambda: "two" in presented(site.gateway_port), "the new certificate is not read")
        (tmp_path / "cert.pem").unlink()
        os.mkfifo(tmp_path / "cert.pem")
        until(
            lambda: "not a regular file" in str(site.router.request("GET", "/health")["reasons"]),
            "the file is not named",
        )
        assert "two" in presented(site.gateway_port)
        assert post(envoy.port)[0] == 200


def test_gateways_without_a_certificate_of_the_authorities_are_refused(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs", "theirs")
    server = authority.issue("picker")
    flags = ("--gateway-certificate", str(server.certificate), "--gateway-key", str(server.key))

    def serves(pair: Pair | None) -> bool:
        proof = {} if pair is None else {"certificate_chain": pair[0].read_bytes(), "private_key": pair[1].read_bytes()}
        credentials = grpc.ssl_channel_credentials(authority.file.read_bytes(), **proof)
        with grpc.secure_channel(f"127.0.0.1:{site.gateway_port}", credentials) as channel:
            try:
                channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=10)
            except grpc.RpcError:
                return False
            return True

    with stage(tmp_path, [answers], *flags, "--gateway-client-ca", str(authority.file)) as site:
        assert serves(authority.issue("gateway"))
        assert not serves(None)
        assert not serves(stranger.issue("gateway"))


def test_several_processes_share_the_port(tmp_path: Path) -> None:
    with stage(tmp_path, [answers, answers], "--processes", "2") as site:
        # An Envoy has one connection to its picker, so several find both processes.
        for _ in range(4):
            envoy = site.envoy()
            assert "x-kvrouter-worker" in post(envoy.port)[1]
        site.wait_idle()


@pytest.fixture
def pools(tmp_path: Path) -> Iterator[tuple[Pools, EnvoyProcess]]:
    port = free_port()
    with (
        RouterProcess(tmp_path / "router", ["--gateway-port", str(port), *POOL_FLAGS]) as router,
        EnvoyProcess(tmp_path / "envoy", [], picker_port=port) as envoy,
        ExitStack() as stack,
    ):
        yield Pools(router, stack, "m"), envoy


def test_a_prompt_is_handed_over_through_the_body(pools: tuple[Pools, EnvoyProcess]) -> None:
    site, envoy = pools
    site.add("p0")
    site.add("d0")
    prompt = tokens(1)
    site.occupy("d0")
    status, headers, data = post(envoy.port, prompt=prompt)
    assert status == 200, data
    assert (headers["x-kvrouter-worker"], headers["x-kvrouter-prefill-worker"]) == ("d0", "p0")
    assert site.hit("p0", [*prompt, 1]) > 0
    site.free("d0")
    until(lambda: all(requests == 0 for _, requests in site.loads().values()), "no reservation is left")


def test_a_header_names_the_prefill_worker_to_a_sidecar(pools: tuple[Pools, EnvoyProcess]) -> None:
    site, envoy = pools
    engine, prefill = ScriptedEngine(answers), ScriptedEngine(answers)
    site.script("p0", prefill)
    site.script("d0", engine, handover="header")
    site.occupy("d0")
    headers = {"x-prefiller-host-port": "10.9.9.9:1", "x-prefiller-url": "http://10.9.9.9:1"}
    status, answer_headers, data = post(envoy.port, prompt=tokens(2), headers=headers)
    assert status == 200, data
    assert answer_headers["x-kvrouter-prefill-worker"] == "p0"
    request = [sent for sent in engine.asked if sent.target == COMPLETIONS][-1]
    assert request.all("x-prefiller-host-port") == [f"127.0.0.1:{prefill.port}"]
    assert not request.all("x-prefiller-url")
    site.free("d0")
    # A prompt that its decode worker computes names no prefill worker, whatever the client sends.
    post(envoy.port, prompt=tokens(3, 20), headers=headers)
    assert not [sent for sent in engine.asked if sent.target == COMPLETIONS][-1].all("x-prefiller-host-port")
