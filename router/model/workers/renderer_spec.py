# SPDX-License-Identifier: Apache-2.0
"""The renderers of the settings, and the keys that they get. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.model.workers.engine_key import EngineKey
from kvrouter.router.model.workers.worker_spec import key_name_problem, name_problem, url_problem

SHAPE = "MODEL=URL[,key=NAME]"


class RendererSpec(NamedTuple):
    """A server that returns the tokens of a model's requests and runs no model."""

    # The model as its workers are registered.
    model: str
    url: str
    # The name of its API key in worker_api_keys_file, or None if it gets no key.
    key: str | None


def parse_renderers(given: Iterable[str]) -> tuple[RendererSpec, ...]:
    """Read texts of the form `SHAPE`. Raises SettingError."""
    specs: list[RendererSpec] = []
    key_by_url: dict[str, str | None] = {}
    for text in given:
        spec = _renderer_spec(text)
        if any((spec.model, spec.url) == (other.model, other.url) for other in specs):
            raise SettingError(f"{spec.model}={spec.url} is given twice; give it once")
        if key_by_url.setdefault(spec.url, spec.key) != spec.key:
            raise SettingError(f"{spec.url} is given with two keys; a renderer has one")
        specs.append(spec)
    return tuple(specs)


def _renderer_spec(text: str) -> RendererSpec:
    """Return the renderer that one text names. Raises SettingError."""
    model, separator, address = text.partition("=")
    url, comma, option = address.partition(",")
    name, equals, key = option.partition("=")
    # A URL may have a password, so no message contains the text.
    if not separator or name_problem(model) or (comma and (name != "key" or not equals)):
        raise SettingError(f"write {SHAPE}")
    for what, problem in (("the URL", url_problem(url)), ("key", key_name_problem(key) if comma else None)):
        if problem:
            raise SettingError(f"{model}: {what} {problem}")
    return RendererSpec(model, url, key if comma else None)


class RendererKeys:
    """The API keys of renderers.

    A renderer gets only the key that its entry names, and never the key that a client sent for an engine: it needs
    only prompts, so an engine's key must not reach the renderer's machine unless the operator names that key.
    """

    def __init__(self, specs: Iterable[RendererSpec], keys: EngineKey) -> None:
        self._names = {spec.url: spec.key for spec in specs}
        self._keys = keys

    def header_for_url(self, url: str) -> str | None:
        """Return the `Authorization` header of a request to the renderer at this URL, or None if it gets no key."""
        name = self._names.get(url)
        return None if name is None else self._keys.header_for_url(url, named=True, name=name)
