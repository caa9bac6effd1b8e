# SPDX-License-Identifier: Apache-2.0
"""The integer parser against Python's json: what it takes it reads the same, and it takes nothing that is not plain."""

from __future__ import annotations

import json

import numpy as np
from examples import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvrouter.router.common.json_numbers import integers_of

PLAIN = st.integers(-(2**63), 2**64 - 1)
EDGES = st.sampled_from([0, -1, 2**63, 2**64 - 1, -(2**63), 10**18, 10**19, 9, 10])


@settings(max_examples=examples(400))
@given(st.lists(PLAIN | EDGES, max_size=30), st.sampled_from([None, 0, 2]), st.sampled_from(["", " ", "\n\t "]))
def test_plain_integers_are_read_as_json_reads_them(values: list[int], indent: int | None, around: str) -> None:
    found = integers_of(f"{around}{json.dumps(values, indent=indent)}{around}".encode())
    assert found is not None
    assert found.tolist() == [value % 2**64 for value in values]


TOKENS = st.sampled_from(
    [*"[],-0129 ", "1.5", "1e3", "true", '"1"', "18446744073709551616", "-9223372036854775809", "01"]
)


@settings(max_examples=examples(1_000))
@given(st.lists(TOKENS, max_size=12).map("".join))
@example("")
@example("[1,]")
@example("[-]")
@example("[1 2]")
@example("[1]]")
@example("[18446744073709551616]")
@example("[-9223372036854775809]")
@example("[-0]")
@example("[00]")
def test_whatever_it_takes_is_json_with_the_same_meaning(text: str) -> None:
    found = integers_of(text.encode())
    try:
        meant = json.loads(text)
    except json.JSONDecodeError:
        assert found is None, text
        return
    plain = isinstance(meant, list) and all(type(v) is int and -(2**63) <= v < 2**64 for v in meant)
    assert (found is not None) == plain, text
    if found is not None:
        assert found.dtype == np.uint64 and found.tolist() == [value % 2**64 for value in meant]
