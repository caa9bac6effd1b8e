# SPDX-License-Identifier: Apache-2.0
"""Translates Dynamo's form of a registration (addresses, ranks, groups) into ours. Pure.

In Dynamo's form `endpoint` is the engine's HTTP address, events have their own fields, and one registration names all
ranks.
Source: ai-dynamo-runtime 1.6.1, `python -m dynamo.select_service`; tests/golden/dynamo_1_6_1.json has its answers.
"""

from __future__ import annotations

import msgspec

from kvrouter.contract.registrations import RegisterBody, WorkerPatch
from kvrouter.router.base.common.errors import BadQuestion
from kvrouter.router.model.workers.worker_spec import MAX_DP_RANK

# The model of a registration that names none.
DEFAULT_MODEL = "default"
# Dynamo can split the workers of one model into groups; here a model is one group.
ROUTING_GROUP = "default"
# This is more ranks than any engine has; one registration makes a stream for each rank.
MAX_RANKS = 256

# Dynamo's lifecycle of a worker.
SCHEDULABLE = "schedulable"
INCOMPLETE = "incomplete"
UNSCHEDULABLE = "unschedulable"


def check_group(routing_group: str | None) -> None:
    """Raise BadQuestion for any group but the default one, because its workers would not be separated from others."""
    if routing_group not in (None, "", ROUTING_GROUP):
        raise BadQuestion(
            "routing_group is not supported: all workers of a model are one group; register the group's workers under a "
            "model name of its own"
        )


def speaks_http(endpoint: object) -> bool:
    """Return whether this is Dynamo's `endpoint`; ours is a ZMQ address."""
    return isinstance(endpoint, str) and endpoint.lower().startswith(("http://", "https://"))


def registrations_in(body: RegisterBody) -> list[RegisterBody]:
    """Return the registration in our form, one for each rank. Raises BadQuestion if it is not valid.

    A body that already has our form is returned unchanged.
    """
    check_group(body.routing_group)
    if not _is_dynamo(body):
        return [body]
    first = _start_rank(body.data_parallel_start_rank, body.dp_rank)
    events = _events(body.kv_events_endpoint, body.kv_events_endpoints, first, body.data_parallel_size)
    model = body.model if (body.model, body.model_name, body.modelname) != (None, None, None) else DEFAULT_MODEL
    url, endpoint = (body.endpoint, None) if speaks_http(body.endpoint) else (body.url, body.endpoint)
    return [
        msgspec.structs.replace(
            body,
            model=model,
            dp_rank=rank,
            endpoint=event_endpoint or endpoint,
            # One replay address serves one rank: another rank's batches must not be taken for this one's.
            replay_endpoint=body.replay_endpoint if len(events) == 1 and (event_endpoint or endpoint) else None,
            url=url,
        )
        for rank, event_endpoint in events.items()
    ]


def patch_in(body: WorkerPatch) -> WorkerPatch:
    """Return the patch in our form. Raises BadQuestion if it changes ranks.

    A body that already has our form is returned unchanged.
    """
    check_group(body.routing_group)
    if not _is_dynamo(body):
        return body
    if body.kv_events_endpoints or body.data_parallel_size is not None or body.data_parallel_start_rank is not None:
        raise BadQuestion("ranks cannot be changed by PATCH: DELETE the worker and register it again")
    unchanged = {
        # Dynamo's clients send all fields, with null for fields that stay.
        name: msgspec.UNSET
        for name in (
            "endpoint",
            "replay_endpoint",
            "patch_endpoint",
            "patch_key",
            "engine_key",
            "peer",
            "url",
            "block_size",
            "lora_name",
        )
        if getattr(body, name) is None
    }
    changed: dict[str, object] = {}
    if speaks_http(body.endpoint):
        changed = {"url": body.endpoint, "endpoint": msgspec.UNSET}
    if body.kv_events_endpoint is not None:
        changed["endpoint"] = body.kv_events_endpoint
    patched: WorkerPatch = msgspec.structs.replace(body, **unchanged | changed)
    return patched


def _is_dynamo(body: RegisterBody | WorkerPatch) -> bool:
    """Return whether the body has Dynamo's form."""
    fields = (body.kv_events_endpoint, body.kv_events_endpoints, body.data_parallel_size, body.data_parallel_start_rank)
    return fields != (None, None, None, None) or speaks_http(body.endpoint)


def _start_rank(start: int | None, dp_rank: int | None) -> int:
    """Return the first rank of a registration. Raises BadQuestion if it is out of range."""
    first = start if start is not None else dp_rank or 0
    if not 0 <= first <= MAX_DP_RANK:
        raise BadQuestion(f"data_parallel_start_rank must be a whole number, 0 to {MAX_DP_RANK}")
    return first


def _events(
    endpoint: str | None, by_rank: dict[str, str] | None, first: int, size: int | None
) -> dict[int, str | None]:
    """Return the event endpoint of each rank. Raises BadQuestion if the endpoints and the ranks do not fit together.

    Args:
        endpoint: The endpoint of a single rank.
        by_rank: The endpoints of several ranks, by the rank as text.
        first: The first rank.
        size: The number of ranks; None means one.
    """
    count = 1 if size is None else size
    if not 1 <= count <= MAX_RANKS:
        raise BadQuestion(f"data_parallel_size must be a whole number, 1 to {MAX_RANKS}")
    if not by_rank:
        if count > 1 and endpoint is not None:
            raise BadQuestion(
                "kv_events_endpoint is one rank's: with data_parallel_size over 1, write kv_events_endpoints, "
                'for example {"0": "tcp://h:5557", "1": "tcp://h:5558"}'
            )
        return dict.fromkeys(range(first, first + count), endpoint)
    ranks = range(first, first + count)
    endpoints: dict[int, str | None] = {rank: by_rank.get(str(rank)) for rank in ranks}
    unknown_ranks = sorted(set(by_rank) - set(map(str, ranks)))
    if unknown_ranks:
        raise BadQuestion(
            f"kv_events_endpoints has {unknown_ranks[0][:40]!r}, which is none of the ranks {first} to {first + count - 1}; "
            "say how many there are by data_parallel_size"
        )
    return endpoints
