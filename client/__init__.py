# SPDX-License-Identifier: Apache-2.0
"""A client of the router's HTTP API: `Client` blocks, `AsyncClient` is for asyncio."""

from kvrouter.client.async_client import AsyncClient
from kvrouter.client.errors import (
    AnswerLate,
    AnswerLost,
    AnswerUnreadable,
    BadRequest,
    Conflict,
    Forbidden,
    NotFound,
    RequestRefused,
    RouterError,
    RouterUnreachable,
    TooManyRequests,
    Unauthorized,
    Unavailable,
)
from kvrouter.client.retries import Retries
from kvrouter.client.select_body import SelectBody
from kvrouter.client.sync_client import Client
from kvrouter.client.transport import Timeouts
from kvrouter.contract.choices import (
    CandidateReply,
    CostTerms,
    PinnedBody,
    PrefillReply,
    PullReply,
    SelectReply,
    TokensReply,
)
from kvrouter.contract.health import HealthReply
from kvrouter.contract.hits import GroupCover, HeldRuns, HitLimit, Overlap, PeerHit
from kvrouter.contract.queries import InstanceReply, QueryBody, QueryByHashBody, QueryReply
from kvrouter.contract.registrations import CatalogBody, GroupBody, RegisterBody, RegisteredReply, UnregisterBody
from kvrouter.contract.worker_status import PatchStatus, PeerStatus, Recovery, ReuseStatus, TokensStatus, WorkerStatus

__all__ = [
    "AnswerLate",
    "AnswerLost",
    "AnswerUnreadable",
    "AsyncClient",
    "BadRequest",
    "CandidateReply",
    "CatalogBody",
    "Client",
    "Conflict",
    "CostTerms",
    "Forbidden",
    "GroupBody",
    "GroupCover",
    "HealthReply",
    "HeldRuns",
    "HitLimit",
    "InstanceReply",
    "NotFound",
    "Overlap",
    "PatchStatus",
    "PeerHit",
    "PeerStatus",
    "PinnedBody",
    "PrefillReply",
    "PullReply",
    "QueryBody",
    "QueryByHashBody",
    "QueryReply",
    "Recovery",
    "RegisterBody",
    "RegisteredReply",
    "RequestRefused",
    "Retries",
    "ReuseStatus",
    "RouterError",
    "RouterUnreachable",
    "SelectBody",
    "SelectReply",
    "Timeouts",
    "TokensReply",
    "TokensStatus",
    "TooManyRequests",
    "Unauthorized",
    "Unavailable",
    "UnregisterBody",
    "WorkerStatus",
]
