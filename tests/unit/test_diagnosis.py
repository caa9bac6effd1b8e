# SPDX-License-Identifier: Apache-2.0
"""Checks of the diagnosis: each finds its fault in a router's snapshot, and nothing in a healthy or young fleet."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvrouter.contract.diagnosis import Finding, Severity
from kvrouter.contract.worker_status import EngineCache
from kvrouter.events.patch.messages import PeerAddress
from kvrouter.router.app.diagnosis.cache_checks import SHOWN_BLOCKS, cache_findings
from kvrouter.router.app.diagnosis.clocks import CLOCK_S
from kvrouter.router.app.diagnosis.endpoint_probe import EndpointAnswer
from kvrouter.router.app.diagnosis.engine_checks import engine_findings
from kvrouter.router.app.diagnosis.event_checks import UNHEARD_PROMPTS, event_findings
from kvrouter.router.app.diagnosis.prediction_checks import COUNTED_PROMPTS, prediction_findings
from kvrouter.router.app.diagnosis.router_checks import router_findings
from kvrouter.router.app.diagnosis.snapshot import (
    PromptCount,
    RouterStatement,
    Snapshot,
    StoreFacts,
    WorkerFacts,
)
from kvrouter.router.app.diagnosis.store_checks import store_findings
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.follow.streams.offload_watch import NAMED_S, OffloadSigns, OffloadWatch, parse_offload
from kvrouter.router.index.store.server_settings import ServerSettings
from kvrouter.router.model.config.agreement import AGREED, AGREED_LISTS, AGREED_SECRETS, agreed_settings
from kvrouter.router.model.config.settings import FIELDS, Config
from kvrouter.router.model.kvcache.catalog import Catalog, Group, build_catalog
from kvrouter.router.model.kvcache.scheme_verification import SchemeState
from kvrouter.router.model.workers.engine_answers import Stream
from kvrouter.router.model.workers.engine_cache import CACHING_OFF
from kvrouter.router.model.workers.registration import CatalogSpec, Registration
from kvrouter.router.model.workers.stream_state import StreamState
from kvrouter.router.model.workers.unregistered_worker import UnregisteredWorker, Waiting
from kvrouter.router.observe.findings.explanations import EXPLANATIONS
from kvrouter.router.observe.findings.finding import CODES, PAGE
from kvrouter.router.observe.quality.prediction_judge import Doubt, DoubtKind
from kvrouter.router.route.load.prompt_lengths import PromptLengths
from kvrouter.router.route.tokens.engine.verified_engines import UnreadResponses
from kvrouter.router.route.tokens.unknown_prompts import MissingTokens
from kvrouter.router.serve.proxy.refused_requests import Difference

ROOT = Path(__file__).resolve().parents[2]
EVENTS, REPLAY, URL = "tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558", "http://10.0.0.1:8000"
NOW_S = 1_700_000_000.0
# The page lists the codes and says how to report a wrong prediction; `kvrouter doctor --explain` explains the codes.
PAGE_WORDS_MAX = 1_150
EXPLANATION_WORDS_MAX = 120
# The command itself finds these (test_cli_doctor.py).
CLIENT_CODES = {"KV001", "KV002", "KV003", "KV004"}

CHECKS: tuple[Callable[[Snapshot], Any], ...] = (
    router_findings,
    store_findings,
    engine_findings,
    event_findings,
    cache_findings,
    prediction_findings,
)
HYBRID = (Group(0, "full_attention", 16), Group(1, "sliding_window", 16, 64))
FULL = (Group(0, "full_attention", 16),)
LENDER = PeerAddress("10.0.0.1", 5710, exchange="a", resets=1)
NOTHING_KNOWN = build_catalog((), "learned", CatalogSpec())


def catalog(*groups: Group) -> Catalog:
    return build_catalog(groups, "learned", CatalogSpec())


def registration(worker_id: str = "w0", **more: Any) -> Registration:
    url = URL if worker_id == "w0" else f"http://{worker_id}:8000"
    fields: dict[str, Any] = {"events": EVENTS, "replay": REPLAY, "url": url} | more
    key = fields.pop("worker", WorkerKey(fields.pop("model", "m"), worker_id))
    return Registration(key, **fields)


def worker(worker_id: str = "w0", given: dict[str, Any] | None = None, **more: Any) -> WorkerFacts:
    """Return the facts of a healthy worker; `given` changes its registration, and `more` its facts."""
    well: dict[str, Any] = {
        "registration": registration(worker_id, **(given or {})),
        "state": StreamState.LIVE,
        "catalog": catalog(*HYBRID),
        "scheme": SchemeState.VERIFIED,
        "hash_label": "sha256 (verified)",
        "is_heard": True,
        "blocks": 100,
    }
    return WorkerFacts(**(well | more))


WELL_SERVER = ServerSettings(
    policy="noeviction", used_bytes=10, limit_bytes=100, appends=True, save="", time_s=NOW_S + CLOCK_S
)
PUBLISHES, REPLIES = EndpointAnswer(is_zmq=True, socket="XPUB"), EndpointAnswer(is_zmq=True, socket="ROUTER")

UNREGISTERED = UnregisteredWorker(
    Registration(WorkerKey("m", "w9"), source="file"), Waiting("its model is not known", "start the engine")
)


def snapshot(*workers: WorkerFacts, server: dict[str, Any] | None = None, **more: Any) -> Snapshot:
    """Return a snapshot of a healthy fleet; `server` changes the facts of its Redis server, and `more` the snapshot."""
    well: dict[str, Any] = {
        "token": "me",
        "time_s": NOW_S,
        "workers": workers or (worker(),),
        "endpoints": {EVENTS: PUBLISHES, REPLAY: REPLIES, URL: EndpointAnswer()},
        "engine_clocks": {URL: -CLOCK_S},
        "store": StoreFacts(servers={"h:6379": msgspec.structs.replace(WELL_SERVER, **(server or {}))}),
        "routers": {token: RouterStatement("1.0", {"policy": "kv"}) for token in ("me", "you")},
    }
    return Snapshot(**(well | more))


def findings(looked_at: Snapshot) -> list[Finding]:
    return [finding for check in CHECKS for finding in check(looked_at)]


def codes(looked_at: Snapshot) -> list[str]:
    return [finding.code for finding in findings(looked_at)]


def doubt(kind: DoubtKind) -> Snapshot:
    return snapshot(worker(doubt=Doubt(kind, "a sentence")))


FAULTS: dict[str, Snapshot] = {
    "KV005": snapshot(workers=()),
    "KV006": snapshot(is_open="the router listens on 0.0.0.0 without an API key"),
    "KV007": snapshot(uncompiled="some modules are not compiled"),
    "KV008": snapshot(task_problems=["task tend does not run"]),
    "KV009": snapshot(unready="all workers drain"),
    "KV010": snapshot(unused_files=["tls_key is another's; the former is used"]),
    "KV011": snapshot(expiry_caution="the certificate expires in 3 days"),
    "KV012": snapshot(unapplied=["k.yaml has other values than at the start, of port: restart the router"]),
    "KV101": snapshot(worker(state=StreamState.DOWN, reason="refused"), endpoints={EVENTS: EndpointAnswer("refused")}),
    "KV102": snapshot(worker(unserved="its engine serves n: requests for m get 404")),
    "KV103": snapshot(worker(state=StreamState.DOWN, refusal="10.0.0.1 is not in allow_hosts")),
    "KV104": snapshot(unregistered=[UNREGISTERED]),
    "KV105": snapshot(worker(breaker="3 requests in a row failed")),
    "KV106": snapshot(worker(disk="its offload disk is left alone")),
    "KV107": snapshot(engine_clocks={URL: CLOCK_S + 1}),
    "KV108": snapshot(left_out={WorkerKey("m", "w9"): "it has 1 workers, as many as it follows"}),
    "KV109": snapshot(worker(refused_key="its /v1/models answers 401")),
    "KV110": snapshot(worker(), worker("w1", {"url": URL + "/"})),
    "KV111": snapshot(worker(given={"draining": True}, drains_s=61.0)),
    "KV113": snapshot(unserved_aliases={"short": "gemma-12b"}),
    "KV112": snapshot(worker(refuses=Difference("it refused 40 of its last 128 requests", is_spread=True))),
    "KV201": snapshot(worker(given={"events": None, "replay": None}, is_silent=True, is_heard=False)),
    "KV202": snapshot(
        worker(is_heard=False, blocks=0, catalog=NOTHING_KNOWN, prompts=PromptCount(5, 0, UNHEARD_PROMPTS))
    ),
    "KV203": snapshot(worker(state=StreamState.MISMATCHED, reason="it is that of w1 too")),
    "KV204": snapshot(worker(state=StreamState.CONNECTING), endpoints={EVENTS: REPLIES, REPLAY: PUBLISHES}),
    "KV205": snapshot(endpoints={EVENTS: PUBLISHES, REPLAY: EndpointAnswer("Connection refused")}),
    "KV206": snapshot(endpoints={EVENTS: EndpointAnswer(), REPLAY: REPLIES}),
    "KV207": snapshot(worker(given={"replay": None})),
    "KV208": snapshot(worker(state=StreamState.RESYNCING, reason="batches 3 to 4 are missing")),
    "KV209": snapshot(worker(clears="its engine announced AllBlocksCleared 50 times a second")),
    "KV301": snapshot(worker(state=StreamState.UNHASHABLE, scheme=SchemeState.UNEXPLAINED)),
    "KV302": snapshot(worker(scheme=SchemeState.ASSUMED)),
    "KV303": snapshot(worker(catalog=catalog(Group(1, "sliding_window", 16)))),
    "KV304": snapshot(worker(catalog=catalog(Group(0, "full_attention", 16, 64)))),
    "KV305": snapshot(worker(), worker("w1", catalog=catalog(HYBRID[0], Group(1, "sliding_window", 16, 128)))),
    "KV306": snapshot(worker(withheld="blocks on CPU earn no credit")),
    "KV307": snapshot(worker(cpu_tier="its CPU tier is full")),
    "KV308": snapshot(worker(refused="3 of its blocks found no room")),
    "KV309": snapshot(worker(peer=LENDER), worker("w1", peer=msgspec.structs.replace(LENDER, exchange="b"))),
    "KV401": doubt(DoubtKind.SILENT),
    "KV402": doubt(DoubtKind.TOKENIZER),
    "KV403": doubt(DoubtKind.UNTRUE),
    "KV404": snapshot(worker(prompts=PromptCount(COUNTED_PROMPTS, COUNTED_PROMPTS // 2 + 1))),
    "KV405": snapshot(tokens=[("m", URL, "engines of the model make different tokens of one text")]),
    "KV406": snapshot(missing_tokens=[MissingTokens("m", 9, 9, "unauthorized", "it answers 401")]),
    "KV407": doubt(DoubtKind.UNFORESEEN),
    "KV409": snapshot(unread_responses=[UnreadResponses("m", "each request to /v1/responses is placed by load", True)]),
    "KV408": snapshot(front_ends=[("m", URL, "vLLM's Rust front end 0.33.0 has no render endpoints")]),
    "KV410": snapshot(renderers=[("m", URL, "it is not used until it is verified: no answers within 5 s")]),
    "KV501": snapshot(store=StoreFacts(problem="Redis has not answered for 3 s")),
    "KV502": snapshot(server={"policy": "allkeys-lru"}),
    "KV503": snapshot(server={"appends": False, "save": ""}),
    "KV504": snapshot(server={"used_bytes": 91}),
    "KV505": snapshot(server={"refused": ("TIME",), "time_s": None}),
    "KV506": snapshot(store=StoreFacts(unreadable=("Redis holds what no router writes",))),
    "KV507": snapshot(store=StoreFacts(schemas=("Redis also holds schema 3",))),
    "KV508": snapshot(store=StoreFacts(lost="no worker is registered, although some were")),
    "KV601": snapshot(routers={"me": RouterStatement("1.0", {}), "you": RouterStatement("1.1", {})}),
    "KV602": snapshot(
        routers={"me": RouterStatement("1.0", {"policy": "kv"}), "you": RouterStatement("1.0", {"policy": "random"})}
    ),
    "KV603": snapshot(server={"time_s": NOW_S - CLOCK_S - 1}),
    "KV604": snapshot(load_problems=["the load of other routers is not known"]),
    "KV606": snapshot(contested=[("file", ("w0", 0), "static registers it, too")]),
    "KV605": snapshot(source_problems=[("file", "source file is down")]),
}


def test_every_code_has_a_fault_here() -> None:
    assert set(FAULTS) | CLIENT_CODES == set(CODES)


@pytest.mark.parametrize("code", FAULTS)
def test_a_fault_is_found_by_its_code_alone(code: str) -> None:
    (finding,) = findings(FAULTS[code])
    assert finding.code == code
    assert finding.severity is CODES[code][0]
    assert finding.subject and finding.evidence and finding.fix
    assert finding.page == f"{PAGE}#{code.lower()}"


@pytest.mark.parametrize("code", FAULTS)
def test_a_finding_names_its_workers_and_its_model_in_fields_of_their_own(code: str) -> None:
    """Programs read these fields; the subject is a text for people."""
    (finding,) = findings(FAULTS[code])
    kind = finding.subject.partition(" ")[0]
    named = re.findall(r"\bw\d\b", finding.subject)
    # Only these findings about a model are about two of its workers, which differ.
    assert finding.workers == (
        ["w0", "w1"] if code in ("KV305", "KV309") else named if kind.startswith("worker") else []
    )
    # Sources do not say which model's worker they contest.
    has_model = code != "KV606" and (kind.startswith("worker") or kind == "model")
    assert (finding.model in ("m", "gemma-3-27b")) is has_model and (has_model or finding.model is None)


def test_a_name_that_looks_like_two_and_a_rank_are_kept_whole() -> None:
    key = WorkerKey("m", "a and b", 1)
    (finding,) = findings(snapshot(worker(given={"worker": key}, refusal="it may not")))
    assert (finding.workers, finding.model) == (["a and b@1"], "m")


def test_a_healthy_fleet_has_no_finding() -> None:
    assert findings(snapshot(worker(), worker("w1"))) == []


@pytest.mark.parametrize(
    "young",
    [
        worker(is_heard=False, blocks=0, catalog=NOTHING_KNOWN, scheme=SchemeState.ASSUMED),
        worker(is_heard=False, blocks=0, catalog=NOTHING_KNOWN, prompts=PromptCount(9, 0, UNHEARD_PROMPTS - 1)),
        worker(prompts=PromptCount(9, 0, 9)),
        worker(state=StreamState.CATCHING_UP),
        # A model with full attention has only this group, and a hybrid model may have shown only this one so far.
        worker(catalog=catalog(*FULL)),
        worker(given={"model": "gemma-3-27b"}, catalog=catalog(*FULL), blocks=SHOWN_BLOCKS - 1),
        worker(prompts=PromptCount(COUNTED_PROMPTS - 1, COUNTED_PROMPTS - 1)),
        worker(prompts=PromptCount(COUNTED_PROMPTS, COUNTED_PROMPTS // 2)),
        # Its patch has snapshots, so that it needs no replay endpoint.
        worker(given={"replay": None}, is_patched=True),
    ],
)
def test_a_young_or_plain_worker_has_no_finding(young: WorkerFacts) -> None:
    assert codes(snapshot(young)) == []


def test_an_engine_that_says_that_it_reuses_nothing_is_named_before_any_prompt() -> None:
    off = EngineCache(prefix_caching=False)
    (finding,) = findings(snapshot(worker(cache=off, is_heard=False, blocks=0, catalog=NOTHING_KNOWN)))
    assert finding.code == "KV202" and finding.evidence == CACHING_OFF
    assert "--enable-prefix-caching" in finding.fix
    silent = worker(given={"events": None, "replay": None}, is_silent=True, is_heard=False, cache=off)
    (finding,) = findings(snapshot(silent))
    assert finding.code == "KV201" and CACHING_OFF in finding.evidence
    assert "--enable-prefix-caching" in finding.fix


def test_workers_that_are_down_explain_why_no_request_is_placed() -> None:
    down = worker(state=StreamState.DOWN, reason="refused")
    assert codes(snapshot(down, unready="all are down")) == ["KV101"]
    assert codes(snapshot(worker(breaker="5 failures"), unready="none takes it")) == ["KV105"]
    assert codes(snapshot(workers=(), unready="none is registered")) == ["KV005"]


def test_an_endpoint_that_was_not_looked_at_or_says_nothing_of_itself_is_no_fault() -> None:
    assert codes(snapshot(endpoints={})) == []
    encrypted = EndpointAnswer(is_zmq=True)
    assert codes(snapshot(endpoints={EVENTS: encrypted, REPLAY: encrypted})) == []


def test_a_socket_of_the_wrong_kind_is_named() -> None:
    (finding,) = findings(snapshot(endpoints={EVENTS: PUBLISHES, REPLAY: PUBLISHES}))
    assert finding.code == "KV206"
    assert "replay endpoint tcp://10.0.0.1:5558: a XPUB socket" in finding.evidence


def test_closed_ports_that_the_engine_names_otherwise_are_one_finding_with_the_right_ones() -> None:
    closed = {EVENTS: EndpointAnswer("Connection refused"), REPLAY: EndpointAnswer("Connection refused")}
    elsewhere = Stream("tcp://10.0.0.1:5600", "tcp://10.0.0.1:5601")
    facts = worker(state=StreamState.CONNECTING, published=[elsewhere])
    (finding,) = findings(snapshot(facts, endpoints=closed))
    assert finding.code == "KV205" and "/kv_event_sources" in finding.evidence
    assert finding.fix == "register events=tcp://10.0.0.1:5600,replay=tcp://10.0.0.1:5601"
    # One of them is another program's, and no replay endpoint was registered: one change corrects both.
    wrong = {EVENTS: EndpointAnswer(is_zmq=False)}
    facts = worker(given={"replay": None}, state=StreamState.CONNECTING, published=[elsewhere])
    (finding,) = findings(snapshot(facts, endpoints=wrong))
    assert finding.code == "KV206"
    assert finding.fix == "register events=tcp://10.0.0.1:5600,replay=tcp://10.0.0.1:5601"
    # The engine names these very ports, so something on the way to them must have closed them.
    same = worker(state=StreamState.CONNECTING, published=[Stream(EVENTS, REPLAY)])
    assert codes(snapshot(same, endpoints=closed)) == ["KV205", "KV205"]


def test_the_finding_of_a_worker_without_events_names_what_it_lacks_and_no_more() -> None:
    def fix(**more: Any) -> str:
        silent: dict[str, Any] = {"events": None, "replay": None} | more.pop("given", {})
        (finding,) = findings(snapshot(worker(given=silent, is_silent=True, is_heard=False, **more)))
        assert finding.code == "KV201"
        return finding.fix

    assert "register events=" in fix(), "the engine does not say where its events are"
    named = fix(names_streams=True, given={"source": "static"})
    assert "--kv-events-config" in named and "register" not in named
    assert fix(names_streams=True).endswith("then register it again")
    assert fix(published=[Stream(EVENTS)]) == f"register events={EVENTS}: its engine publishes there"


def test_a_worker_without_events_shows_the_statement_of_its_engine() -> None:
    fields = {"events": None, "replay": None, "note": "its engine publishes no KV events"}
    (finding,) = findings(snapshot(worker(given=fields, is_silent=True, is_heard=False, reason="registered without")))
    assert finding.evidence == "its engine publishes no KV events"


def test_ranks_and_models_of_one_engine_are_no_twins() -> None:
    rank = {"url": URL, "worker": WorkerKey("m", "w1", 1)}
    ranks = [worker("w0"), worker("w1", rank), worker("w2", {"url": URL, "model": "other"})]
    assert "KV110" not in codes(snapshot(*ranks))
    (finding,) = findings(FAULTS["KV110"])
    assert finding.subject == "workers w0 and w1"


def test_the_fix_removes_the_twin_that_a_client_registered() -> None:
    twins = (worker(given={"source": "register"}), worker("w1", {"url": URL, "source": "static"}))
    (finding,) = findings(snapshot(*twins))
    assert finding.code == "KV110" and "-X DELETE ROUTER/workers/w0" in finding.fix


def test_a_worker_that_a_source_keeps_is_changed_there() -> None:
    for source, ways in (
        ("register", ("-X PATCH ROUTER/workers/w0", "-X DELETE ROUTER/workers/w0")),
        ("static", ("its url in --worker or KVROUTER_WORKERS", "take it out of --worker or KVROUTER_WORKERS")),
    ):
        down = worker(given={"source": source}, state=StreamState.DOWN, reason="refused")
        (finding,) = [finding for finding in findings(snapshot(down)) if finding.code == "KV101"]
        assert all(way in finding.fix for way in ways), finding.fix
        assert ("ROUTER/" in finding.fix) == (source == "register")


def test_an_unreachable_store_is_one_finding() -> None:
    load_problems = ["the load of other routers is not known"]
    # A refused commit may show before the silence of the store does.
    for store in (
        StoreFacts(problem="Redis has not answered for 3 s", unwritten=("Redis takes no commits",)),
        StoreFacts(unwritten=("Redis takes no commits",)),
    ):
        assert codes(snapshot(store=store, load_problems=load_problems)) == ["KV501"]


def test_a_single_router_misses_no_load() -> None:
    alone = {"me": RouterStatement("1.0", {})}
    assert not codes(snapshot(routers=alone, load_problems=["the load of other routers is not known"]))


def test_closed_ports_explain_why_events_are_not_followed() -> None:
    closed = snapshot(worker(state=StreamState.SUSPECT), endpoints={EVENTS: EndpointAnswer("Connection refused")})
    assert codes(closed) == ["KV205"]


def test_a_mismatched_worker_has_no_other_finding() -> None:
    assert codes(snapshot(worker(state=StreamState.MISMATCHED, scheme=SchemeState.ASSUMED))) == ["KV203"]


def test_a_hybrid_model_is_known_by_its_siblings_and_by_its_name() -> None:
    single, several = worker(catalog=catalog(*FULL)), worker("w1")
    (finding,) = findings(snapshot(single, several))
    assert (finding.code, finding.severity) == ("KV304", Severity.ERROR)
    assert "worker w1 has several groups" in finding.evidence
    for named in (
        worker(given={"model": "google/gemma-3-27b-it"}, catalog=catalog(*FULL)),
        worker(engine_model="/models/Qwen3_Next-80B", catalog=catalog(*FULL)),
    ):
        (finding,) = findings(snapshot(named))
        assert (finding.code, finding.severity) == ("KV304", Severity.WARNING)
        assert "by the name alone" in finding.evidence


def test_only_models_of_one_name_are_compared() -> None:
    other_catalog = catalog(Group(0, "full_attention", 32))
    assert codes(snapshot(worker(), worker("w1", given={"model": "n"}, catalog=other_catalog))) == []
    assert codes(snapshot(worker(), worker("w1", catalog=other_catalog, blocks=0))) == ["KV305"]
    # The operator needs one finding, not one for each worker.
    coarse = catalog(Group(0, "full_attention", 32), Group(1, "sliding_window", 32, 64))
    assert codes(snapshot(worker(), worker("w1", catalog=coarse), worker("w2", catalog=coarse))) == ["KV305"]


def test_the_machines_memory_is_the_limit_of_a_redis_without_one() -> None:
    (finding,) = findings(snapshot(server={"used_bytes": 99, "has_maxmemory": False}))
    assert finding.code == "KV504" and "it has no maxmemory" in finding.evidence


def test_an_append_only_file_is_known_without_the_right_to_ask_for_settings() -> None:
    hidden: dict[str, Any] = {"refused": ("CONFIG",), "save": None}
    assert codes(snapshot(server=hidden)) == []
    assert codes(snapshot(server=hidden | {"appends": False})) == ["KV505"]


def test_a_disk_that_takes_no_writes_is_no_persistence() -> None:
    assert codes(snapshot(server={"failing": "aof_last_write_status"})) == ["KV503"]


def test_a_setting_that_a_router_of_another_version_lacks_is_no_difference() -> None:
    routers = {
        "me": RouterStatement("1.0", {"policy": "kv", "new": "1"}),
        "you": RouterStatement("1.0", {"policy": "kv"}),
    }
    assert codes(snapshot(routers=routers)) == []


def test_long_heartbeats_are_shortened_in_findings() -> None:
    forged = {
        f"r{number}": RouterStatement(str(number), {"policy": "x" * 10_000, "other": str(number)})
        for number in range(99)
    }
    version, setting = findings(snapshot(routers={"me": RouterStatement("1.0", {"policy": "kv"})} | forged))
    assert (version.code, setting.code) == ("KV601", "KV602")
    assert len(version.evidence) < 300 and len(setting.evidence) < 300
    assert version.evidence.startswith("this router has 1.0; router r0 has 0; ")
    assert version.evidence.endswith("; and others")
    assert setting.evidence.startswith("this router has kv; router r0 (and 98 more) has xxx")


def test_workers_that_lend_are_compared_within_their_model_and_named_once() -> None:
    def judged(*peers: PeerAddress | None, models: str = "mmmm") -> list[Finding]:
        lenders = [
            worker(f"w{number}", {"model": model}, peer=peer)
            for number, (peer, model) in enumerate(zip(peers, models, strict=False))
        ]
        return [finding for finding in findings(snapshot(*lenders)) if finding.code == "KV309"]

    other = msgspec.structs.replace(LENDER, exchange="b")
    moved = msgspec.structs.replace(LENDER, host="10.0.0.2", port=5711, token_bytes=9)
    assert judged(LENDER, moved, None) == [], "another address is no difference"
    assert judged(LENDER, other, models="mn") == [], "engines of two models never exchange blocks"
    (finding,) = judged(LENDER, moved, other, other)
    assert (finding.workers, finding.model) == (["w0", "w2"], "m")
    assert "model, layout or hash seed" in finding.evidence
    (finding,) = judged(msgspec.structs.replace(LENDER, resets=0), LENDER)
    assert "reset once, those of the other 0 times" in finding.evidence


def test_names_from_elsewhere_cannot_break_out_of_a_command() -> None:
    evil = worker("w0; rm -rf /", given={"url": "http://h:1/$(id)"}, state=StreamState.DOWN, reason="refused")
    (finding,) = findings(snapshot(evil))
    assert "'w0; rm -rf /'" in finding.fix and "'http://h:1/$(id)'" in finding.fix


def test_the_page_lists_every_code_with_its_problem_and_no_other() -> None:
    rows = re.findall(r'^\| <a id="(.+?)"></a>(.+?) \| (.+) \|$', (ROOT / PAGE).read_text(), re.MULTILINE)
    assert rows == [(code.lower(), code, problem) for code, (_, problem) in sorted(CODES.items())]


def test_the_page_does_not_explain_codes_itself() -> None:
    assert len((ROOT / PAGE).read_text().split()) <= PAGE_WORDS_MAX


def test_every_code_is_explained_once_in_sentences() -> None:
    assert list(EXPLANATIONS) == sorted(CODES)
    for code, explanation in EXPLANATIONS.items():
        for text in (explanation.cause, explanation.remedy):
            assert text.endswith((".", ")")) and len(text.split()) <= EXPLANATION_WORDS_MAX, code
            assert all((ROOT / name).exists() for name in re.findall(r"docs/[\w/-]+\.md", text)), code


def test_the_explanation_of_differing_settings_names_all_that_are_compared() -> None:
    named = set(re.findall(r"`(\w+)`", EXPLANATIONS["KV602"].cause))
    assert named == {*AGREED, *AGREED_LISTS, *AGREED_SECRETS, "none_hash_seed"}


def test_settings_that_must_agree_exist_and_no_secret_is_shown() -> None:
    names = {*AGREED, *AGREED_LISTS, *AGREED_SECRETS, "none_hash_seed"}
    assert names <= set(FIELDS)
    config = Config(api_key="hidden-key", worker_api_key="hidden-too", none_hash_seed="hidden-seed")
    settings = agreed_settings(config)
    assert set(settings) == names
    assert not any("hidden" in value for value in settings.values())
    assert settings["none_hash_seed"] != agreed_settings(Config(none_hash_seed="another"))["none_hash_seed"]
    assert settings["api_key"] == "set" and agreed_settings(Config())["api_key"] == "none"


def test_prompt_lengths_are_known_for_certain_or_not_counted() -> None:
    lengths, key = PromptLengths(), WorkerKey("m", "w0")
    for tokens in (1, 15, 16, 31, 32, 33, 64, 10**12):
        lengths.add(key, tokens)
    assert lengths.total(key) == 8
    assert [lengths.below(key, unit) for unit in (1, 16, 24, 32, 64)] == [0, 2, 2, 4, 6]
    assert [lengths.above(key, unit) for unit in (15, 16, 31, 32)] == [6, 4, 4, 2]
    lengths.keep([])
    assert lengths.total(key) == lengths.above(key, 1) == 0


PAGE_OF_METRICS = b"""\
vllm:kvrouter_offload_cpu_usage_perc{engine="0"} 1.0
vllm:kvrouter_offload_stores_refused_total{engine="0"} %d
vllm:kvrouter_offload_stores_refused_total{engine="1"} 9e99
"""


def test_a_cpu_tier_is_named_when_it_refuses_and_for_a_while_after() -> None:
    watch = OffloadWatch()
    for now, refused, is_named in (
        (0.0, 0, False),
        (1.0, 2, True),
        (NAMED_S, 2, True),
        (NAMED_S + 1.0, 2, False),
        # Another life of the engine counts from zero.
        (NAMED_S + 2.0, 1, True),
    ):
        tier = parse_offload(PAGE_OF_METRICS % refused, 0)
        assert tier == OffloadSigns(usage=1.0, refused=refused)
        watch.observe(tier, now)
        assert bool(watch.cpu_tier_problem(now)) is is_named
    assert "100% of its slots" in watch.cpu_tier_problem(NAMED_S + 2.0)
    assert parse_offload(PAGE_OF_METRICS % 1, 1) == OffloadSigns(refused=10**12)
    assert parse_offload(b"vllm:num_requests_running 1\n", 0) is None
    assert parse_offload(b"vllm:kvrouter_offload_cpu_usage_perc 1-e\n", 0) is None


def test_an_alias_is_judged_once_every_engine_that_may_serve_it_is_known() -> None:
    aliases = {"short": "gemma-12b"}

    def judged(*workers: WorkerFacts, model: str | None = None) -> list[str]:
        waiting = [] if model is None else [Registration(WorkerKey(model, "w9"), source="file")]
        unregistered = [UnregisteredWorker(entry, Waiting("no engine answers there", "start it")) for entry in waiting]
        looked_at = snapshot(*workers, unserved_aliases=aliases, unregistered=unregistered)
        return [code for code in codes(looked_at) if code == "KV113"]

    assert judged() == ["KV113"]
    assert judged(worker(), worker("w1", is_starting=True)) == [], "its adapters are not known yet"
    assert judged(model="") == [], "only its engine knows its model"
    assert judged(model="gemma-12b") == [], "its worker is about to come"
    assert judged(model="llama") == ["KV113"]
    empty = snapshot(workers=(), unserved_aliases=aliases)
    assert codes(empty) == ["KV005"], "a fleet without workers has one finding"


def test_the_finding_of_an_alias_names_the_models_that_there_are() -> None:
    workers = [worker(f"w{number}", {"model": f"m{number:02}"}) for number in range(22)]
    looked_at = snapshot(*workers, unserved_aliases={"my name": "gemma-12b", "other": "x"})
    first, second = (finding for finding in findings(looked_at) if finding.code == "KV113")
    assert (first.subject, second.subject) == ("alias my name", "alias other")
    for part in ("stands for gemma-12b", "m00, m01", "m19 and 2 more"):
        assert part in first.evidence
    assert "--model-alias 'my name=MODEL'" in first.fix and "serves gemma-12b" in first.fix
