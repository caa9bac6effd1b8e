# SPDX-License-Identifier: Apache-2.0
"""Retries of the client: only where a second call is harmless, a bounded number of times, with bounded pauses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.client import AnswerLate, AnswerLost, AnswerUnreadable, Retries, RouterError, RouterUnreachable
from kvrouter.client.errors import refusal

BODY = b'{"error": {"message": "m", "type": "t", "code": "c"}}'


def refused(status: int, body: bytes = BODY, **headers: str) -> RouterError:
    return refusal(status, {name.replace("_", "-"): value for name, value in headers.items()}, body)


ERRORS = st.one_of(
    st.sampled_from([RouterUnreachable("x"), AnswerLost("x"), AnswerLate("x"), AnswerUnreadable("x")]),
    st.builds(
        refused,
        st.sampled_from([400, 401, 404, 409, 429, 500, 502, 503, 504]),
        st.sampled_from([BODY, b"", b"<html>"]),
        retry_after=st.sampled_from(["0", "1", "2", "60", "", "-1", "1.5", "٣", "Wed, 25 Nov 2026 12:00:00 GMT"]),
    ),
)


@given(error=ERRORS, attempt=st.integers(0, 20), is_repeatable=st.booleans(), chance=st.floats(0, 1))
def test_a_request_that_may_have_acted_is_not_repeated(
    error: RouterError, attempt: int, is_repeatable: bool, chance: float
) -> None:
    retries = Retries(count=3, first_pause_s=0.1, longest_pause_s=2.0)
    pause_s = retries.pause_s(error, attempt, is_repeatable=is_repeatable, chance=chance)
    if pause_s is None:
        return
    assert attempt < retries.count
    assert 0 <= pause_s <= 2.5
    assert not error.may_have_acted or (is_repeatable and isinstance(error, AnswerLost))


@pytest.mark.parametrize("attempt, most", [(0, 0.1), (1, 0.2), (2, 0.4), (5, 2.0)])
def test_pauses_double_up_to_the_longest(attempt: int, most: float) -> None:
    retries = Retries(count=9, first_pause_s=0.1, longest_pause_s=2.0)
    pauses = [
        retries.pause_s(RouterUnreachable("x"), attempt, is_repeatable=False, chance=chance) for chance in (0.0, 1.0)
    ]
    assert pauses == pytest.approx([most / 2, most])


def test_a_count_of_0_retries_nothing() -> None:
    for error in (RouterUnreachable("x"), AnswerLost("x"), refused(503, retry_after="0")):
        assert Retries(count=0).pause_s(error, 0, is_repeatable=True, chance=0.5) is None


def test_a_pause_that_the_router_asks_for_is_kept_or_not_waited_for() -> None:
    assert Retries().pause_s(refused(503, retry_after="2"), 0, is_repeatable=False, chance=0.0) == 2.0
    assert Retries().pause_s(refused(503, retry_after="3"), 0, is_repeatable=False, chance=0.0) is None
    assert Retries().pause_s(refused(503), 0, is_repeatable=True, chance=0.0) is None
    assert Retries().pause_s(refused(502, retry_after="1"), 0, is_repeatable=False, chance=0.0) is None
