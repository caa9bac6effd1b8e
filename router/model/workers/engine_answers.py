# SPDX-License-Identifier: Apache-2.0
"""An engine's own HTTP answers about itself, as values: its model, and the addresses of its event streams. Pure.

`router/model/engines/` has the paths and the forms of these answers for each kind of engine.
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
GIVE_KEY = "give the router the key of the engine's --api-key, as --worker-api-key or in --worker-api-keys-file"
# It is not known here whether the router sends no key or a wrong one.
NO_KEY_FITS = "it wants an API key, and the router has none for it or a wrong one"
KEY_WANTED = f"{NO_KEY_FITS}: {GIVE_KEY}"

# The largest deployments have hundreds of ranks, each of which becomes a worker.
MAX_RANKS = 1_024


def refusal_problem(url: str, status: int | None) -> str:
    """Return why an engine that refuses its list of models is of no use, or "" if `status` is None."""
    if status is None:
        return ""
    return f"{url.rstrip('/')}{MODELS_PATH} answers {status}, so no text can be tokenized there and requests fail: {KEY_WANTED}"


class Stream(msgspec.Struct, frozen=True):
    """The endpoints at which one rank publishes its events."""

    events: str
    # The endpoint that replays missed batches, or None.
    replay: str | None = None
    # Which part of the engine's answer cannot be used, or "".
    note: str = ""


class EngineAnswers(msgspec.Struct, frozen=True):
    """The answers of one engine about itself."""

    # The model that it serves, or None while it is not known.
    model: str | None = None
    # Its event streams by rank: empty if it has none, None while they are not known.
    streams: dict[int, Stream] | None = None
    # Whether the engine has no way to describe its streams.
    silent: bool = False
    # Why any of these values is unknown or missing, or "".
    problem: str = ""
    # The kind of engine that the answers show (`engine_name.py`), or None.
    engine: str | None = None
    # How to make the model known, or "" if it is known.
    fix: str = ""


class _Model(msgspec.Struct):
    id: str
    # vLLM names the base model as the parent of a LoRA adapter.
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class EventsConfig(msgspec.Struct):
    """The KV events configuration of one rank, with vLLM's field names."""

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = ""
    replay_endpoint: str | None = None


_models = msgspec.json.Decoder(_Models)


def model_in(answer: bytes) -> str:
    """Return the base model that an engine's list of models names.

    Raises ValueError if the answer is no such list, or names no base model with a valid name.
    """
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
    """Return the event streams of an engine's ranks, or the problem why there are none.

    Args:
        configs: The configuration of each rank.
        url: The HTTP address of the engine.
        start_with: How to start the engine so that it publishes where the router can subscribe, for the problem.
    """
    host = urlsplit(url).hostname or ""
    streams: dict[int, Stream] = {}
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
        streams[rank] = Stream(events, replay, note)
    if not streams and not problem:
        problem = f"its engine publishes no KV events: {start_with}"
    return EngineAnswers(streams=streams, problem="" if streams else problem)


def _published_at(endpoint: str, host: str) -> str | None:
    """Return where to subscribe to an engine that publishes to `endpoint`, or None if that is not known.

    vLLM binds to wildcards, IPC and the node's own address, and connects to all other endpoints. So a host that is
    given by its name belongs to another process, and the process that listens on that port of the engine's own host
    need not be this engine.
    """
    bind_host = _host_of(endpoint)
    if bind_host is None or is_wildcard(bind_host) or _address(bind_host) is not None:
        return _bound_at(endpoint, host)
    return None


def _bound_at(endpoint: str, host: str) -> str | None:
    """Return where an endpoint that the engine on `host` binds can be reached, or None if that is not known."""
    if endpoint.startswith("ipc://"):
        # The socket is on the engine's machine, which is this machine if the engine is reached over loopback.
        return endpoint if is_loopback(host) and not endpoint_problem(endpoint) else None
    bind_host = _host_of(endpoint)
    if bind_host is None:
        return None
    address = _address(bind_host)
    if address is None or is_wildcard(bind_host):
        reached = host
    elif address.is_loopback and not is_loopback(host):
        return None
    else:
        reached = bind_host
    port = endpoint.rpartition(":")[2]
    reachable = f"tcp://{bracketed(reached)}:{port}"
    return None if endpoint_problem(reachable) else reachable


def bracketed(host: str) -> str:
    """Return a host in the form that it has before a port, which is in brackets for an IPv6 address."""
    return f"[{host}]" if ":" in host else host


def _host_of(endpoint: str) -> str | None:
    if not endpoint.startswith("tcp://"):
        return None
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    return host.removeprefix("[").removesuffix("]") or None


def is_wildcard(host: str) -> bool:
    """Return whether a host stands for all addresses of its machine."""
    address = _address(host)
    return host == "*" or (address is not None and address.is_unspecified)


def is_loopback(host: str) -> bool:
    """Return whether a host is surely the machine that uses it."""
    address = _address(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
