# SPDX-License-Identifier: Apache-2.0
"""The names that another router may use for a worker: its id, its URL, or the host and port of that. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from kvrouter.router.base.common.ids import route_name

DEFAULT_PORTS = {"http": 80, "https": 443}


class FleetNames(NamedTuple):
    """The names of all workers, and their models."""

    # From every name of a worker to its ranks as the report shows them (`w0`, `w0@3`).
    names: Mapping[str, frozenset[str]]
    models: frozenset[str]

    def ranks(self, given: str) -> frozenset[str]:
        """Return the ranks that a name stands for, none for an unknown name.

        nginx writes a list of names after retries; the last one counts, as that worker answered.
        """
        last = given.replace(" : ", ", ").rpartition(",")[2].strip()
        return self.names.get(last) or self.names.get(_host_and_port(last), frozenset())

    @property
    def only_model(self) -> str | None:
        """Model of a request that names none, as in vLLM; None if there are several."""
        return next(iter(self.models)) if len(self.models) == 1 else None


def fleet_names(workers: Iterable[Mapping[str, Any]]) -> FleetNames:
    """Return the names in the entries of `GET /workers`. Raises KeyError, TypeError or ValueError for another shape."""
    names: dict[str, set[str]] = {}
    models = set()
    for worker in workers:
        worker_id, rank = str(worker["worker_id"]), int(worker["dp_rank"])
        name = route_name(worker_id, rank)
        models.add(str(worker["model"]))
        # `w0@0` is rank 0 alone, `w0` is all of the worker's ranks.
        aliases = {worker_id, f"{worker_id}@{rank}"}
        if url := worker["url"]:
            aliases.add(_host_and_port(str(url)))
        for alias in aliases - {""}:
            names.setdefault(alias, set()).add(name)
    return FleetNames({alias: frozenset(ranks) for alias, ranks in names.items()}, frozenset(models))


def _host_and_port(url: str) -> str:
    """Return `host:port` of a URL, or of a text that has this form already; otherwise an empty text."""
    try:
        parts = urlsplit(url if "://" in url else f"//{url}")
        port = parts.port or DEFAULT_PORTS.get(parts.scheme or "http")
    except ValueError:
        return ""
    return f"{parts.hostname}:{port}" if parts.hostname and port else ""
