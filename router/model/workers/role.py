# SPDX-License-Identifier: Apache-2.0
"""What a worker is there for, and how a decode worker is handed a prompt that another one has computed. Pure values."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """`both` and `decode` answer requests, and may be handed their prompts; `prefill` computes prompts for others, and
    no more."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class HandoverWay(StrEnum):
    """How a decode worker learns where its prompt was computed.

    kv_transfer_params: the router asks the prefill worker first and puts its answer into the decode worker's body, as
    vLLM's connectors want it. header: the decode worker's sidecar does that; the router only names the prefill worker
    to it."""

    KV_TRANSFER_PARAMS = "kv_transfer_params"
    HEADER = "header"


def role_problem(text: str) -> str | None:
    """Why `text` is no role, with what to write instead."""
    return _problem(text, Role)


def handover_problem(text: str) -> str | None:
    """Why `text` is no way of a hand-over, with what to write instead."""
    return _problem(text, HandoverWay)


def _problem(text: str, kind: type[Role] | type[HandoverWay]) -> str | None:
    return None if text in list(kind) else f"must be one of {', '.join(kind)}"
