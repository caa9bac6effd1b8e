# SPDX-License-Identifier: Apache-2.0
"""Pictures of the hit rule: they are drawn from the rule, and the page's texts about them agree with it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvrouter.router.base.common.ids import CPU, Place
from tests.support.hit_pictures import IMAGES, PICTURES, PROMPT_TOKENS, Picture, draw

PAGE = (Path(__file__).resolve().parents[2] / "docs/explanation/hit-rule.md").read_text()
BY_NAME = {picture.name: picture for picture in PICTURES}


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_the_picture_on_the_page_is_drawn_from_the_rule(picture: Picture) -> None:
    drawn = draw(picture)
    assert (IMAGES / f"{picture.name}.svg").read_text() == drawn, "draw it again: tests/support/hit_pictures.py"
    ElementTree.fromstring(drawn)
    assert "http" not in drawn.replace("http://www.w3.org/2000/svg", "")


def test_the_figures_of_the_page_are_those_of_the_rule() -> None:
    texts = {name: alt for alt, name in re.findall(r"!\[([^\]]+)\]\(\.\./images/([\w-]+)\.svg\)", PAGE)}
    assert texts.keys() == BY_NAME.keys()
    for name, picture in BY_NAME.items():
        assert f"{picture.tokens} " in texts[name], (name, picture.tokens, texts[name])
    hits = {name: picture.tokens for name, picture in BY_NAME.items()}
    assert hits == {"hit-full": 96, "hit-window": 112, "hit-mamba": 128, "hit-two-groups": 80, "hit-offload": 144}
    assert f"{PROMPT_TOKENS} tokens: ten blocks of 16" in PAGE
    # Full attention alone (group 0) reaches further: a router that follows no other group expects that hit.
    assert BY_NAME["hit-two-groups"].covered() == {0: 144, 1: 80}
    assert BY_NAME["hit-offload"].gpu_tokens == 80


def test_without_the_windows_last_block_in_the_tier_nothing_is_loaded() -> None:
    picture = BY_NAME["hit-offload"]
    assert replace(picture, held={**picture.held, Place(1, CPU): (6, 7)}).tokens == 80


def test_a_whole_prompt_is_never_reused() -> None:
    picture = BY_NAME["hit-full"]
    every = {place: tuple(range(PROMPT_TOKENS // 16)) for place in picture.held}
    assert replace(picture, held=every).tokens == 160
