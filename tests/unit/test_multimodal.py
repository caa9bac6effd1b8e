# SPDX-License-Identifier: Apache-2.0
"""Items of a prompt, block by block."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.router.index.matching.question import Question
from kvrouter.router.index.matching.routing_history import PIECE_TOKENS, pieces_of
from kvrouter.router.model.kvcache.block_hash import HashScheme, HashSpace, extra_keys_for
from kvrouter.router.model.kvcache.multimodal import MAX_ITEMS, Items, MultimodalItem, in_order, within
from kvrouter.router.route.load.prefix_tree import PIECE_TOKENS as PENDING_PIECE_TOKENS
from kvrouter.router.route.load.prefix_tree import names_of

CAT, DOG = MultimodalItem("cat", 3, 4), MultimodalItem("dog", 7, 9)


def test_items_are_sorted_by_their_place_in_the_prompt() -> None:
    assert in_order([DOG, CAT]) == (CAT, DOG)
    assert in_order([]) == ()


@pytest.mark.parametrize(
    "items",
    [
        [CAT, DOG._replace(offset_tokens=6)],
        [CAT._replace(offset_tokens=-1)],
        [CAT._replace(length_tokens=0)],
        [MultimodalItem("a", at, 1) for at in range(MAX_ITEMS + 1)],
    ],
)
def test_contradictory_items_are_refused(items: list[MultimodalItem]) -> None:
    with pytest.raises(ValueError, match="item"):
        in_order(items)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12)), max_size=6), st.integers(0, 60), st.integers(1, 20))
def test_an_item_belongs_to_each_block_with_one_of_its_tokens(
    gaps: list[tuple[int, int]], start: int, length: int
) -> None:
    items: Items = ()
    end = 0
    for gap, tokens in gaps:
        items += (MultimodalItem(f"i{end}", end + gap, tokens),)
        end += gap + tokens
    inside = within(items, start, start + length)
    expected = [
        item
        for item in items
        if set(range(item.offset_tokens, item.offset_tokens + item.length_tokens)) & set(range(start, start + length))
    ]
    assert [(item.identifier, item.offset_tokens + start) for item in inside] == [
        (item.identifier, item.offset_tokens) for item in expected
    ]


def test_the_keys_of_an_item_stand_between_the_lora_and_the_salt() -> None:
    space = HashSpace(HashScheme.default(), 8, ("sql", "/a"), "tenant")
    assert extra_keys_for(space, 0, within((CAT, DOG), 0, 8)) == (
        *(("lora", "sql", "/a"), ("mm", "cat", 3), ("mm", "dog", 7), ("cache_salt", "tenant")),
    )
    assert extra_keys_for(space, 1, within((CAT, DOG), 8, 16)) == (("lora", "sql", "/a"), ("mm", "dog", -1))


def guessed(question: Question) -> list[int]:
    return pieces_of(question, None)


def pending(question: Question) -> list[int]:
    return names_of(question, 1, 7)


@pytest.mark.parametrize(("names", "piece_tokens"), [(guessed, PIECE_TOKENS), (pending, PENDING_PIECE_TOKENS)])
def test_names_of_prompts_distinguish_images(names: Callable[[Question], list[int]], piece_tokens: int) -> None:
    """Give both images the same placeholder tokens."""
    tokens = np.zeros(4 * piece_tokens, np.int64)

    def pieces(*items: MultimodalItem) -> list[int]:
        return names(Question("m", len(tokens), token_ids=tokens, items=items))

    cat = MultimodalItem("cat", piece_tokens + 5, 20)
    dog = cat._replace(identifier="dog")
    assert pieces(cat) == pieces(cat)
    assert pieces(cat)[0] == pieces(dog)[0] and pieces(cat)[1] != pieces(dog)[1]
    assert pieces(cat)[1] not in (pieces()[1], pieces(cat._replace(offset_tokens=piece_tokens + 6))[1])
