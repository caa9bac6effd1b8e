# SPDX-License-Identifier: Apache-2.0
"""Changes of the settings file while the router runs: its workers are applied, all other settings need a restart."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.follow.discovery.candidate import Candidate, candidate_of
from kvrouter.router.model.config.loading import Origin, load_config
from kvrouter.router.model.config.settings import ENV_PREFIX, FIELDS, Config
from kvrouter.router.model.workers.listed_worker import listed_worker
from kvrouter.router.model.workers.source_precedence import CONFIG

log = logging.getLogger(__name__)

WORKERS = "workers"


def overridden(origin: Origin, environ: Mapping[str, str]) -> bool:
    """Return whether a flag or the environment names the workers, so that the file's do not count."""
    return WORKERS in origin.flags or bool(environ.get(ENV_PREFIX + WORKERS.upper()))


class SettingsFile:
    """The settings file, read as at the start, with the same flags and environment."""

    def __init__(self, path: Path, origin: Origin, environ: Mapping[str, str]) -> None:
        self._path = path
        self._origin = origin
        self._environ = environ
        self._first: Config | None = None
        self._told: frozenset[str] = frozenset()

    def read(self, text: str) -> Sequence[Candidate] | None:
        """Return the workers that the file's text names, and log which other settings changed.

        Returns None if the file has no list of workers, or if a flag or the environment overrides the list. Raises
        SettingError.
        """
        if self._first is not None and not text.strip():
            # A writer that does not rename leaves the file empty for a moment.
            raise SettingError(f"{self._path} is empty: write lines like `port: 30000`")
        config = load_config(self._path, self._environ, self._origin.flags, text)
        self._compare(config)
        if overridden(self._origin, self._environ) or WORKERS not in (yaml.safe_load(text) or {}):
            return None
        return [candidate_of(listed_worker(entry), CONFIG) for entry in config.workers]

    def _compare(self, config: Config) -> None:
        """Log which settings differ from those at the start, if their set changed since the last log."""
        first = self._first = self._first or config
        changed = frozenset(
            name for name in FIELDS if name != WORKERS and getattr(first, name) != getattr(config, name)
        )
        if changed != self._told:
            self._told = changed
            if changed:
                log.warning("settings changed: restart the router to apply them", extra={"settings": sorted(changed)})
            else:
                log.info("settings are again what they were at the start")
