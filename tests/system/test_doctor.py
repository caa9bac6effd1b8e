# SPDX-License-Identifier: Apache-2.0
"""Every fault of a worker that `kvrouter doctor` knows, and a fleet that is well, in which it finds nothing.

The faults are made with simulated or scripted engines. One router serves all tests, and each test names its workers
differently.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import zmq

from kvrouter.contract.diagnosis import Severity
from kvrouter.events.vllm.wire import WireCleared
from kvrouter.router.app.diagnosis.endpoint_probe import GREETING
from kvrouter.router.app.diagnosis.event_checks import UNHEARD_PROMPTS
from kvrouter.router.app.diagnosis.prediction_checks import COUNTED_PROMPTS
from kvrouter.router.base.common import compiled
from kvrouter.router.observe.quality.prediction_judge import ALONE_MIN, COUNTED_MIN, SILENT_MIN
from kvrouter.router.serve.proxy.circuit_breaker import FAILURES_TO_OPEN
from kvrouter.router.serve.proxy.refused_requests import COUNTED_MIN as REFUSED_MIN
from kvrouter.simulator.cache.shapes import make_geometry
from kvrouter.simulator.http.engine_flags import EngineFlags
from kvrouter.simulator.http.server import ReplicaServer, ServerThread
from tests.support.clinic import Clinic
from tests.support.engine_http import EngineHttp
from tests.support.exchange import post, run_cli
from tests.support.fake_engine import BLOCK, FakeEngine, prompt, stored
from tests.support.fleet import until
from tests.support.ports import free_port
from tests.support.router_process import RouterError, RouterProcess
from tests.support.scripted_engine import Asked, ScriptedEngine, Wire, plain, reset

MODEL = "sim"
POOL_BLOCKS = 2_000


@pytest.fixture
def clinic(router: RouterProcess) -> Clinic:
    return Clinic(router)


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[dict[str, Any]]]:
    """Start two hybrid replicas, and one with full attention that does not say where its events are."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    shapes = (("gemma3", True), ("gemma3", True), ("llama", False))
    servers = [
        ReplicaServer(make_geometry(shape), POOL_BLOCKS, context=context, model=MODEL, event_sources=says)
        for shape, says in shapes
    ]
    thread = ServerThread(servers)
    thread.start()
    yield [dict(server.endpoints) for server in servers]
    thread.stop()
    context.destroy(linger=0)


def compute(replica: dict[str, Any], tokens: list[int]) -> None:
    """Send a prompt directly to a replica."""
    post(replica["url"], "/v1/completions", {"model": MODEL, "prompt": tokens, "max_tokens": 1})


