# SPDX-License-Identifier: Apache-2.0
"""A text encoded by its pieces has the same ids as the whole text, for every kind of tokenizer; memory is bounded."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from kvrouter.router.route.tokens.local.piece_cache import PieceCache
from tests.support.chats import text
from tests.support.tiny_tokenizer import END, START, build_tokenizer

# Four of these texts are parts of special tokens, so that halves of special tokens occur too.
NOISE = (
    START + "user",
    "the<|im_start|>",
    "<assistant>  x",
    START,
    END,
    "<|im_",
    "end|>",
    "<bos>",
    "<",
    "|>",
    "\u2581",
    "</s>",
    "<think>",
)


def texts(rng: Random, count: int) -> list[str]:
    return ["".join(rng.choice(NOISE) if rng.random() < 0.3 else text(rng, 6) for _ in range(9)) for _ in range(count)]


def words(scheme: str) -> Tokenizer:
    """Return a tokenizer like Llama 2's: a sign stands for each space, and before a text, or before every piece."""
    vocabulary = {chr(code): code for code in range(1, 0x500)}
    vocabulary |= {"\u2581": 2000, "<unk>": 2001, "\u2581t": 2002, "\u2581th": 2003, "\u2581the": 2004}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, [("\u2581", "t"), ("\u2581t", "h"), ("\u2581th", "e")], unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (START, END, "</s>")])
    return tokenizer


def normalizing() -> Tokenizer:
    tokenizer = build_tokenizer()
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Prepend("_"), normalizers.Replace(" ", "_")]
    )
    tokenizer.add_tokens([AddedToken("weather", normalized=True), AddedToken("<|im_start|>user", normalized=False)])
    return tokenizer


def greedy() -> Tokenizer:
    """Return a tokenizer with a token that takes the spaces behind it."""
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<assistant>", special=True, normalized=False, rstrip=True)])
    return tokenizer


def whole_words() -> Tokenizer:
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([AddedToken("weather", normalized=False, single_word=True)])
    return tokenizer


def overlapping() -> Tokenizer:
    """Return a tokenizer whose tokens contain one of the template's, or end as such a token begins."""
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in ("<|im_end|><", "the<", "|>\n")])
    return tokenizer


TEMPLATE = f"{START}{END}<bos></s><assistant><think>"

KINDS: dict[str, tuple[Callable[[], Tokenizer], bool]] = {
    "bytes": (build_tokenizer, True),
    "always": (lambda: words("always"), True),
    "never": (lambda: words("never"), True),
    "first": (lambda: words("first"), False),
    "normalizing": (normalizing, True),
    "greedy": (greedy, True),
    "whole words": (whole_words, False),
    "overlapping": (overlapping, False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_of_the_pieces_equal_those_of_the_whole(kind: str) -> None:
    make, remembers = KINDS[kind]
    tokenizer = make()
    pieces = PieceCache(tokenizer, TEMPLATE)
    for sample in texts(Random(5), 150) * 2:
        expected = tokenizer.encode(sample, add_special_tokens=False).ids
        assert pieces.encode(sample, add_special_tokens=False).tolist() == expected, sample
        with_special = tokenizer.encode(sample, add_special_tokens=True).ids
        assert pieces.encode(sample, add_special_tokens=True).tolist() == with_special, sample
    assert (pieces.held_bytes > 0) is remembers


class Counting:
    """Tokenizer that counts the characters it is given."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.chars = 0

    def encode(self, given: str, add_special_tokens: bool) -> object:
        self.chars += len(given)
        return self._tokenizer.encode(given, add_special_tokens=add_special_tokens)

    def encode_batch_fast(self, given: list[str], add_special_tokens: bool) -> object:
        self.chars += sum(map(len, given))
        return self._tokenizer.encode_batch_fast(given, add_special_tokens=add_special_tokens)

    def __getattr__(self, name: str) -> object:
        return getattr(self._tokenizer, name)


def test_a_conversation_that_continues_is_not_encoded_again() -> None:
    counting = Counting(build_tokenizer())
    pieces = PieceCache(counting, TEMPLATE)  # type: ignore[arg-type]
    rng = Random(3)
    chat = ""
    for _ in range(20):
        turn = START + " ".join(rng.choice(("alpha", "beta", "Größe")) for _ in range(rng.randint(10, 99))) + END
        chat += turn
        chars_before = counting.chars
        pieces.encode(chat, add_special_tokens=False)
        assert counting.chars - chars_before <= len(turn)


def test_memory_is_bounded_and_what_it_gives_cannot_be_changed() -> None:
    pieces = PieceCache(build_tokenizer(), TEMPLATE, memory_bytes=20_000)
    for number in range(200):
        pieces.encode(f"{START}{number} " + "word " * 40 + END, add_special_tokens=False)
        assert pieces.held_bytes <= 20_000
    assert pieces.held_bytes > 10_000
    sample = START + "the same again and again, a piece of some length" + END
    first = pieces.encode(sample, add_special_tokens=False)
    first[:] = 0
    assert not np.array_equal(pieces.encode(sample, add_special_tokens=False), first)
