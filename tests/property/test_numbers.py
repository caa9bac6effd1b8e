# SPDX-License-Identifier: Apache-2.0
"""The integer parser against Python's json: it accepts only plain integers, and reads them as json does."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvrouter.router.base.common.compiled import caution
from kvrouter.router.base.common.json_numbers import integers_of, split_integers
from tests.support.examples import examples

pytestmark = pytest.mark.skipif(caution() is not None, reason="uncompiled, it leaves all arrays to msgspec")

PLAIN = st.integers(-(2**63), 2**64 - 1)
EDGES = st.sampled_from([0, -1, 2**63, 2**64 - 1, -(2**63), 10**18, 10**19, 9, 10])


@settings(max_examples=examples(400))
@given(st.lists(PLAIN | EDGES, max_size=30), st.sampled_from([None, 0, 2]), st.sampled_from(["", " ", "\n\t "]))
def test_plain_integers_are_read_as_json_reads_them(values: list[int], indent: int | None, around: str) -> None:
    integers = integers_of(f"{around}{json.dumps(values, indent=indent)}{around}".encode())
    assert integers is not None
    assert integers.tolist() == [value % 2**64 for value in values]


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
    integers = integers_of(text.encode())
    try:
        meant = json.loads(text)
    except json.JSONDecodeError:
        assert integers is None, text
        return
    plain = isinstance(meant, list) and all(type(v) is int and -(2**63) <= v < 2**64 for v in meant)
    assert (integers is not None) == plain, text
    if integers is not None:
        assert integers.dtype == np.uint64 and integers.tolist() == [value % 2**64 for value in meant]


# The fields of a body: the names that are split off, in every spelling, and others.
FIELDS = st.sampled_from(['"ids"', '"hashes"', '"i\\u0064s"', '"a"', '"a\\"ids"', '""', '"\\\\"', "ids"])
VALUES = st.sampled_from(
    [
        *(
            "[1,2]",
            "[ 3 ,-4 ]",
            "[]",
            "[1.0]",
            "[1,]",
            "null",
            "7",
            '"ids"',
            '"[1]"',
            '"\\\\"',
            '"\\""',
            "{}",
            '{"ids":[1]}',
        ),
        *('{"a":{"ids":[5]},"b":[{}]}', "[[1]]", "[}", "]", "{", '"', "nul", "[18446744073709551615]", "1e5"),
    ]
)
SPACES = st.sampled_from(["", "", "", " ", "\n\t\r "])


@settings(max_examples=examples(2_000))
@given(
    st.lists(st.tuples(FIELDS, SPACES, VALUES, SPACES), max_size=5), st.sampled_from(["", "}", ",", "x", " "]), SPACES
)
@example([('"a"', "", "1", ""), ('"ids"', " ", "[1,2]", "")], "", "")
@example([('"ids"', "", "[1]", ""), ('"ids"', "", "[2]", "")], "", "")
@example([('"ids"', "", "[1]", ""), ('"hashes"', "", "[2]", "")], "", "")
@example([('"ids"', "", "[1]", ""), ('"i\\u0064s"', "", "null", "")], "", "")
def test_a_body_that_is_split_is_the_same_body(fields: list[tuple[str, str, str, str]], rest: str, before: str) -> None:
    text = before + "{" + ",".join(f"{name}{a}:{a}{value}{b}" for name, a, value, b in fields) + "}" + rest
    data = b"POST " + text.encode()
    split = split_integers(data, 5, (b"hashes", b"ids"))
    try:
        meant = json.loads(text)
    except json.JSONDecodeError:
        if split is not None:
            # The reader of the rest finds the error.
            with pytest.raises(json.JSONDecodeError):
                json.loads(split[0])
        return
    if split is None:
        return
    left, index, integers = split
    name = ("hashes", "ids")[index]
    assert integers.tolist() == [value % 2**64 for value in meant[name]]
    assert json.loads(left) == meant | {name: None}


def test_plain_bodies_are_split() -> None:
    split = split_integers(b' {"model": "m\\"", "ids" : [1, 2] , "x": {"ids": [3]}} ', 0, (b"hashes", b"ids"))
    assert split is not None
    assert split[0] == b' {"model": "m\\"", "ids" : null , "x": {"ids": [3]}} '
    assert (split[1], split[2].tolist()) == (1, [1, 2])


@pytest.mark.parametrize(
    "body", [b"", b"{", b"{}", b"[]", b'{"ids":[1]', b'{"ids":[1', b'{"ids"', b'{"ids', b'{"ids":']
)
def test_bodies_without_an_end_are_not_split(body: bytes) -> None:
    assert split_integers(body, 0, (b"ids",)) is None
    for start in (-1, len(body) + 1):
        with pytest.raises(ValueError, match="start"):
            split_integers(body, start, (b"ids",))
