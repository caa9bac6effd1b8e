# SPDX-License-Identifier: Apache-2.0
"""The blocks that a worker may fetch from another one, as `/query`, `/select` and `/decisions` show them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvrouter.contract.choices import SelectReply
from kvrouter.events.patch.messages import PeerAddress
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.pull import Pull
from kvrouter.router.index.matching.question import Hit
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.route.placement.decider import Decider
from kvrouter.router.route.placement.placement_request import PlacementRequest
from kvrouter.router.route.placement.planned_pull import PlannedPull
from kvrouter.router.serve.api.http.http_api import HttpApi
from tests.contract.api_support import TinyCore, call, hit

ASKED = {"model": "m", "token_ids": [1] * 1_000}
PULL = PlannedPull(WorkerKey("m", "w1", 2), "10.0.0.7", 5710, tokens=960, fetched_tokens=768, timeout_s=0.25)
SHOWN = {"worker_id": "w1", "dp_rank": 2, "tokens": 960, "fetched_tokens": 768, "timeout_s": 0.25}
PEER = {"worker_id": "w1", "dp_rank": 2, "tokens": 960}


def fetching(own: Hit, *pulls: tuple[str, int, int]) -> Hit:
    """Return a hit with sources; each is the source's id, its rank and the tokens."""
    return msgspec.structs.replace(
        own, pulls=tuple(Pull(WorkerKey("m", name, rank), tokens) for name, rank, tokens in pulls)
    )


@pytest.fixture
def core() -> TinyCore:
    return TinyCore([fetching(hit("w0", 64, 128, 192), ("w1", 2, 960), ("w9", 0, 200)), hit("w1", 0, 0, 0, 2)])


