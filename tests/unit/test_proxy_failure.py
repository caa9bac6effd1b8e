# SPDX-License-Identifier: Apache-2.0
"""Attempts at another worker, by the kind of the failure, the path, and the number of attempts before."""

from __future__ import annotations

import pytest

from kvrouter.router.model.upstream.failure import Failure, Kind
from kvrouter.router.route.tokens.proxied_paths import PATHS
from kvrouter.router.serve.proxy.attempts import MAX_ARRIVALS, MAX_ATTEMPTS, Attempts, AttemptsSpent

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
NOT_ARRIVED = (Kind.REFUSED, Kind.CONNECT_TIMEOUT)
MAY_HAVE_ARRIVED = (Kind.RESET, Kind.LOST, Kind.GONE)
FINAL = (Kind.SILENT, Kind.MALFORMED, Kind.CUT)


def tried(path: str, *kinds: Kind, pinned: bool = False) -> list[bool]:
    """Return whether another worker may be tried, after each of these failures."""
    attempts = Attempts(path, pinned=pinned)
    return [attempts.failed(f"w{n}", Failure(kind, "")) for n, kind in enumerate(kinds)]


def test_every_kind_of_failure_is_tested() -> None:
    assert {*NOT_ARRIVED, *MAY_HAVE_ARRIVED, *FINAL, Kind.STALE} == set(Kind)


@pytest.mark.parametrize("path", sorted(PATHS))
@pytest.mark.parametrize("kind", NOT_ARRIVED)
def test_a_request_that_never_arrived_may_always_be_sent_again(path: str, kind: Kind) -> None:
    assert tried(path, *[kind] * MAX_ATTEMPTS) == [True] * (MAX_ATTEMPTS - 1) + [False]


@pytest.mark.parametrize("kind", MAY_HAVE_ARRIVED)
def test_a_request_that_may_have_started_is_sent_once_more(kind: Kind) -> None:
    assert tried(CHAT, *[kind] * MAX_ARRIVALS) == [True, False]
    assert tried(RESPONSES, kind) == [False]
    assert tried(CHAT, Kind.REFUSED, kind, Kind.REFUSED) == [True, True, False]
    assert tried(CHAT, kind, Kind.REFUSED, kind) == [True, True, False]


@pytest.mark.parametrize("kind", FINAL)
def test_some_failures_are_never_retried(kind: Kind) -> None:
    assert tried(CHAT, kind) == [False]


@pytest.mark.parametrize("kind", [*NOT_ARRIVED, *MAY_HAVE_ARRIVED])
def test_a_pinned_request_has_one_attempt(kind: Kind) -> None:
    assert tried(CHAT, kind, pinned=True) == [False]


def test_the_trail_names_each_failure_in_its_order() -> None:
    attempts = Attempts(CHAT, pinned=False)
    attempts.stale("w0")
    attempts.failed("w0", Failure(Kind.REFUSED, ""))
    attempts.failed("w1", Failure(Kind.GONE, ""))
    assert attempts.trail == ["w0 stale", "w0 refused", "w1 gone"]


def test_only_repeatable_requests_use_kept_connections() -> None:
    assert {path for path in PATHS if not Attempts(path, pinned=False).reuses_connections} == {RESPONSES}


def test_prefill_workers_and_engines_that_tokenize_count_among_those_that_may_have_begun() -> None:
    attempts = Attempts(CHAT, pinned=False)
    attempts.tokens_failed()
    assert not attempts.failed("w0", Failure(Kind.RESET, ""))
    attempts = Attempts(CHAT, pinned=False)
    assert not attempts.prefill_failed("p0", Failure(Kind.RESET, ""))
    assert not attempts.failed("d0", Failure(Kind.RESET, ""))
    attempts = Attempts(CHAT, pinned=False)
    assert attempts.failed("d0", Failure(Kind.RESET, ""))
    assert attempts.prefill_failed("p0", Failure(Kind.REFUSED, ""))
    with pytest.raises(AttemptsSpent):
        attempts.prefill_failed("p1", Failure(Kind.LOST, ""))
    assert attempts.trail == ["d0 reset", "p0 refused", "p1 lost"]


def test_an_engine_that_broke_on_the_tokens_leaves_what_never_arrived_free() -> None:
    for path in (CHAT, RESPONSES):
        attempts = Attempts(path, pinned=False)
        attempts.tokens_failed()
        assert attempts.failed("w0", Failure(Kind.REFUSED, ""))
