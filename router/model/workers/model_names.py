# SPDX-License-Identifier: Apache-2.0
"""Which model a request's `model` means: a registered one, another name for it, or a LoRA adapter and who has it. Pure.

Adapters are known from registrations (`lora_name`, `catalog.lora_paths`) and from what engines list.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from kvrouter.router.base.common.errors import SettingError, UnknownModel
from kvrouter.router.base.common.escaping import printable
from kvrouter.router.model.workers.registration import Registration

# Names of models that an error lists.
MAX_LISTED = 20


class ServedModel(NamedTuple):
    """What a name means. model: as its workers are registered. worker_ids: only these have the adapter; None: all of
    the model."""

    model: str
    lora_name: str | None = None
    worker_ids: frozenset[str] | None = None


# The adapters of an engine: their names and the paths that they were loaded from.
Adapters = Mapping[str, str]


class ModelNames:
    """aliases: other names for models or adapters."""

    def __init__(self, aliases: Mapping[str, str]) -> None:
        self.aliases = dict(aliases)
        # All names that a request may use; an adapter of several models is Ambiguous.
        self._served: dict[str, ServedModel | AmbiguousModel] = {}

    def learn(self, registrations: Iterable[Registration], listed: Mapping[str, Adapters]) -> None:
        """What is registered now, and what the engines list, by their URL."""
        models: set[str] = set()
        # By name, then by model: the workers that have the adapter.
        adapters: dict[str, dict[str, set[str]]] = {}
        for registration in registrations:
            worker = registration.worker
            models.add(worker.model)
            for name in _adapters_of(registration, listed):
                adapters.setdefault(name, {}).setdefault(worker.model, set()).add(worker.worker_id)
        served: dict[str, ServedModel | AmbiguousModel] = {}
        for name, having in adapters.items():
            (model, worker_ids), *others = having.items()
            served[name] = AmbiguousModel(sorted(having)) if others else ServedModel(model, name, frozenset(worker_ids))
        served |= {model: ServedModel(model) for model in models}
        served |= {alias: served[target] for alias, target in self.aliases.items() if target in served}
        self._served = served

    def resolve(self, name: str) -> ServedModel:
        """Raises UnknownModel."""
        found = self._served.get(name)
        if isinstance(found, ServedModel):
            return found
        if found is None:
            known = ", ".join(map(printable, self.names()[:MAX_LISTED])) or "none yet"
            raise UnknownModel(f"no worker is registered for model {name!r}; registered models: {known}")
        raise UnknownModel(
            f"{name!r} is an adapter of several models ({', '.join(map(printable, found.models))}); "
            "give it another name in one of them",
            code="ambiguous_model",
        )

    def names(self) -> list[str]:
        """All names that a request may use: models, adapters, and aliases of what is there."""
        return sorted(self._served)


def unserved_problem(registered: str, served: Sequence[str], adapters: Collection[str]) -> str:
    """Why requests for a model would get 404 from an engine that serves these names; empty where they would not."""
    if not served or registered in served or registered in adapters:
        return ""
    names, first = ", ".join(map(printable, served[:MAX_LISTED])), printable(served[0])
    name = printable(registered)
    return (
        f"it is registered for model {name}, and its engine serves {names}: requests for {name} get 404 there; start the engine "
        f"with --served-model-name {name}, or register model={first} (--model-alias {name}={first} keeps the other name)"
    )


class AmbiguousModel(NamedTuple):
    """An adapter's name that several models have."""

    models: list[str]


def _adapters_of(registration: Registration, listed: Mapping[str, Adapters]) -> set[str]:
    found = {registration.lora_name} if registration.lora_name else set()
    if registration.catalog is not None:
        found |= registration.catalog.lora_paths.keys()
    if registration.url is not None:
        found |= listed.get(registration.url, {}).keys()
    return found


def parse_aliases(given: Iterable[str]) -> dict[str, str]:
    """`NAME=MODEL` each. Raises SettingError."""
    return _pairs(given, "NAME=MODEL")


def parse_tokenizers(given: Iterable[str]) -> dict[str, str]:
    """`MODEL=FOLDER` each. Raises SettingError."""
    return _pairs(given, "MODEL=FOLDER")


def _pairs(given: Iterable[str], form: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in given:
        name, separator, value = text.partition("=")
        if not separator or not name or not value:
            raise SettingError(f"{text!r}: write {form}")
        if name in found:
            raise SettingError(f"{name!r} is given twice; give it once")
        found[name] = value
    for name, value in found.items():
        if form.startswith("NAME") and value in found:
            raise SettingError(f"{name!r} stands for {value!r}, which stands for another; name the model itself")
    return found
