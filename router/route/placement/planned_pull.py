# SPDX-License-Identifier: Apache-2.0
"""The pull that belongs to a choice: which blocks the chosen worker fetches, from where, and how long it waits."""

from __future__ import annotations

import msgspec

from kvrouter.router.base.common.ids import WorkerKey

# The field of a request's `kv_transfer_params` that names the source; vLLM's p2p tier reads the same one.
SOURCE_FIELD = "remote_kv_source"


class PlannedPull(msgspec.Struct, frozen=True, gc=False):
    """The source that the request to the chosen worker names."""

    source: WorkerKey
    # The address at which the source lends its blocks.
    host: str
    port: int
    # The tokens that the chosen worker reuses if all blocks arrive, its own tiers included.
    tokens: int
    # The tokens among them that are fetched.
    fetched_tokens: int
    # Seconds within which the blocks must arrive; after that the engine computes the missing tokens.
    timeout_s: float
    # The tokens that the source lent to other requests when the pull was planned. They are transferred before.
    ahead_tokens: int = 0

    def source_params(self, kv_request_id: str) -> dict[str, object]:
        """Return the value of `remote_kv_source` that has the engine fetch the blocks.

        Args:
            kv_request_id: The name of the fetch, which vLLM's p2p tier needs.
        """
        return {
            "kv_request_id": kv_request_id,
            "remote_host": self.host,
            "remote_port": self.port,
            "timeout_s": self.timeout_s,
        }
