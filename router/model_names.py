# SPDX-License-Identifier: Apache-2.0
"""Which model a request's `model` means: a registered one, another name for it, or a LoRA adapter and who has it. Pure.

Adapters are known from registrations (`lora_name`, `catalog.lora_paths`) and from what engines list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kvrouter.router.errors import SettingError, UnknownModel
from kvrouter.router.printable import printable
from kvrouter.router.registration import Registration

# Names of models that an error lists.
MAX_LISTED = 20


class Served(NamedTuple):
    """What a name means. model: as its workers are registered. worker_ids: only these have the adapter; None: all of the model."""

    model: str
    lora_name: str | None = None
    worker_ids: frozenset[str] | None = None


# The adapters of an engine: their names and the paths that they were loaded from.
Adapters = Mapping[str, str]


class ModelNames:
    """aliases: other names for models or adapters."""

    def __init__(self, aliases: Mapping[str, str]) -> None:
        self.aliases = dict(aliases)
        self._models: frozenset[str] = frozenset()
        # By name, then by model: the workers that have the adapter.
        self._adapters: dict[str, dict[str, set[str]]] = {}

    def learn(self, registrations: Iterable[Registration], listed: Mapping[str, Adapters]) -> None:
        """What is registered now, and what the engines list, by their URL."""
        models = set()
        adapters: dict[str, dict[str, set[str]]] = {}
        for registration in registrations:
            worker = registration.worker
            models.add(worker.model)
            named = {registration.lora_name} if registration.lora_name else set()
            if registration.catalog is not None:
                named |= registration.catalog.lora_paths.keys()
            if registration.url is not None:
                named |= listed.get(registration.url, {}).keys()
            for name in named:
                adapters.setdefault(name, {}).setdefault(worker.model, set()).add(worker.worker_id)
        self._models, self._adapters = frozenset(models), adapters

    def resolve(self, name: str) -> Served:
        """Raises UnknownModel."""
        wanted = self.aliases.get(name, name)
        if wanted in self._models:
            return Served(wanted)
        having = self._adapters.get(wanted)
        if having is None:
            known = ", ".join(map(printable, self.names()[:MAX_LISTED])) or "none yet"
            raise UnknownModel(f"no worker is registered for model {name!r}; registered models: {known}")
        if len(having) > 1:
            bases = ", ".join(map(printable, sorted(having)))
            raise UnknownModel(
                f"{name!r} is an adapter of several models ({bases}); give it another name in one of them",
                code="ambiguous_model",
            )
        [(model, worker_ids)] = having.items()
        return Served(model, wanted, frozenset(worker_ids))

    def names(self) -> list[str]:
        """All names that a request may use: models, adapters, and aliases of what is there."""
        there = self._models | self._adapters.keys()
        return sorted(there | {alias for alias, target in self.aliases.items() if target in there})


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
