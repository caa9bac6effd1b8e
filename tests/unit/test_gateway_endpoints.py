# SPDX-License-Identifier: Apache-2.0
"""Workers as a gateway knows them, subsets of endpoints, and the fallbacks after the picked endpoint."""

from __future__ import annotations

import pytest

from kvrouter.contract.tiers import all_on_gpu
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.question import Hit
from kvrouter.router.model.workers.allow_list import AllowList
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.request_rank import request_ranks
from kvrouter.router.model.workers.role import HandoverWay
from kvrouter.router.serve.gateway.endpoints import Endpoints, canonical, destination
from kvrouter.router.serve.gateway.messages import SUBSET_KEY, subset_of
from kvrouter.router.serve.proxy.worker_addresses import Addresses


def key(name: str, rank: int = 0) -> WorkerKey:
    return WorkerKey("m", name, rank)


def registered(
    name: str, url: str | None, rank: int = 0, way: HandoverWay = HandoverWay.KV_TRANSFER_PARAMS
) -> Registration:
    return Registration(key(name, rank), url=url, handover=way)


def known(*registrations: Registration) -> tuple[Endpoints, Addresses]:
    addresses = Addresses(registrations, AllowList(()), request_ranks(registrations, {}))
    return Endpoints(addresses), addresses


def hit(name: str, rank: int = 0, tokens: int = 0) -> Hit:
    return Hit(key(name, rank), all_on_gpu(tokens), "live")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("10.0.0.1:8000", "10.0.0.1:8000"),
        (" 10.0.0.1:08000 ", "10.0.0.1:8000"),
        ("[::1]:80", "[::1]:80"),
        ("[0:0::1]:80", "[::1]:80"),
        ("::1:80", "[::1]:80"),
        ("engine:80", None),
        ("10.0.0.1", None),
        ("10.0.0.1:", None),
        ("10.0.0.1:65536", None),
        ("10.0.0.1:８0", None),
        ("", None),
    ],
)
def test_an_endpoint_has_one_spelling(given: str, expected: str | None) -> None:
    assert canonical(given) == expected


def test_a_gateway_is_given_addresses_alone() -> None:
    endpoints, _ = known(
        registered("w0", "http://10.0.0.1:8000"),
        registered("w1", "http://engine:8000"),
        registered("w2", "http://10.0.0.1:8000/models/a"),
        registered("w3", None),
        registered("w4", "https://[::1]"),
    )
    assert endpoints.of == {key("w0"): "10.0.0.1:8000", key("w4"): "[::1]:443"}
    assert endpoints.unusable == {key("w1"), key("w2"), key("w3")}


def test_a_subset_excludes_all_other_endpoints() -> None:
    endpoints, _ = known(
        *(registered(f"w{n}", f"http://10.0.0.{n}:80") for n in range(3)), registered("w3", "http://e:1")
    )
    everybody = {key(f"w{n}") for n in range(4)}
    assert endpoints.outside(None) == {key("w3")}
    assert endpoints.outside(["10.0.0.1:80", "10.9.9.9:80", "nonsense"]) == everybody - {key("w1")}
    assert endpoints.outside([]) == everybody


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["a:1", "b:2"], ("a:1", "b:2")),
        ("a:1, b:2", ("a:1", "b:2")),
        ([], ()),
        ("", ()),
        ([1, None, "a:1"], ("a:1",)),
        (7, ()),
    ],
)
def test_a_hint_is_a_list_or_a_text(given: object, expected: tuple[str, ...]) -> None:
    assert subset_of({SUBSET_KEY: given}) == expected
    assert subset_of({"another": given}) is None
    assert subset_of(None) is None


def test_fallbacks_follow_in_their_order_each_endpoint_once() -> None:
    endpoints, addresses = known(*(registered(f"w{n}", f"http://10.0.0.{n}:80") for n in range(4)))
    fallback_hits = [hit("w1"), hit("gone"), hit("w2"), hit("w1"), hit("w0"), hit("w3")]
    target = destination(hit("w2"), fallback_hits, endpoints, addresses, 2)
    assert target.text == "10.0.0.2:80,10.0.0.1:80,10.0.0.0:80"
    assert [target_hit.worker for target_hit in target.hits] == [key("w2"), key("w1"), key("w0")]
    assert destination(hit("w2"), [hit("w1")], endpoints, addresses, 0).text == "10.0.0.2:80"


def test_a_fallback_takes_the_same_headers() -> None:
    two = "http://10.0.0.1:80"
    endpoints, addresses = known(
        registered("w0", two, 0),
        registered("w0", two, 1),
        registered("w1", "http://10.0.0.2:80"),
        registered("w2", "http://10.0.0.3:80", way=HandoverWay.HEADER),
        registered("w3", "http://10.0.0.4:80", way=HandoverWay.HEADER),
    )
    fallback_hits = [hit("w1"), hit("w2"), hit("w3"), hit("w0", 1)]
    assert destination(hit("w0", 1), fallback_hits, endpoints, addresses, 8).text == "10.0.0.1:80"
    assert destination(hit("w2"), fallback_hits, endpoints, addresses, 8).text == "10.0.0.3:80,10.0.0.4:80"
    assert destination(hit("w1"), fallback_hits, endpoints, addresses, 8).text == "10.0.0.2:80"
