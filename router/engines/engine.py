# SPDX-License-Identifier: Apache-2.0
"""What the router has to know of an engine besides its events' general form. Pure: descriptions hold no state."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from kvrouter.router.kvcache.block_hash import HashScheme
from kvrouter.router.workers.engine_answers import EngineAnswers
from kvrouter.router.workers.registration import CatalogSpec


class Engine(msgspec.Struct, frozen=True, eq=False):
    """One kind of engine.

    schemes: what may explain a worker's hashes, likeliest first, from what is stated and the configured seed.
    completed: what is stated of a catalog, with what is the same in every one of these engines. media: its events'
    names of media, where the index has others. tiers_shown: the shape of tier events shows which connector keeps them.
    stock_problem: why the engine's own events alone prove no hit of a worker with this stated catalog; empty where they
    do. info_path: an HTTP path that this engine alone has; streams_in: what its answer says, from the engine at this
    URL; raises ValueError where that cannot be read.
    """

    name: str
    title: str
    schemes: Callable[[CatalogSpec, str | None], tuple[HashScheme, ...]]
    completed: Callable[[CatalogSpec], CatalogSpec]
    stock_problem: Callable[[CatalogSpec], str]
    media: Mapping[str, str]
    tiers_shown: bool
    info_path: str
    streams_in: Callable[[bytes, str], EngineAnswers]
