# SPDX-License-Identifier: Apache-2.0
"""The role of a worker, and the way in which a decode worker gets a prompt that another worker computed. Pure values."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """The part that a worker takes in answering requests.

    Workers with the roles `both` and `decode` answer requests, and may get prompts that another worker computed. Workers
    with the role `prefill` only compute prompts for others.
    """

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class HandoverWay(StrEnum):
    """The way in which a decode worker learns where its prompt was computed."""

    # The router requests the prompt from the prefill worker first, and puts the answer into the decode worker's request,
    # as vLLM's connectors want it.
    KV_TRANSFER_PARAMS = "kv_transfer_params"
    # The decode worker's sidecar requests the prompt; the router only names the prefill worker in a header.
    HEADER = "header"


def role_problem(text: str) -> str | None:
    """Return which roles to write instead of `text`, or None if `text` is a role."""
    return _problem(text, Role)


def handover_problem(text: str) -> str | None:
    """Return which ways to write instead of `text`, or None if `text` is a way of a hand-over."""
    return _problem(text, HandoverWay)


def _problem(text: str, kind: type[Role] | type[HandoverWay]) -> str | None:
    return None if text in list(kind) else f"must be one of {', '.join(kind)}"