@pytest.fixture
def pulls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each choice have a pull, whatever it costs."""
    decide = Decider.decide

    def with_pull(*arguments: Any, **options: Any) -> Any:
        choice, prompt = decide(*arguments, **options)
        return msgspec.structs.replace(choice, pull=PULL), prompt

    monkeypatch.setattr(Decider, "decide", with_pull)


@pytest.mark.parametrize("explain", [False, True])
@pytest.mark.parametrize("path", ["/query", "/query_by_hash"])
def test_a_query_shows_the_best_source_of_each_worker_that_has_one(app: HttpApi, path: str, explain: bool) -> None:
    prompt = ASKED if path == "/query" else {"model": "m", "block_hashes": [1, 2]}
    reply = call(app, "POST", path, prompt | {"explain": explain}).json()
    own, lender = reply["instances"]["w0"], reply["instances"]["w1"]
    assert own["peer"] == PEER and "peer" not in lender
    assert (own["longest_matched"], own["disk"], own["dp"]) == (192, 192, {"0": 192})
    assert reply["scores"] == {"w0": {"0": 192}, "w1": {"2": 0}}


@pytest.mark.parametrize(
    ("first", "second", "shown"),
    [
        # The best source over all ranks, also if it is not the best rank's.
        ([("w1", 0, 400)], [("w2", 0, 500)], 500),
        ([("w1", 0, 500)], [("w2", 0, 400)], 500),
        ([], [("w2", 0, 400)], 400),
        # The other rank reuses as much without a source.
        ([("w1", 0, 300)], [], None),
        ([], [], None),
    ],
)
def test_a_worker_with_ranks_has_the_source_with_the_most_tokens_if_it_adds_some(
    core: TinyCore, app: HttpApi, first: Any, second: Any, shown: int | None
) -> None:
    core.hits_known = [
        fetching(hit("w0", 100, 100, 100), *first),
        fetching(hit("w0", 300, 300, 300, 1), *second),
    ]
    instance = call(app, "POST", "/query", ASKED).json()["instances"]["w0"]
    assert instance["longest_matched"] == 300 and instance.get("peer", {}).get("tokens") == shown


def test_candidates_show_their_sources_by_the_ids_that_they_registered_with(core: TinyCore, app: HttpApi) -> None:
    lender = WorkerKey("m", "17")
    core.hits_known = [fetching(hit("w0", 64, 128, 192), ("17", 0, 960)), hit("17", 0, 0, 0)]
    core.registered[lender] = Registration(lender, numbered=True)
    reply = call(app, "POST", "/select", ASKED | {"explain": True}).json()
    by_id = {candidate["worker_id"]: candidate for candidate in reply["candidates"]}
    assert by_id["w0"]["peer"] == {"worker_id": 17, "dp_rank": 0, "tokens": 960} and "peer" not in by_id[17]
    assert by_id["w0"]["overlap"]["longest_matched"] == 192
    kept = call(app, "GET", f"/decisions/{reply['selection_id']}").json()
    by_id = {candidate["worker_id"]: candidate for candidate in kept["candidates"]}
    assert by_id["w0"]["peer"] == {"worker_id": "17", "dp_rank": 0, "tokens": 960} and "peer" not in by_id["17"]


@pytest.mark.parametrize("path", ["/select", "/select_and_reserve"])
def test_a_choice_names_its_source_and_the_field_to_copy(pulls: None, app: HttpApi, path: str) -> None:
    reply = call(app, "POST", path, ASKED | {"selection_id": "mine"}).json()
    assert reply["pull"] == SHOWN
    assert reply["kv_transfer_params"] == {
        "remote_kv_source": {
            "kv_request_id": "mine",
            "remote_host": "10.0.0.7",
            "remote_port": 5710,
            "timeout_s": 0.25,
        }
    }
    # The hit and the tokens to compute are those without the source, which may have evicted the blocks.
    assert (reply["overlap"]["longest_matched"], reply["effective_prefill_tokens"]) == (192, 808)
    typed = msgspec.convert(reply, SelectReply)
    assert typed.pull is not None and typed.pull.fetched_tokens == 768


def test_a_choice_without_a_source_has_none_of_the_fields(core: TinyCore, app: HttpApi) -> None:
    core.hits_known = [hit("w0", 64, 128, 192), hit("w1", 0, 0, 0)]
    reply = call(app, "POST", "/select", ASKED | {"explain": True}).json()
    assert not {"pull", "kv_transfer_params"} & set(reply)
    assert not any("peer" in candidate for candidate in reply["candidates"])
    decision = call(app, "GET", f"/decisions/{reply['selection_id']}").json()
    assert "pull" not in decision


def test_a_decision_keeps_the_source_also_in_lists(pulls: None, app: HttpApi) -> None:
    call(app, "POST", "/select", ASKED | {"selection_id": "mine"})
    assert call(app, "GET", "/decisions/mine").json()["pull"] == SHOWN
    assert [entry["pull"] for entry in call(app, "GET", "/decisions").json()["decisions"]] == [SHOWN]


@pytest.mark.parametrize(("path", "may_pull"), [("/reservations", False), ("/select_and_reserve", True)])
def test_a_reservation_whose_answer_names_no_source_has_none(
    monkeypatch: pytest.MonkeyPatch, app: HttpApi, path: str, may_pull: bool
) -> None:
    decide, asked = Decider.decide, []

    def seen(decider: Decider, request: PlacementRequest, *arguments: Any, **options: Any) -> Any:
        asked.append(request.may_pull)
        return decide(decider, request, *arguments, **options)

    monkeypatch.setattr(Decider, "decide", seen)
    body = ASKED | ({"worker_id": "w0"} if path == "/reservations" else {})
    assert call(app, "POST", path, body).status < 300
    assert asked == [may_pull]


def test_loads_show_the_tokens_that_a_worker_lends_until_the_first_token(
    core: TinyCore, pulls: None, app: HttpApi
) -> None:
    def lent() -> dict[str, int | None]:
        (model,) = call(app, "GET", "/loads").json()
        return {load["worker_id"]: load.get("lent_tokens") for load in model["loads"]}

    assert lent() == {"w0": None, "w1": None}
    core.peers[PULL.source] = PeerAddress(PULL.host, PULL.port, "same")
    assert lent() == {"w0": None, "w1": 0}
    call(app, "POST", "/select_and_reserve", ASKED | {"selection_id": "mine"})
    assert lent() == {"w0": None, "w1": PULL.fetched_tokens}
    # A worker that lends no longer may still be read from.
    core.peers.clear()
    assert lent() == {"w0": None, "w1": PULL.fetched_tokens}
    call(app, "POST", "/reservations/mine/prefill_complete")
    assert lent() == {"w0": None, "w1": None}
