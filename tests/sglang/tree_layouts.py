# SPDX-License-Identifier: Apache-2.0
"""Layouts of SGLang's radix cache: components, pages, and windows below, at and off a page's edge."""

from __future__ import annotations

from typing import NamedTuple


class TreeLayout(NamedTuple):
    """One layout of the cache, and the namespaces of its prompts."""

    name: str
    components: tuple[str, ...]
    # Tokens of a page.
    page: int
    # Tokens of the sliding window (SWA).
    window: int | None = None
    # Whether keys are pairs of tokens.
    eagle: bool = False
    # Namespaces of the prompts: salts and adapters.
    salts: tuple[str | None, ...] = (None,)
    loras: tuple[str | None, ...] = (None,)


FULL, SWA, MAMBA = ("FULL",), ("FULL", "SWA"), ("FULL", "MAMBA")
ALL = ("FULL", "SWA", "MAMBA")
SALTS, LORAS = (None, "a", "salt é"), (None, "adapter-" + "0" * 32, "other-" + "1" * 32)

LAYOUTS = [
    *(TreeLayout(f"full-{page}", FULL, page) for page in (1, 16, 64)),
    *(TreeLayout(f"swa-1-{window}", SWA, 1, window) for window in (1, 4, 9)),
    *(TreeLayout(f"swa-16-{window}", SWA, 16, window) for window in (8, 16, 17, 40)),
    *(TreeLayout(f"swa-64-{window}", SWA, 64, window) for window in (32, 64, 100)),
    *(TreeLayout(f"mamba-{page}", MAMBA, page) for page in (1, 16, 64)),
    *(TreeLayout(f"all-1-{window}", ALL, 1, window) for window in (4, 9)),
    *(TreeLayout(f"all-16-{window}", ALL, 16, window) for window in (8, 24)),
    TreeLayout("all-64-100", ALL, 64, 100),
    *(TreeLayout(f"eagle-full-{page}", FULL, page, eagle=True) for page in (1, 16)),
    *(TreeLayout(f"eagle-swa-{page}-{w}", SWA, page, w, eagle=True) for page, w in ((1, 4), (16, 20))),
    TreeLayout("salt-full-16", FULL, 16, salts=SALTS),
    TreeLayout("salt-swa-1", SWA, 1, 5, salts=SALTS),
    TreeLayout("salt-mamba-16", MAMBA, 16, salts=SALTS),
    TreeLayout("lora-full-16", FULL, 16, loras=LORAS),
    TreeLayout("lora-all-1", ALL, 1, 4, loras=LORAS),
    TreeLayout("lora-salt-full-1", FULL, 1, salts=SALTS, loras=LORAS),
]

# Layouts whose prompts live in namespaces of salts and adapters, where a core's digests are not those of its events.
NAMESPACED = [
    *(TreeLayout(f"both-full-{page}", FULL, page, salts=SALTS, loras=LORAS) for page in (1, 16)),
    TreeLayout("salted-full-16", FULL, 16, salts=("a", "b")),
    TreeLayout("adapted-full-16", FULL, 16, loras=LORAS[1:]),
    TreeLayout("both-swa-1-5", SWA, 1, 5, salts=SALTS, loras=LORAS),
    TreeLayout("both-swa-16-20", SWA, 16, 20, salts=SALTS, loras=LORAS),
    *(TreeLayout(f"both-mamba-{page}", MAMBA, page, salts=SALTS, loras=LORAS) for page in (1, 16)),
    TreeLayout("both-all-16-24", ALL, 16, 24, salts=SALTS, loras=LORAS),
    *(TreeLayout(f"both-eagle-full-{page}", FULL, page, eagle=True, salts=SALTS, loras=LORAS) for page in (1, 16)),
    TreeLayout("both-eagle-swa-16-20", SWA, 16, 20, eagle=True, salts=SALTS, loras=LORAS),
]
