# SPDX-License-Identifier: Apache-2.0
"""Disaggregated prefill over HTTP: the `kv_transfer_params` of vLLM's NixlConnector, read and written.

A prefill replica gets a request with `do_remote_decode` and answers where the prompt's blocks are. A decode replica
gets that answer, which has `do_remote_prefill`, and receives the prompt instead of computing it. It receives the whole
prompt at the rate of a load, and without contacting the other replica. The prefill replica frees its blocks at once,
while vLLM keeps them until they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvrouter.simulator.cache.job import Handover, Job

# Fields that a decode replica needs of the other replica; if one is missing, it computes the prompt, as vLLM does.
NEEDED = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")

PROMPT_CACHED = "remote_prefill_cached_tokens"


def part(params: Mapping[str, Any] | None) -> Handover:
    """Return a request's part in P/D, by its `kv_transfer_params`."""
    if params and params.get("do_remote_prefill"):
        complete = params.get("remote_block_ids") and all(name in params for name in NEEDED)
        return Handover.TAKES if complete else Handover.NONE
    return Handover.GIVES if params and params.get("do_remote_decode") else Handover.NONE


def given(job: Job, *, engine_id: str, request_id: str, host: str, port: int) -> dict[str, Any] | None:
    """Return the `kv_transfer_params` for a decode replica; None if the request is not to be continued elsewhere."""
    if job.handover is not Handover.GIVES:
        return None
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": job.given_blocks,
        "remote_engine_id": engine_id,
        "remote_request_id": request_id,
        "remote_host": host,
        "remote_port": port,
        "tp_size": 1,
        "remote_num_tokens": job.computed,
        PROMPT_CACHED: job.cached,
    }


def cached_tokens(job: Job, params: Mapping[str, Any] | None) -> int:
    """Return the tokens that usage reports as cached: for a received prompt, the prefill replica's, as in vLLM."""
    cached = params.get(PROMPT_CACHED) if params and job.handover is Handover.TAKES else None
    return cached if isinstance(cached, int) else job.cached
