# SPDX-License-Identifier: Apache-2.0
"""A planned pull becomes the source that a request names, as engines read it."""

from __future__ import annotations

from kvrouter.engine_patch.offload.peer.peer_source import FIELD, PeerSource, SourceWish, source_wish
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.route.placement.planned_pull import SOURCE_FIELD, PlannedPull

PULL = PlannedPull(WorkerKey("m", "w1", 0), "10.0.0.7", 5710, tokens=64, fetched_tokens=48, timeout_s=0.25)


def test_the_source_has_the_fields_of_vllms_p2p_tier() -> None:
    assert PULL.source_params("s7") == {
        "kv_request_id": "s7",
        "remote_host": "10.0.0.7",
        "remote_port": 5710,
        "timeout_s": 0.25,
    }


def test_our_peer_tier_reads_the_source_and_the_deadline() -> None:
    assert SOURCE_FIELD == FIELD
    wish = source_wish({SOURCE_FIELD: PULL.source_params("s7")})
    assert wish == SourceWish(PeerSource("10.0.0.7", 5710), 0.25)
