# SPDX-License-Identifier: Apache-2.0
"""Which worker another router means: by its id, its URL, or the host and port of that. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from kvrouter.router.base.common.ids import route_name

DEFAULT_PORTS = {"http": 80, "https": 443}


class FleetNames(NamedTuple):
    """names: by everything that a worker may be called, its ranks as the report shows them (`w0`, `w0@3`). models:
    those of the workers."""

    names: Mapping[str, frozenset[str]]
    models: frozenset[str]

    def ranks(self, given: str) -> frozenset[str]:
        """The ranks that are meant, none where nothing is known by this name. Of the list that nginx writes after
        retries, the last counts: that one answered."""
        last = given.replace(" : ", ", ").rpartition(",")[2].strip()
        return self.names.get(last) or self.names.get(_host_and_port(last), frozenset())

    @property
    def only_model(self) -> str | None:
        """Of a request that names none, as in vLLM."""
        return next(iter(self.models)) if len(self.models) == 1 else None


def fleet_names(workers: Iterable[Mapping[str, Any]]) -> FleetNames:
    """From the entries of `GET /workers`. Raises KeyError, TypeError and ValueError for another shape."""
    names: dict[str, set[str]] = {}
    models = set()
    for worker in workers:
        worker_id, rank = str(worker["worker_id"]), int(worker["dp_rank"])
        name = route_name(worker_id, rank)
        models.add(str(worker["model"]))
        # `w0@0` is rank 0 alone, `w0` all of its ranks.
        called = {worker_id, f"{worker_id}@{rank}"}
        if url := worker["url"]:
            called.add(_host_and_port(str(url)))
        for one in called - {""}:
            names.setdefault(one, set()).add(name)
    return FleetNames({one: frozenset(ranks) for one, ranks in names.items()}, frozenset(models))


def _host_and_port(url: str) -> str:
    """`host:port` of a URL or of what is that already; empty for what is neither."""
    try:
        parts = urlsplit(url if "://" in url else f"//{url}")
        port = parts.port or DEFAULT_PORTS.get(parts.scheme or "http")
    except ValueError:
        return ""
    return f"{parts.hostname}:{port}" if parts.hostname and port else ""