def of(replica: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the fields of a replica's registration, with `more` in place of its own."""
    fields = {"url": replica["url"], "endpoint": replica["events"], "replay_endpoint": replica["replay"]}
    return fields | {"model": MODEL} | more


def shows(clinic: Clinic, worker_id: str) -> None:
    clinic.router.wait_row(worker_id, lambda row: row["state"] == "live" and sum(row["residency"].values()) > 0, "live")


@pytest.mark.smoke
@pytest.mark.skipif(compiled.caution() is not None, reason="a router that is not compiled is not all well")
def test_no_worker_then_a_fleet_that_is_well(clinic: Clinic, replicas: list[dict[str, Any]]) -> None:
    assert clinic.codes() == ["KV005"]
    command = ("doctor", "--url", f"http://127.0.0.1:{clinic.router.port}")
    with clinic.worker("w0", **of(replicas[0])), clinic.worker("w1", **of(replicas[1])):
        # The fleet is well before its first prompt and after it.
        clinic.wait_well()
        for replica, seed in ((replicas[0], 1), (replicas[1], 2)):
            compute(replica, prompt(seed, 40))
        for worker_id in ("w0", "w1"):
            shows(clinic, worker_id)
        for seed in range(8):
            clinic.complete(MODEL, prompt(seed % 3, 40))
        report = clinic.wait_well()
        assert (report.workers, report.routers) == (2, 1)
        done = run_cli(*command)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("all is well: 2 workers, 1 router")
    done = run_cli(*command)
    assert done.returncode == 1 and done.stdout.startswith("KV005 error fleet: no worker is registered")


def test_kv009_names_a_fleet_that_drains(clinic: Clinic, replicas: list[dict[str, Any]]) -> None:
    with clinic.worker("drained", **of(replicas[0])):
        clinic.router.wait_connected("drained")
        clinic.router.request("PATCH", "/workers/drained", {"state": "draining"})
        assert "draining" in clinic.find("KV009").evidence


def test_kv101_names_an_engine_that_is_not_there(clinic: Clinic, engine: FakeEngine) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with clinic.worker("gone", url=url) as subject:
        finding = clinic.find("KV101", subject)
        assert url in finding.evidence and url in finding.fix
        assert "KV205" not in clinic.codes()


def test_kv102_names_a_model_that_the_engine_does_not_serve(clinic: Clinic, replicas: list[dict[str, Any]]) -> None:
    with clinic.worker("named", **of(replicas[0], model="another")) as subject:
        assert "its engine serves sim" in clinic.find("KV102", subject).evidence


def test_kv105_names_an_open_breaker(clinic: Clinic) -> None:
    with ScriptedEngine(reset) as scripted, clinic.worker("cut", "cut", url=scripted.url) as subject:
        for _ in range(FAILURES_TO_OPEN):
            with pytest.raises(RouterError):
                clinic.complete("cut", [1, 2, 3])
        assert clinic.find("KV105", subject).evidence


def test_kv106_and_kv107_name_what_an_engine_says_of_its_disk_and_the_time(clinic: Clinic, http: EngineHttp) -> None:
    http.metrics = b'vllm:kvrouter_offload_disk_off{engine="0"} 1.0\n'
    http.ahead_s = -60.0
    with clinic.worker("disk", url=http.url) as subject:
        assert "left alone" in clinic.find("KV106", subject).evidence
        assert "behind this router's" in clinic.find("KV107", subject).evidence


def test_kv113_names_an_alias_of_no_model_once_no_worker_is_awaited(
    tmp_path: Path, replicas: list[dict[str, Any]]
) -> None:
    file = tmp_path / "kvrouter.yaml"
    here = f"w0={replicas[0]['url']},patch=off"
    late = f"late=http://127.0.0.1:{free_port()}"
    file.write_text(json.dumps({"model_aliases": ["short=gemma"], "workers": [here, late]}))
    with RouterProcess(tmp_path / "router", ["--config", str(file)]) as router:
        clinic = Clinic(router)
        clinic.find("KV104", "late")
        router.wait_connected("w0")
        assert "KV113" not in clinic.codes()
        file.write_text(json.dumps({"model_aliases": ["short=gemma"], "workers": [here]}))
        finding = clinic.find("KV113")
        assert finding.subject == "alias short" and "stands for gemma" in finding.evidence and MODEL in finding.evidence
        file.write_text(json.dumps({"model_aliases": [f"short={MODEL}"], "workers": [here]}))
        clinic.wait_gone("KV113")


def test_kv201_names_a_missing_event_endpoint(clinic: Clinic, http: EngineHttp) -> None:
    with clinic.worker("silent", url=http.url) as subject:
        assert "--kv-events-config" in clinic.find("KV201", subject).fix


def test_kv202_names_an_endpoint_that_says_nothing(
    clinic: Clinic, engine: FakeEngine, replicas: list[dict[str, Any]]
) -> None:
    registration = engine.registration("mute", MODEL, url=replicas[2]["url"])
    with clinic.worker(**registration) as subject:
        clinic.router.wait_connected("mute")
        for seed in range(UNHEARD_PROMPTS):
            assert "KV202" not in clinic.codes()
            clinic.complete(MODEL, prompt(seed, 2_100 // BLOCK))
        assert f"it computed {UNHEARD_PROMPTS} prompts" in clinic.find("KV202", subject).evidence


def test_kv203_names_two_workers_with_one_endpoint(clinic: Clinic, replicas: list[dict[str, Any]]) -> None:
    shared = {"endpoint": replicas[2]["events"], "replay_endpoint": replicas[2]["replay"]}
    with clinic.worker("right", **of(replicas[2])), clinic.worker("wrong", **(of(replicas[0]) | shared)) as subject:
        assert "is that of right too" in clinic.find("KV203", subject).evidence


def test_kv204_names_swapped_endpoints(clinic: Clinic, engine: FakeEngine) -> None:
    swapped: dict[str, Any] = {"endpoint": engine.replay_endpoint, "replay_endpoint": engine.endpoint}
    with clinic.worker("swapped", **swapped) as subject:
        finding = clinic.find("KV204", subject)
        assert finding.fix == f"register events={engine.endpoint},replay={engine.replay_endpoint}"
        assert [reported.code for reported in clinic.report().findings if reported.subject == subject] == ["KV204"]


def test_kv205_names_closed_ports(clinic: Clinic, engine: FakeEngine, http: EngineHttp) -> None:
    closed = f"tcp://127.0.0.1:{free_port()}"
    with clinic.worker("closed", url=http.url, endpoint=closed, replay_endpoint=engine.replay_endpoint) as subject:
        assert f"events endpoint {closed}: Connection refused" in clinic.find("KV205", subject).evidence
    with clinic.worker("half", url=http.url, endpoint=engine.endpoint, replay_endpoint=closed) as subject:
        assert f"replay endpoint {closed}: Connection refused" in clinic.find("KV205", subject).evidence


def test_kv205_names_the_ports_that_the_engine_names(clinic: Clinic, replicas: list[dict[str, Any]]) -> None:
    closed = {"endpoint": f"tcp://127.0.0.1:{free_port()}", "replay_endpoint": f"tcp://127.0.0.1:{free_port()}"}
    with clinic.worker("wrong-port", **(of(replicas[0]) | closed)) as subject:
        # The fix names the engine's own endpoints only once it has answered.
        right = f"register events={replicas[0]['events']},replay={replicas[0]['replay']}"
        until(lambda: clinic.find("KV205", subject).fix == right, "the right ports are not named")
        assert [finding.code for finding in clinic.report().findings if finding.subject == subject].count("KV205") == 1


def test_a_report_that_is_not_too_old_is_given_again(clinic: Clinic) -> None:
    before = clinic.router.request("GET", "/diagnosis")
    with clinic.worker("added", url=f"http://127.0.0.1:{free_port()}") as subject:
        again = clinic.router.request("GET", "/diagnosis?max_age_s=3600")
        assert again["age_s"] > 0 and again["findings"] == before["findings"] and again["workers"] == before["workers"]
        clinic.find("KV101", subject)
        # The report that found it is the one that is given again now.
        again = clinic.router.request("GET", "/diagnosis?max_age_s=3600")
        assert again["workers"] == before["workers"] + 1
        assert subject in [finding["subject"] for finding in again["findings"]]
    with pytest.raises(RouterError, match="400"):
        clinic.router.request("GET", "/diagnosis?max_age_s=-1")


def test_kv110_names_one_engine_with_two_names(clinic: Clinic, replicas: list[dict[str, Any]]) -> None:
    with clinic.worker("one", **of(replicas[0])), clinic.worker("two", **of(replicas[0])):
        finding = clinic.find("KV110")
        assert finding.subject == "workers one and two" and "-X DELETE" in finding.fix
    assert "KV110" not in clinic.codes()


def test_kv111_names_a_worker_that_drains(clinic: Clinic, replicas: list[dict[str, Any]]) -> None:
    with clinic.worker("draining", **of(replicas[0])) as subject, clinic.worker("serving", **of(replicas[1])):
        clinic.router.wait_connected("draining")
        clinic.router.wait_connected("serving")
        clinic.router.request("PATCH", "/workers/draining", {"state": "draining"})
        finding = clinic.find("KV111", subject)
        assert finding.severity is Severity.NOTE and "because a client said so" in finding.evidence
        clinic.router.request("PATCH", "/workers/draining", {"state": "active"})
        clinic.wait_gone("KV111")


def test_kv112_names_a_worker_that_refuses_more_than_its_peers(clinic: Clinic) -> None:
    def ask(worker_id: str, number: int) -> None:
        body = {"model": "limits", "prompt": [1, 2, 3], "max_tokens": 1}
        headers = {"x-kvrouter-worker": worker_id, "x-session-id": f"chat-{number % 3}"}
        clinic.router.request("POST", "/v1/completions", body, headers)

    refusal = plain(b'{"error": {"message": "the prompt is too long"}}', "400 Bad Request")
    with ScriptedEngine(refusal) as short, ScriptedEngine(Answers(0)) as usual:
        registered = clinic.worker("usual", "limits", url=usual.url)
        with clinic.worker("short", "limits", url=short.url) as subject, registered:
            for number in range(REFUSED_MIN):
                if number == REFUSED_MIN - 1:
                    assert "KV112" not in clinic.codes()
                ask("usual", number)
                with pytest.raises(RouterError, match="400"):
                    ask("short", number)
            finding = clinic.find("KV112", subject)
            assert finding.severity is Severity.WARNING
            assert f"it refused {REFUSED_MIN} of its last {REFUSED_MIN} requests (mostly with 400)" in finding.evidence
            assert [other.code for other in clinic.report().findings if other.subject == subject] == ["KV201", "KV112"]
            # From here on, all refusals are of one client.
            for _ in range(2 * REFUSED_MIN):
                with pytest.raises(RouterError, match="400"):
                    ask("short", 0)
            finding = clinic.find("KV112", subject)
            assert finding.severity is Severity.NOTE and "from one client" in finding.evidence


def test_kv206_names_another_program_at_an_endpoint(clinic: Clinic, http: EngineHttp, engine: FakeEngine) -> None:
    wrong: dict[str, Any] = {"endpoint": f"tcp://127.0.0.1:{http.port}", "replay_endpoint": engine.replay_endpoint}
    with clinic.worker("http", url=http.url, **wrong) as subject:
        assert "does not speak ZMQ" in clinic.find("KV206", subject).evidence


def test_kv207_names_a_missing_replay_endpoint(clinic: Clinic, engine: FakeEngine) -> None:
    with clinic.worker("once", endpoint=engine.endpoint) as subject:
        clinic.find("KV207", subject)


def test_kv208_names_events_that_do_not_come_for_another_reason(clinic: Clinic, engine: FakeEngine) -> None:
    """Follow a server that greets as ZMQ does and never gets ready."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connections: list[socket.socket] = []

        def greet() -> None:
            while True:
                try:
                    connections.append(server.accept()[0])
                    connections[-1].sendall(GREETING)
                except OSError:
                    return

        thread = threading.Thread(target=greet)
        thread.start()
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        try:
            with clinic.worker("stuck", endpoint=endpoint, replay_endpoint=engine.replay_endpoint) as subject:
                assert "it is connecting" in clinic.find("KV208", subject).evidence
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in connections:
                connection.close()


def test_kv209_names_an_engine_that_clears_its_cache_all_the_time(clinic: Clinic, engine: FakeEngine) -> None:
    with clinic.worker(**engine.registration("clearing", "clearing")) as subject:
        clinic.router.wait_connected("clearing", engine.wait_subscribed)
        clinic.router.wait_seen("clearing", engine.publish(stored(prompt(1), 0, 4), WireCleared()))
        assert "KV209" not in clinic.codes(), "one reset is none too many"
        enough = threading.Event()

        def clear() -> None:
            while not enough.wait(0.02):
                engine.publish(WireCleared())

        clearing = threading.Thread(target=clear)
        clearing.start()
        try:
            finding = clinic.find("KV209", subject)
            reason = clinic.router.worker("clearing")["reason"]
        finally:
            enough.set()
            clearing.join()
        assert "AllBlocksCleared" in finding.evidence and "AllBlocksCleared" in reason


def test_kv301_names_hashes_of_an_unknown_seed(clinic: Clinic, engine: FakeEngine) -> None:
    with clinic.worker(**engine.registration("seeded", "seeded")) as subject:
        clinic.router.wait_connected("seeded", engine.wait_subscribed)
        engine.publish(stored(prompt(1), 0, 4, chain=[1, 2, 3, 4]))
        assert "PYTHONHASHSEED" in clinic.find("KV301", subject).fix


def test_kv302_names_a_scheme_that_nothing_verified(clinic: Clinic, engine: FakeEngine) -> None:
    with clinic.worker(**engine.registration("assumed", "assumed")) as subject:
        clinic.router.wait_connected("assumed", engine.wait_subscribed)
        engine.publish(stored(prompt(1), 1, 4))
        assert "(assumed)" in clinic.find("KV302", subject).evidence
        engine.publish(stored(prompt(1), 0, 1))
        clinic.wait_well()


def test_kv303_names_a_window_that_is_not_known(clinic: Clinic, engine: FakeEngine) -> None:
    with clinic.worker(**engine.registration("windowed", "windowed")) as subject:
        clinic.router.wait_connected("windowed", engine.wait_subscribed)
        engine.publish(stored(prompt(1), 0, 4, kind="sliding_window"))
        assert "without its window" in clinic.find("KV303", subject).evidence


def test_kv303_names_a_registered_block_size_and_that_of_the_events(clinic: Clinic, engine: FakeEngine) -> None:
    kinds = ("full_attention", "mamba")
    groups = [{"group_idx": number, "kind": kind, "block_size": 8 * BLOCK} for number, kind in enumerate(kinds)]
    tokens = prompt(1, 3)
    with clinic.worker(**engine.registration("sized", "sized", catalog={"groups": groups})) as subject:
        clinic.router.wait_connected("sized", engine.wait_subscribed)
        events = [stored(tokens, 0, 3, number, kind=kind) for number, kind in enumerate(kinds)]
        row = clinic.router.wait_seen("sized", engine.publish(*events))
        for text in (row["reason"], row["catalog"]["problem"], clinic.find("KV303", subject).evidence):
            assert str(BLOCK) in text and str(8 * BLOCK) in text
        assert "KV302" not in clinic.codes()


def test_kv304_names_a_hybrid_model_with_one_group(
    clinic: Clinic, engine: FakeEngine, http: EngineHttp, replicas: list[dict[str, Any]]
) -> None:
    for seed in range(2):
        compute(replicas[2 * seed], prompt(seed, 40))
    # The engine says that its layers have windows.
    with clinic.worker(**engine.registration("layers", "layers")) as subject:
        clinic.router.wait_connected("layers", engine.wait_subscribed)
        engine.publish(stored(prompt(1), 0, 12, window=64))
        finding = clinic.find("KV304", subject)
        assert finding.severity is Severity.ERROR and "a window of 64 tokens" in finding.evidence
    # Another worker of the model shows that it is hybrid.
    with clinic.worker("flat", **of(replicas[2])) as subject, clinic.worker("several", **of(replicas[0])):
        assert "worker several has several groups" in clinic.find("KV304", subject).evidence
    # The model's name alone makes a warning.
    http.pages["/v1/models"] = json.dumps({"data": [{"id": "named", "root": "google/gemma-3-27b-it"}]}).encode()
    stream = {"endpoint": replicas[2]["events"], "replay_endpoint": replicas[2]["replay"]}
    with clinic.worker("named", "named", url=http.url, **stream) as subject:
        finding = clinic.find("KV304", subject)
        assert finding.severity is Severity.WARNING and "google/gemma-3-27b-it" in finding.evidence


def test_kv305_names_engines_of_one_model_with_different_blocks(
    clinic: Clinic, engine: FakeEngine, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    other = FakeEngine(context)
    try:
        with (
            clinic.worker(**engine.registration("small", "sizes")),
            clinic.worker(**other.registration("large", "sizes")),
        ):
            for name, publisher, blocks in (("small", engine, 1), ("large", other, 2)):
                clinic.router.wait_connected(name, publisher.wait_subscribed)
                tokens = prompt(1)
                publisher.publish(
                    stored(tokens, 0, 1, block_size=blocks * BLOCK, token_ids=tokens[: blocks * BLOCK], chain=[7])
                )
            assert "(full_attention, 32, -, -)" in clinic.find("KV305", "model sizes").evidence
    finally:
        other.close()


def test_kv306_names_blocks_of_an_unknown_connector(clinic: Clinic, engine: FakeEngine) -> None:
    with clinic.worker(**engine.registration("tiered", "tiered")) as subject:
        clinic.router.wait_connected("tiered", engine.wait_subscribed)
        engine.publish(stored(prompt(1), 0, 4), stored(prompt(1), 0, 4, medium="CPU", kind=None))
        assert "connectors without a hit rule" in clinic.find("KV306", subject).evidence


def test_kv307_names_a_cpu_tier_that_refuses(clinic: Clinic, http: EngineHttp) -> None:
    http.metrics = b"vllm:kvrouter_offload_cpu_usage_perc 1.0\nvllm:kvrouter_offload_stores_refused_total 3.0\n"
    with clinic.worker("full", url=http.url) as subject:
        assert "100% of its slots" in clinic.find("KV307", subject).evidence
        # The counter of another process begins at zero.
        http.metrics = http.metrics.replace(b" 3.0", b" 0.0")
        http.start_s = 2_000.5
        clinic.wait_gone("KV307", subject)


class Answers:
    """The script of an engine that gives the same usage for each prompt.

    `cached` None leaves the cached tokens out, and `prompt_tokens` replaces the prompt's true length.
    """

    def __init__(self, cached: int | None, prompt_tokens: int | None = None) -> None:
        self._cached = cached
        self._prompt_tokens = prompt_tokens

    async def __call__(self, asked: Asked, wire: Wire) -> None:
        tokens = self._prompt_tokens or len(json.loads(asked.body)["prompt"])
        usage: dict[str, Any] = {"prompt_tokens": tokens, "completion_tokens": 1, "total_tokens": tokens + 1}
        if self._cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self._cached}
        body = {"id": "c", "object": "text_completion", "choices": [{"index": 0, "text": "a"}], "usage": usage}
        await plain(json.dumps(body).encode())(asked, wire)


@pytest.mark.parametrize(
    ("code", "answers", "requests"),
    [
        ("KV401", Answers(None), SILENT_MIN),
        ("KV402", Answers(0, prompt_tokens=7), COUNTED_MIN),
        ("KV403", Answers(0), ALONE_MIN),
    ],
)
def test_kv401_to_kv403_name_what_answers_say_of_predictions(
    clinic: Clinic, engine: FakeEngine, code: str, answers: Answers, requests: int
) -> None:
    with ScriptedEngine(answers) as scripted:
        registration = engine.registration(code.lower(), code, url=scripted.url)
        with clinic.worker(**registration) as subject:
            clinic.router.wait_connected(code.lower(), engine.wait_subscribed)
            clinic.router.wait_seen(code.lower(), engine.publish(stored(prompt(1), 0, 12)))
            for _ in range(requests):
                assert code not in clinic.codes()
                clinic.complete(code, prompt(1))
            clinic.find(code, subject)


def test_kv407_names_an_engine_that_ignores_salts(clinic: Clinic, engine: FakeEngine) -> None:
    with (
        ScriptedEngine(Answers(96)) as scripted,
        clinic.worker(**engine.registration("kv407", "KV407", url=scripted.url)) as subject,
    ):
        clinic.router.wait_connected("kv407", engine.wait_subscribed)
        clinic.router.wait_seen("kv407", engine.publish(stored(prompt(1), 0, 6)))
        for _ in range(ALONE_MIN):
            assert "KV407" not in clinic.codes()
            clinic.complete("KV407", prompt(1), cache_salt="tenant")
        assert "8 of the 8 had a cache_salt" in clinic.find("KV407", subject).evidence


def test_kv404_names_short_prompts(clinic: Clinic, replicas: list[dict[str, Any]]) -> None:
    with clinic.worker("short", **of(replicas[0])):
        compute(replicas[0], prompt(5, 40))
        shows(clinic, "short")
        rng = Random(1)
        for _ in range(COUNTED_PROMPTS):
            clinic.complete(MODEL, [rng.randrange(50_000) for _ in range(5)])
        finding = clinic.find("KV404", f"model {MODEL}")
        assert f"{COUNTED_PROMPTS} of {COUNTED_PROMPTS} prompts were shorter than 16 tokens" in finding.evidence


def test_kv405_names_engines_that_make_different_tokens(
    clinic: Clinic, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    def renders(first: int) -> Any:
        async def script(asked: Asked, wire: Wire) -> None:
            ids = [first, *range(20)]
            body: Any = [{"prompt_token_ids": ids, "token_ids": ids}]
            if "chat" in asked.target:
                body = body[0]
            await plain(json.dumps(body).encode())(asked, wire)

        return script

    with ScriptedEngine(renders(1)) as one, ScriptedEngine(renders(2)) as two:
        fields = {"model": "texts"}
        with clinic.worker("t0", url=one.url, **fields), clinic.worker("t1", url=two.url, **fields):
            clinic.router.request("POST", "/select", {"model": "texts", "prompt": "a text"})
            assert "make different tokens of one text" in clinic.find("KV405", "model texts").evidence


def test_kv408_names_vllms_rust_front_end_and_what_it_lacks(
    clinic: Clinic, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    rust = EngineFlags(rust_front_end=True)
    server = ReplicaServer(make_geometry("gemma3"), POOL_BLOCKS, context=context, model="rust", flags=rust)
    thread = ServerThread([server])
    thread.start()
    try:
        # Its address alone is registered: the front end names the model and the events.
        with clinic.worker("r0", url=server.endpoints["url"], model="rust"):
            clinic.router.request("POST", "/select", {"model": "rust", "prompt": "a text"})
            finding = clinic.find("KV408", "model rust")
            assert "vLLM's Rust front end 0.32.0" in finding.evidence and "/v1/completions/render" in finding.evidence
            assert "each request to /v1/responses" in finding.evidence and "each chat" not in finding.evidence
            assert "--tokenizer MODEL=FOLDER" in finding.fix
            assert "KV406" not in clinic.codes()
    finally:
        thread.stop()


def test_another_front_end_without_render_endpoints_is_no_finding(
    clinic: Clinic, replicas: list[dict[str, Any]]
) -> None:
    with clinic.worker("r1", **of(replicas[0])):
        clinic.router.request("POST", "/select", {"model": MODEL, "prompt": "a text"})
        clinic.router.wait_row("r1", lambda row: row["tokens"]["way"] == "tokenize", "verified")
        assert "KV408" not in clinic.codes()
