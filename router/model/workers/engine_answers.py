# SPDX-License-Identifier: Apache-2.0
"""What an engine says of itself over HTTP: its model, and where its event streams are. Pure: from answers to values.

Where it says that, and in which form, `router/model/engines/` has for each.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from http import HTTPStatus
from urllib.parse import urlsplit

import msgspec

from kvrouter.router.model.workers.worker_spec import MAX_DP_RANK, endpoint_problem, name_problem

MODELS_PATH = "/v1/models"
WRITE_THEM = "write events=tcp://HOST:PORT (and replay=) for this worker"
# Statuses with which an engine, or a proxy before it, answers without the right key.
REFUSALS = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN})
# The fix for an engine that answers 401 or 403.
GIVE_KEY = "start the router with --worker-api-key KEY, the one of the engine's --api-key"
KEY_WANTED = f"it wants an API key: {GIVE_KEY}"

# Hundreds of ranks are the largest deployments; each becomes a worker.
MAX_RANKS = 1_024


def refusal_problem(url: str, status: int | None) -> str:
    """Return why an engine that refuses its list of models is of no use; empty if it does not refuse it."""
    if status is None:
        return ""
    return f"{url.rstrip('/')}{MODELS_PATH} answers {status}, so no text can be tokenized there and requests fail: {KEY_WANTED}"


class Stream(msgspec.Struct, frozen=True):
    """Where one rank publishes. note: what cannot be used of what it said."""

    events: str
    replay: str | None = None
    note: str = ""


class EngineAnswers(msgspec.Struct, frozen=True):
    """The answers of one engine about itself."""

    # The model that it serves; None: not known yet.
    model: str | None = None
    # Its event streams by rank; None: not known yet; empty: it has none.
    streams: dict[int, Stream] | None = None
    # Whether it has no way to describe its streams.
    silent: bool = False
    # Why any of this is unknown or missing.
    problem: str = ""
    # The kind of engine that it showed to be (`engine_name.py`).
    engine: str | None = None
    # How to make its model known; empty while it is.
    fix: str = ""


class _Model(msgspec.Struct):
    id: str
    # vLLM names the base model as the parent of a LoRA adapter.
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class EventsConfig(msgspec.Struct):
    """How one rank publishes its KV events, as vLLM says it."""

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = ""
    replay_endpoint: str | None = None


_models = msgspec.json.Decoder(_Models)


def model_in(answer: bytes) -> str:
    """The base model that a list of models names. Raises ValueError with what is wrong."""
    try:
        models = _models.decode(answer).data
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"its {MODELS_PATH} is no list of models: {error}") from None
    for model in models:
        if model.parent is None:
            if problem := name_problem(model.id):
                raise ValueError(f"its {MODELS_PATH} names a model that {problem}")
            return model.id
    raise ValueError(f"its {MODELS_PATH} names no model")


def streams_of(configs: Mapping[int, EventsConfig], url: str, start_with: str) -> EngineAnswers:
    """The streams of the ranks of the engine at `url`. start_with: what makes it publish where it can be read."""
    host = urlsplit(url).hostname or ""
    found: dict[int, Stream] = {}
    problem = ""
    for rank, config in sorted(configs.items())[:MAX_RANKS]:
        if not config.enable_kv_cache_events or config.publisher != "zmq" or not 0 <= rank <= MAX_DP_RANK:
            continue
        events = _published_at(config.endpoint, host)
        if events is None:
            problem = (
                f"its engine publishes to {config.endpoint!r}, where this router cannot subscribe: "
                f"{start_with}, or {WRITE_THEM}"
            )
            continue
        replay = None if config.replay_endpoint is None else _bound_at(config.replay_endpoint, host)
        unusable = config.replay_endpoint is not None and replay is None
        note = f"its replay endpoint {config.replay_endpoint!r} cannot be reached from here" if unusable else ""
        found[rank] = Stream(events, replay, note)
    if not found and not problem:
        problem = f"its engine publishes no KV events: {start_with}"
    return EngineAnswers(streams=found, problem="" if found else problem)


def _published_at(endpoint: str, host: str) -> str | None:
    """Where to subscribe. vLLM binds to wildcards, IPC and the node's own address, and connects to all others: a host
    by its name is somebody else's, and whatever listens on that port of the engine's own host need not be this
    engine."""
    given = _host_of(endpoint)
    if given is None or _is_wildcard(given) or _address(given) is not None:
        return _bound_at(endpoint, host)
    return None


def _bound_at(endpoint: str, host: str) -> str | None:
    """Where an endpoint that the engine binds can be reached, if that is known."""
    if endpoint.startswith("ipc://"):
        # On the engine's machine; this one, if it is reached over loopback.
        return endpoint if _is_loopback(host) and not endpoint_problem(endpoint) else None
    given = _host_of(endpoint)
    if given is None:
        return None
    address = _address(given)
    if address is None or _is_wildcard(given):
        reached = host
    elif address.is_loopback and not _is_loopback(host):
        return None
    else:
        reached = given
    port = endpoint.rpartition(":")[2]
    found = f"tcp://{bracketed(reached)}:{port}"
    return None if endpoint_problem(found) else found


def bracketed(host: str) -> str:
    """A host as it stands before a port."""
    return f"[{host}]" if ":" in host else host


def _host_of(endpoint: str) -> str | None:
    if not endpoint.startswith("tcp://"):
        return None
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    return host.removeprefix("[").removesuffix("]") or None


def _is_wildcard(host: str) -> bool:
    address = _address(host)
    return host == "*" or (address is not None and address.is_unspecified)


def _is_loopback(host: str) -> bool:
    address = _address(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
