# SPDX-License-Identifier: Apache-2.0
"""Which chunk of a tier makes room for another: the interface of an eviction policy, and how one is chosen by name.

A policy orders keys and nothing else: it knows no slots, no bytes, no clock. The tier reports stored, used and removed
keys, and requests victims. A third party's policy is a class with these methods that takes the capacity in chunks;
users name it as "package.module:Class".
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from kvrouter.engine_patch.offload.key import OffloadKey
from kvrouter.engine_patch.offload.tiers.arc import ArcPolicy
from kvrouter.engine_patch.offload.tiers.lru import LruPolicy


class PolicyError(ValueError):
    """A policy that cannot be had, or one that broke the rules of the interface."""


class Policy(Protocol):
    """An order of eviction among the keys of one tier. Used by one thread; no method may raise for a key of the tier.

    Keys may be in use: then `may_evict` is false for them and victims passes them over. A policy may set aside what it
    passed over, to meet it once and not at each call: for each such key that can be evicted again `evictable_again` is
    called."""

    def add(self, key: OffloadKey) -> None:
        """A key that was absent is resident now, and the youngest. `may_evict` is false for it until
        `evictable_again`."""

    def touch(self, key: OffloadKey) -> None:
        """A resident key was used."""

    def discard(self, key: OffloadKey) -> None:
        """A resident key is gone, but not to make room: no evidence about what is worth keeping."""

    def victims(
        self, count: int, may_evict: Callable[[OffloadKey], bool], incoming: Sequence[OffloadKey] = ()
    ) -> list[OffloadKey] | None:
        """Exactly `count` keys that may be evicted, no longer resident; None and nothing changed where there are not so
        many.

        incoming: what the room is for, in the order in which each is added next, so that a policy that remembers what
        it evicted can learn from their return before it chooses."""

    def evictable_again(self, key: OffloadKey) -> None:
        """A resident key for which `may_evict` may have been false can be evicted from now on."""

    def clear(self) -> None:
        """Nothing is resident, nothing remembered."""

    def __len__(self) -> int:
        """How many keys are resident, in use or not."""


METHODS = ("add", "touch", "discard", "victims", "evictable_again", "clear", "__len__")

BUILT_IN: dict[str, Callable[[int], Policy]] = {"lru": LruPolicy, "arc": ArcPolicy}


def make_policy(name: str, capacity: int) -> Policy:
    """The policy of that name for a tier of `capacity` chunks: "lru", "arc", or a third party's "package.module:Class".

    Raises PolicyError with what was tried and what to write instead."""
    if capacity < 1:
        raise PolicyError(f"an eviction policy is for 1 chunk or more, not {capacity}: give the tier more memory")
    built_in = BUILT_IN.get(name)
    if built_in is not None:
        return built_in(capacity)
    module_name, _, class_name = name.partition(":")
    if not module_name or not class_name:
        known = ", ".join(sorted(BUILT_IN))
        raise PolicyError(
            f"there is no eviction policy {name!r}: write one of {known}, or package.module:Class for a class of your own"
        )
    try:
        maker = getattr(importlib.import_module(module_name), class_name)
    except AttributeError as error:
        raise PolicyError(f"eviction policy {name!r}: module {module_name} has no {class_name}") from error
    except Exception as error:  # a module can raise anything while it is imported
        raise PolicyError(
            f"eviction policy {name!r}: importing {module_name} failed ({type(error).__name__}: {error}); "
            "it must be installed in the environment of the engine, or be on PYTHONPATH"
        ) from error
    try:
        made = maker(capacity)
    except Exception as error:  # a stranger's code
        raise PolicyError(
            f"eviction policy {name!r}: {class_name}({capacity}) failed ({type(error).__name__}: {error}); "
            "it is called with the capacity in chunks"
        ) from error
    missing = [method for method in METHODS if not callable(getattr(made, method, None))]
    if missing:
        raise PolicyError(f"eviction policy {name!r}: {class_name} lacks {', '.join(missing)}; see {__name__}.Policy")
    return cast(Policy, made)
