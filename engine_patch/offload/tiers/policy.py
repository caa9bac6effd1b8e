# SPDX-License-Identifier: Apache-2.0
"""The interface of an eviction policy, which chooses the chunks of a tier that make room for others.

A policy orders keys and does not deal with slots, bytes or clocks. The tier reports stored, used and removed keys, and
requests victims. A third party's policy is a class with these methods that takes the capacity in chunks; users name it
as "package.module:Class".
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from kvrouter.engine_patch.offload.key import OffloadKey
from kvrouter.engine_patch.offload.tiers.arc import ArcPolicy
from kvrouter.engine_patch.offload.tiers.lru import LruPolicy


class PolicyError(ValueError):
    """A policy that cannot be loaded, or one that broke the rules of the interface."""


class Policy(Protocol):
    """An order of eviction among the keys of one tier, used by one thread; no method may raise for a key of the tier.

    Keys may be in use: `may_evict` is then false for them, and `victims` passes them over. A policy may set aside the
    keys that it passed over, to meet each once and not at each call: `evictable_again` is called for each such key that
    can be evicted again.

    A policy may have a method `by_worth`, which returns all keys, the last to be evicted first. Without it, a hand-over
    takes the chunks that were stored last for the most valuable.
    """

    def add(self, key: OffloadKey) -> None:
        """Add a key that was absent, as the youngest.

        `may_evict` is false for it until `evictable_again`.
        """

    def touch(self, key: OffloadKey) -> None:
        """Count a use of a resident key."""

    def discard(self, key: OffloadKey) -> None:
        """Remove a resident key for another reason than room, so that it is no evidence about which keys to keep."""

    def victims(
        self, count: int, may_evict: Callable[[OffloadKey], bool], incoming: Sequence[OffloadKey] = ()
    ) -> list[OffloadKey] | None:
        """Remove and return exactly `count` keys that may be evicted; return None and change nothing if fewer may.

        `incoming` are the keys that need the room, in the order in which each is added next. From their return, a
        policy that remembers evicted keys can learn before it chooses.
        """

    def evictable_again(self, key: OffloadKey) -> None:
        """Note that a resident key for which `may_evict` may have been false can be evicted from now on."""

    def clear(self) -> None:
        """Forget all resident keys and everything learned."""

    def __len__(self) -> int:
        """Return the number of resident keys, in use or not."""


METHODS = ("add", "touch", "discard", "victims", "evictable_again", "clear", "__len__")

BUILT_IN: dict[str, Callable[[int], Policy]] = {"lru": LruPolicy, "arc": ArcPolicy}


def make_policy(name: str, capacity: int) -> Policy:
    """Return the policy of that name for a tier of `capacity` chunks.

    Args:
        name: "lru", "arc", or a third party's "package.module:Class".
        capacity: Chunks of the tier.

    Raises:
        PolicyError: There is no such policy; the text gives the cause and what to write instead.
    """
    if capacity < 1:
        raise PolicyError(f"an eviction policy is for 1 chunk or more, not {capacity}: give the tier more memory")
    built_in = BUILT_IN.get(name)
    if built_in is not None:
        return built_in(capacity)
    module_name, _, class_name = name.partition(":")
    if not module_name or not class_name:
        names = ", ".join(sorted(BUILT_IN))
        raise PolicyError(
            f"there is no eviction policy {name!r}: write one of {names}, or package.module:Class for a class of your own"
        )
    try:
        policy_class = getattr(importlib.import_module(module_name), class_name)
    except AttributeError as error:
        raise PolicyError(f"eviction policy {name!r}: module {module_name} has no {class_name}") from error
    except Exception as error:  # A module can raise any error while it is imported.
        raise PolicyError(
            f"eviction policy {name!r}: importing {module_name} failed ({type(error).__name__}: {error}); "
            "it must be installed in the environment of the engine, or be on PYTHONPATH"
        ) from error
    try:
        policy = policy_class(capacity)
    except Exception as error:  # A third party's constructor can raise any error.
        raise PolicyError(
            f"eviction policy {name!r}: {class_name}({capacity}) failed ({type(error).__name__}: {error}); "
            "it is called with the capacity in chunks"
        ) from error
    missing = [method for method in METHODS if not callable(getattr(policy, method, None))]
    if missing:
        raise PolicyError(f"eviction policy {name!r}: {class_name} lacks {', '.join(missing)}; see {__name__}.Policy")
    return cast(Policy, policy)
