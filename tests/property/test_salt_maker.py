# SPDX-License-Identifier: Apache-2.0
"""Salts of tenants are equal only where secret, tenant and, if it counts, the client's own salt are equal."""

from __future__ import annotations

import re

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from kvrouter.router.index.matching.question import Question
from kvrouter.router.route.placement.placement_request import PlacementRequest
from kvrouter.router.serve.access.salt_maker import SaltMaker

# Texts with digits and colons, of which the lengths before the parts are made, and with halves of characters.
TEXTS = st.text(st.sampled_from("01:ab\x00é\ud800"), max_size=6)
OWN = st.none() | TEXTS
SECRETS = st.sampled_from([b"s" * 32, b"t" * 32])


@example((b"s" * 32, "a", "b"), (b"s" * 32, "ab", ""), True)
@example((b"s" * 32, "a", "1:b"), (b"s" * 32, "a1:b", None), True)
@given(*[st.tuples(SECRETS, TEXTS, OWN)] * 2, st.booleans())
def test_different_tenants_have_different_salts(
    one: tuple[bytes, str, str | None], other: tuple[bytes, str, str | None], combines: bool
) -> None:
    salts = [SaltMaker(secret, combines).make(tenant, own) for secret, tenant, own in (one, other)]
    assert all(re.fullmatch("[0-9a-f]{64}", salt) for salt in salts)
    counted = [parts if combines else parts[:2] for parts in (one, other)]
    assert (salts[0] == salts[1]) == (counted[0] == counted[1])


@given(st.text(min_size=1), OWN, OWN)
def test_a_session_belongs_to_its_salt(session_id: str, one: str | None, other: str | None) -> None:
    def name(salt: str | None) -> str | None:
        question = Question("m", 1, block_hashes=np.empty(0, np.uint64), cache_salt=salt)
        return PlacementRequest(question, session_id).session_name

    assert (name(one) == name(other)) == ((one or "") == (other or ""))
    assert name(None) == session_id
