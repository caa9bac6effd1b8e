# SPDX-License-Identifier: Apache-2.0
"""The time that a replica's steps and loads take. Pure values.

The defaults are those of an 8B dense model in bf16 on one H100 SXM, from its data sheet (989 TFLOPS dense bf16,
3.35 TB/s HBM3, PCIe 5.0 x16) and the shares of it that inference engines reach.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from kvrouter.simulator.cache.shapes import Geometry

# Bytes of a token in all layers: 8 KV heads of 128, 32 layers, 2 bytes.
TOKEN_BYTES = 128 * 1024


@dataclass(frozen=True, slots=True)
class Timing:
    """The rates of one replica. A step computes its prefill tokens and one token of each decoding request together."""

    # 2 x 8e9 FLOP a token at half of 989 TFLOPS, which compute-bound prefill reaches with chunks of thousands of
    # tokens.
    prefill_tokens_per_s: float = 30_000.0
    # 16 GB of weights read at 3.35 TB/s are 4.8 ms; launches, sampling and the scheduler come on top.
    step_base_s: float = 0.006
    # The KV of a few thousand tokens, at 128 KiB a token (8 KV heads of 128, 32 layers), read at 3.35 TB/s.
    decode_sequence_s: float = 0.0002
    # 128 KiB a token over PCIe 5.0 x16 at 50 of its 64 GB/s.
    load_tokens_per_s: float = 380_000.0
    # A transfer's launch and its notice to the scheduler.
    load_base_s: float = 0.001
    # Fetching from another replica's CPU tier: a chunk on the source's link, and the way to the source and back.
    peer_chunk_s: float = 0.0
    peer_latency_s: float = 0.0

    def __post_init__(self) -> None:
        rates = (self.prefill_tokens_per_s, self.load_tokens_per_s)
        times = (
            self.step_base_s,
            self.decode_sequence_s,
            self.load_base_s,
            self.peer_chunk_s,
            self.peer_latency_s,
        )
        if not (all(rate > 0 for rate in rates) and all(time >= 0 for time in times)):
            raise ValueError(f"rates are above 0 and times are not below it, unlike in {self}")

    def lending(self, geometry: Geometry, bytes_per_s: float, latency_s: float) -> Timing:
        """Return these times with those of a link between CPU tiers. Raises ValueError for a rate that is not above 0."""
        if not bytes_per_s > 0:
            raise ValueError(f"a link carries more than 0 bytes/s, not {bytes_per_s:g}")
        groups = geometry.groups
        # A chunk has the layers of one group, and a token has the bytes of all of them.
        chunk_bytes = TOKEN_BYTES * max(group.block_size for group in groups) / len(groups)
        return dataclasses.replace(self, peer_chunk_s=chunk_bytes / bytes_per_s, peer_latency_s=latency_s)

    def step_s(self, prefill_tokens: int, decodes: int) -> float:
        """Return the seconds that one step takes."""
        return self.step_base_s + prefill_tokens / self.prefill_tokens_per_s + decodes * self.decode_sequence_s

    def load_s(self, tokens: int) -> float:
        """Return the seconds until `tokens` tokens have been loaded from the CPU tier."""
        return self.load_base_s + tokens / self.load_tokens_per_s


# Takes no time: for tests and callers that only need the decisions.
INSTANT = Timing(float("inf"), 0.0, 0.0, float("inf"), 0.0)
