# SPDX-License-Identifier: Apache-2.0
"""Signs of another life of an engine, at the router that follows its worker and at other routers."""

from __future__ import annotations

from typing import Any

from kvrouter.router.follow.streams.engine_lives import EngineLives


class Signs:
    """Engine that this router follows from its first start on; each step names the signs that changed."""

    def __init__(self) -> None:
        self._known: dict[str, Any] = {"start_s": None, "epoch": None, "voids": 0, "is_down": False}
        self.lives = EngineLives()

    def begins(self, **changes: Any) -> bool:
        """Return whether these changes begin another life."""
        before = self.lives.number
        self._known |= changes
        self.lives.observe(**self._known)
        assert self.lives.number in (before, before + 1)
        return self.lives.number > before


def test_a_process_with_another_start_is_another_life() -> None:
    signs = Signs()
    assert not signs.begins(start_s=1.0)
    assert not signs.begins(start_s=1.0)
    assert signs.begins(start_s=2.0)
    # An answer without the start time proves nothing.
    assert not signs.begins(start_s=None)
    assert not signs.begins(start_s=2.0)
    assert signs.begins(start_s=3.0)


def test_voiding_the_learned_catalog_may_be_another_life() -> None:
    signs = Signs()
    assert signs.begins(voids=1)
    assert not signs.begins()
    # A new ingest counts from zero.
    assert not signs.begins(voids=0)
    assert signs.begins(voids=1)


def test_a_lost_engine_ends_its_life_once() -> None:
    signs = Signs()
    assert signs.begins(is_down=True)
    assert not signs.begins()
    assert not signs.begins(is_down=False)


def test_a_followed_worker_has_the_life_that_its_follower_published() -> None:
    signs = Signs()
    assert not signs.begins(epoch="a", start_s=1.0)
    assert not signs.begins(epoch="b"), "the follower voided in one process"
    assert signs.begins(start_s=2.0)
    assert not signs.begins(start_s=None)
    assert signs.begins(epoch="c")


def test_a_worker_that_changes_its_follower_lives_on() -> None:
    signs = Signs()
    assert not signs.begins(start_s=1.0)
    assert not signs.begins(epoch="a")
    assert not signs.begins(epoch=None)
