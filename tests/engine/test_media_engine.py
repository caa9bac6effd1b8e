# SPDX-License-Identifier: Apache-2.0
"""Chats with images at two real vLLM servers behind the router: the prediction equals the reuse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engine.chat_fleet import MODEL, Fleet, ask, chat_fleet, predicted
from tests.engine.media_model import IMAGE_LENGTH, image_part, image_png, write_media_model

pytestmark = pytest.mark.engine

# vLLM's default on the CPU is 128, more than the tokens of an image.
BLOCK_TOKENS = 32
REQUESTS = 100
MIN_HITS = 40
IMAGES = 5
SYSTEM = {"role": "system", "content": "You are a helpful assistant. " * 8}
WORDS = ("the", "picture", "of", "a", "town", "by", "sea", "shows", "what", "it", "was", "and", "two", "boats", "each")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder: Path = tmp_path_factory.mktemp("media")
    flags = ("--enable-scale-out", "--block-size", str(BLOCK_TOKENS))
    with chat_fleet(folder, write_media_model(folder / "model"), flags) as running:
        yield running


def text(rng: Random, words: int) -> dict[str, Any]:
    return {"type": "text", "text": " ".join(rng.choice(WORDS) for _ in range(words))}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def chats(rng: Random) -> Iterator[list[dict[str, Any]]]:
    """Yield conversations that grow and branch, with few images.

    The images stand alone, side by side, twice, under their own names, or are missing.
    """
    images = [image_part(image_png(rng)) for _ in range(IMAGES)]
    images += [{**images[0], "uuid": "mine"}, {**images[1], "uuid": "a"}]
    starts = [[{"role": "system", "content": f"You are helpful in {town}. " * 8}] for town in ("Paris", "Rome", "Oslo")]
    conversations: list[list[dict[str, Any]]] = [*starts]
    while True:
        shown = [rng.choice(images) for _ in range(rng.choice((0, 1, 1, 1, 2, 3)))]
        turn = user(*([text(rng, rng.randint(1, 30))] if rng.random() < 0.5 else []), *shown, text(rng, 40))
        chat = [*rng.choice(conversations[-8:]), turn]
        yield chat
        conversations.append([*chat, {"role": "assistant", "content": "yes"}] if len(chat) < 6 else rng.choice(starts))


def test_what_is_predicted_through_images_is_what_is_reused(fleet: Fleet) -> None:
    outcomes = []
    for chat, number in zip(chats(Random(1)), range(REQUESTS), strict=False):
        fleet.settle()
        # One request in four names its worker, so that both hold blocks, whichever is the faster on this machine.
        pin = {"extra_headers": {"x-kvrouter-worker": f"w{number // 4 % 2}"}} if number % 4 == 0 else {}
        prediction, reused, worker = predicted(ask(fleet, messages=chat, **pin))
        outcomes.append(
            (prediction, reused, worker, sum("image_url" in part for m in chat[1:] for part in m["content"]))
        )
    wrong = [outcome for outcome in outcomes if outcome[0] != outcome[1]]
    hits = sum(reused > 0 for _, reused, *_ in outcomes)
    print(
        f"{len(outcomes)} requests, {sum(count > 0 for *_, count in outcomes)} with images, {hits} with a hit, "
        f"{sum(reused for _, reused, *_ in outcomes)} tokens reused, {len(wrong)} predicted wrongly; "
        f"by worker {Counter(worker for _, _, worker, _ in outcomes)}"
    )
    assert not wrong
    assert hits >= MIN_HITS and len({worker for _, _, worker, _ in outcomes}) == 2


def test_an_images_content_decides_how_far(fleet: Fleet) -> None:
    rng = Random(2)
    cat, dog = image_part(image_png(rng)), image_part(image_png(rng))
    words = text(rng, 60)

    def hit(*images: dict[str, Any], **fields: Any) -> int:
        fleet.settle()
        pinned = {"x-kvrouter-worker": "w0"}
        prediction, reused, _ = predicted(
            ask(fleet, messages=[SYSTEM, user(*images, words)], extra_headers=pinned, **fields)
        )
        assert prediction == reused
        return reused

    def whole(*images: dict[str, Any]) -> int:
        body = {"model": MODEL, "messages": [SYSTEM, user(*images, words)]}
        return int(fleet.router.request("POST", "/select", body)["isl_tokens"])

    hit(cat)
    again = hit(cat)
    assert hit(dog) <= again - IMAGE_LENGTH
    assert again // BLOCK_TOKENS == (whole(cat) - 1) // BLOCK_TOKENS
    # An image with a name of the client's is known by this name, not by its content. The second image of a prompt is
    # found behind the first.
    assert hit({**cat, "uuid": "named"}) <= again - IMAGE_LENGTH
    assert hit({**dog, "uuid": "named"}) == again
    assert hit(cat, dog) < hit(cat, dog)
    # Prompts with different salts share no blocks.
    assert hit(cat, extra_body={"cache_salt": "s"}) == 0
    assert hit(cat, extra_body={"cache_salt": "s"}) == again


def test_a_choice_says_that_it_knows_all_of_the_prompt(fleet: Fleet) -> None:
    body = {"model": MODEL, "messages": [SYSTEM, user(image_part(image_png(Random(3))), text(Random(3), 5))]}
    chosen = fleet.router.request("POST", "/select", body)
    count = chosen["isl_tokens"]
    assert chosen["tokens"] == {"source": "render", "num_tokens": count, "known_tokens": count, "problem": ""}
