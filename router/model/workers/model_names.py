# SPDX-License-Identifier: Apache-2.0
"""The meaning of a request's `model`: a registered model, an alias, or a LoRA adapter and the workers that have it. Pure.

Adapters are known from registrations (`lora_name`, `catalog.lora_paths`) and from the lists of engines.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from kvrouter.router.base.common.errors import SettingError, UnknownModel
from kvrouter.router.base.common.escaping import printable
from kvrouter.router.model.workers.registration import Registration

# The most names of models that one error message lists.
MAX_LISTED = 20


class ServedModel(NamedTuple):
    """The meaning of a name: a model, or a LoRA adapter of a model."""

    # The model's name in the registrations of its workers.
    model: str
    lora_name: str | None = None
    # The workers that have the adapter, or None if all workers of the model serve the name.
    worker_ids: frozenset[str] | None = None


# The adapters of one engine: the path from which each adapter was loaded, by the adapter's name.
Adapters = Mapping[str, str]


class ModelNames:
    """The names that a request may use for models and adapters, according to the last call of `learn`."""

    def __init__(self, aliases: Mapping[str, str]) -> None:
        """Start without models; `aliases` has the model or adapter that each further name stands for."""
        self.aliases = dict(aliases)
        # The meaning of every name. The name of an adapter of several models is an AmbiguousModel.
        self._served: dict[str, ServedModel | AmbiguousModel] = {}

    def learn(self, registrations: Iterable[Registration], listed: Mapping[str, Adapters]) -> None:
        """Replace all names by those of the present registrations and of the engines' lists.

        Args:
            registrations: The present registrations.
            listed: The adapters that engines list, by the engine's URL.
        """
        models: set[str] = set()
        # The workers that have an adapter, by the adapter's name and then by model.
        adapters: dict[str, dict[str, set[str]]] = {}
        for registration in registrations:
            worker = registration.worker
            models.add(worker.model)
            for name in _adapters_of(registration, listed):
                adapters.setdefault(name, {}).setdefault(worker.model, set()).add(worker.worker_id)
        served: dict[str, ServedModel | AmbiguousModel] = {}
        for name, workers_by_model in adapters.items():
            (model, worker_ids), *others = workers_by_model.items()
            served[name] = (
                AmbiguousModel(sorted(workers_by_model)) if others else ServedModel(model, name, frozenset(worker_ids))
            )
        served |= {model: ServedModel(model) for model in models}
        served |= {alias: served[target] for alias, target in self.aliases.items() if target in served}
        self._served = served

    def resolve(self, name: str) -> ServedModel:
        """Return the model, and the adapter if any, that a request's name stands for.

        Raises UnknownModel if it stands for nothing, or if several models have an adapter of this name.
        """
        served = self._served.get(name)
        if isinstance(served, ServedModel):
            return served
        if served is None:
            raise unknown_model(name, self.names(), self.aliases.get(name))
        raise UnknownModel(
            f"{name!r} is an adapter of several models ({', '.join(map(printable, served.models))}); "
            "give it another name in one of them",
            code="ambiguous_model",
        )

    def names(self) -> list[str]:
        """Return all names that a request may use, sorted: models, adapters, and aliases of these."""
        return sorted(self._served)

    def unserved_aliases(self) -> dict[str, str]:
        """Return the aliases of models and adapters that no worker serves, each with the name that it stands for."""
        return {alias: target for alias, target in self.aliases.items() if target not in self._served}


def unknown_model(name: str, names: Sequence[str], target: str | None = None) -> UnknownModel:
    """Return the error for a model that no worker serves.

    Args:
        name: The name in the request.
        names: The names that a request may use.
        target: The model or adapter that `name` is an alias of, or None if it is no alias.
    """
    listed = ", ".join(map(printable, names[:MAX_LISTED])) or "none yet"
    meaning = "" if target is None else f", an alias of {target!r}"
    return UnknownModel(f"no worker is registered for model {name!r}{meaning}; registered models: {listed}")


def unserved_problem(registered: str, served: Sequence[str], adapters: Collection[str]) -> str:
    """Return why requests for a model would get 404 from an engine, or "" if they would not.

    Args:
        registered: The model's name in the registration.
        served: The names that the engine serves; empty while they are not known.
        adapters: The names of the engine's adapters.
    """
    if not served or registered in served or registered in adapters:
        return ""
    names, first = ", ".join(map(printable, served[:MAX_LISTED])), printable(served[0])
    name = printable(registered)
    return (
        f"it is registered for model {name}, and its engine serves {names}: requests for {name} get 404 there; start the engine "
        f"with --served-model-name {name}, or register model={first} (--model-alias {name}={first} keeps the other name)"
    )


class AmbiguousModel(NamedTuple):
    """The meaning of a name under which several models have an adapter."""

    # The names of these models, sorted.
    models: list[str]


def _adapters_of(registration: Registration, listed: Mapping[str, Adapters]) -> set[str]:
    names = {registration.lora_name} if registration.lora_name else set()
    if registration.catalog is not None:
        names |= registration.catalog.lora_paths.keys()
    if registration.url is not None:
        names |= listed.get(registration.url, {}).keys()
    return names


def parse_aliases(given: Iterable[str]) -> dict[str, str]:
    """Read texts of the form `NAME=MODEL`. Raises SettingError."""
    return _pairs(given, "NAME=MODEL")


def parse_tokenizers(given: Iterable[str]) -> dict[str, str]:
    """Read texts of the form `MODEL=FOLDER`. Raises SettingError."""
    return _pairs(given, "MODEL=FOLDER")


def _pairs(texts: Iterable[str], form: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name or not value:
            raise SettingError(f"{text!r}: write {form}")
        if name in pairs:
            raise SettingError(f"{name!r} is given twice; give it once")
        pairs[name] = value
    for name, value in pairs.items():
        if form.startswith("NAME") and value in pairs:
            raise SettingError(f"{name!r} stands for {value!r}, which stands for another; name the model itself")
    return pairs
