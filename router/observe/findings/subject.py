# SPDX-License-Identifier: Apache-2.0
"""The subject of a finding: a text for people, and the workers and the model that programs look for. Pure."""

from __future__ import annotations

from typing import NamedTuple, Self

from kvrouter.router.base.common.escaping import printable
from kvrouter.router.base.common.ids import WorkerKey, route_name


class Subject(NamedTuple):
    """The subject of a finding."""

    text: str
    # The workers that it is about, by their names in routes; empty if it is about none in particular.
    workers: tuple[str, ...] = ()
    # The model that it is about; None if it is about none, or the model is not known.
    model: str | None = None

    @classmethod
    def of_worker(cls, worker: WorkerKey) -> Self:
        """Return the subject of a finding about one worker."""
        return cls(f"worker {printable(worker.route_name)}", (worker.route_name,), worker.model or None)

    @classmethod
    def of_listed(cls, worker_id: str, dp_rank: int, source: str, model: str | None = None) -> Self:
        """Return the subject of a finding about a worker as one source lists it."""
        text = f"worker {printable(worker_id)} (rank {dp_rank}) of {source}"
        return cls(text, (route_name(worker_id, dp_rank),), model or None)

    @classmethod
    def of_model(cls, model: str, workers: tuple[str, ...] = ()) -> Self:
        """Return the subject of a finding about a model."""
        return cls(f"model {printable(model)}", workers, model)

    @classmethod
    def of_engine(cls, model: str, url: str) -> Self:
        """Return the subject of a finding about one engine of a model, or about the model if `url` is empty."""
        about_model = cls.of_model(model)
        return about_model._replace(text=f"{about_model.text} at {url}") if url else about_model
