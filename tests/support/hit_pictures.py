# SPDX-License-Identifier: Apache-2.0
"""The pictures of docs/explanation/hit-rule.md, drawn from the hits that the router's own rule computes.

python -m tests.support.hit_pictures    # writes docs/images/hit-*.svg
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from kvrouter.router.base.common.ids import CPU, GPU, Place
from kvrouter.router.model.kvcache.catalog import Group
from tests.support.judging import judge

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
BLOCK = 16
PROMPT_TOKENS = 168
WINDOW = 48

_FULL = Group(0, "full_attention", BLOCK, None, None)
_WINDOW = Group(0, "sliding_window", BLOCK, WINDOW, None)
_SECOND_WINDOW = Group(1, "sliding_window", BLOCK, WINDOW, None)
_MAMBA = Group(0, "mamba", BLOCK, None, None)
_NAMES = {
    "full_attention": "full attention",
    "sliding_window": f"sliding window, {WINDOW} tokens",
    "mamba": "Mamba state",
}
_MEDIA = {GPU: "GPU", CPU: "CPU"}

# In SVG user units: a block is BOX wide, and the scaled picture fits a phone's screen.
BOX, HEIGHT, GAP, LEFT, TOP = 48, 30, 30, 24, 54
WIDTH = LEFT * 2 + 11 * BOX
# The background is opaque, so that the picture is readable on any page; it is dark if the browser prefers that.
STYLE = """
    .page { fill: #ffffff; stroke: #d0d7de } text { font: 15px system-ui, sans-serif; fill: #1f2328 }
    .small { font-size: 13px; fill: #59636e } .on { fill: #1f2328 } .none { fill: none; stroke: #8c959f; stroke-dasharray: 3 3 }
    .held { fill: #54aeff; stroke: #0969da } .tier { fill: #f2b84b; stroke: #9a6700 }
    .hit { stroke: #cf222e; stroke-width: 2.5 } .hit-text { fill: #cf222e; font-weight: 600 }
    @media (prefers-color-scheme: dark) {
      .page { fill: #161b22; stroke: #3d444d } text { fill: #f0f6fc } .small { fill: #9198a1 } .on { fill: #ffffff }
      .none { stroke: #656c76 } .held { fill: #1f6feb; stroke: #79c0ff } .tier { fill: #9e6a03; stroke: #e3b341 }
      .hit { stroke: #ff7b72 } .hit-text { fill: #ff7b72 }
    }"""


@dataclass(frozen=True)
class Picture:
    name: str
    title: str
    groups: tuple[Group, ...]
    held: Mapping[Place, tuple[int, ...]]

    @property
    def gpu_tokens(self) -> int:
        return judge(self.groups, self.held, PROMPT_TOKENS).on_gpu

    @property
    def tokens(self) -> int:
        """Tokens that the engine reuses, tiers included."""
        return judge(self.groups, self.held, PROMPT_TOKENS).by_tier[1]

    def covered(self) -> dict[int | None, int]:
        """Return the tokens that the GPU's hit would have if only one group decided, by group."""
        return {
            group_hit.group_idx: group_hit.covered for group_hit in judge(self.groups, self.held, PROMPT_TOKENS).groups
        }


PICTURES = (
    Picture("hit-full", "Full attention", (_FULL,), {Place(0, GPU): (0, 1, 2, 3, 4, 5, 7, 8)}),
    Picture("hit-window", "Sliding window", (_WINDOW,), {Place(0, GPU): (0, 4, 5, 6, 9)}),
    Picture("hit-mamba", "Mamba", (_MAMBA,), {Place(0, GPU): (3, 7)}),
    Picture(
        "hit-two-groups",
        "Two groups",
        (_FULL, _SECOND_WINDOW),
        {Place(0, GPU): tuple(range(9)), Place(1, GPU): (2, 3, 4, 8)},
    ),
    Picture(
        "hit-offload",
        "Two groups and a CPU tier",
        (_FULL, _SECOND_WINDOW),
        {
            Place(0, GPU): tuple(range(9)),
            Place(0, CPU): (5, 6, 7, 8),
            Place(1, GPU): (2, 3, 4, 8),
            Place(1, CPU): (6, 7, 8),
        },
    ),
)


def draw(picture: Picture) -> str:
    """Return the picture as a self-contained SVG document."""
    rows = sorted(picture.held, key=lambda place: (place.group_idx, place.medium != GPU))
    bottom = TOP + len(rows) * (HEIGHT + GAP) - GAP + 12
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 34}" role="img">',
        f"  <title>{escape(picture.title)}: {picture.tokens} of {PROMPT_TOKENS} tokens are reused</title>",
        f"  <style>{STYLE}\n  </style>",
        f'  <rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{bottom + 33}" rx="8"/>',
    ]
    blocks = PROMPT_TOKENS // BLOCK
    for number in range(blocks + 1):
        lines.append(
            f'  <text class="small" x="{LEFT + number * BOX}" y="22" text-anchor="middle">{number * BLOCK}</text>'
        )
    for row, place in enumerate(rows):
        y = TOP + row * (HEIGHT + GAP)
        (kind,) = (group.kind for group in picture.groups if group.group_idx == place.group_idx)
        medium = _MEDIA[place.medium]
        lines.append(f'  <text x="{LEFT}" y="{y - 7}">{escape(_NAMES[kind])}, {medium}</text>')
        for number in range(blocks):
            is_held = number in picture.held[place]
            style = ("held" if place.medium == GPU else "tier") if is_held else "none"
            lines.append(
                f'  <rect class="{style}" x="{LEFT + number * BOX + 2}" y="{y}" width="{BOX - 4}" '
                f'height="{HEIGHT}" rx="4"/>'
            )
            lines.append(
                f'  <text class="small{" on" if is_held else ""}" x="{LEFT + number * BOX + BOX // 2}" y="{y + 20}" '
                f'text-anchor="middle">{number}</text>'
            )
        tail = LEFT + blocks * BOX + 2
        lines.append(f'  <rect class="none" x="{tail}" y="{y}" width="{BOX // 2 - 4}" height="{HEIGHT}" rx="4"/>')
    ends = [(picture.tokens, f"reused: {picture.tokens} tokens")]
    if picture.gpu_tokens != picture.tokens:
        ends.append((picture.gpu_tokens, f"GPU: {picture.gpu_tokens}"))
    for tokens, text in ends:
        x = LEFT + tokens * BOX // BLOCK
        lines.append(f'  <line class="hit" x1="{x}" y1="28" x2="{x}" y2="{bottom}"/>')
        lines.append(f'  <text class="hit-text" x="{x}" y="{bottom + 16}" text-anchor="middle">{text}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    for picture in PICTURES:
        (IMAGES / f"{picture.name}.svg").write_text(draw(picture))
