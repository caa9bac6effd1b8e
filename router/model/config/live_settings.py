# SPDX-License-Identifier: Apache-2.0
"""The settings of a running router, and the files that they name.

Some settings change at once when the settings file changes. A change of any other setting is reported by name and waits
for a restart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.model.config.loading import FORM, Origin, listed_settings, load_config
from kvrouter.router.model.config.reloaded import Reloaded, ReloadedFiles, ReloadMetrics, read_text
from kvrouter.router.model.config.settings import FIELDS, RELOADS, Config

log = logging.getLogger(__name__)

# Enough for thousands of workers; a larger file is not a settings file.
MAX_SETTINGS_BYTES = 16 * 1024**2
WORKERS = "workers"


class FileSettings(msgspec.Struct, frozen=True):
    """The settings as they would be at a start with the present content of the file."""

    config: Config
    # Whether the file itself has a list of workers.
    lists_workers: bool


class LiveSettings:
    """The settings in force, and the files that they name.

    `config` is replaced when a setting changes; only the settings of `RELOADS` differ from those of the start.
    """

    def __init__(
        self,
        config: Config,
        origin: Origin | None = None,
        environ: Mapping[str, str] | None = None,
        metrics: ReloadMetrics | None = None,
    ) -> None:
        """Read the settings file again, because a process may start long after `config` was read.

        If the file cannot be used, `config` stays in force.

        Args:
            config: The settings of this process.
            origin: The source of `config`, or None if it does not come from a file.
            environ: The environment variables.
            metrics: The metrics of files, or None to count nothing.
        """
        self.config = config
        self.files = ReloadedFiles(metrics)
        # The names of the settings that now differ from the start and need a restart, sorted.
        self.waiting: list[str] = []
        self._origin = origin or Origin()
        self._environ = environ or {}
        self._subscribers: list[Callable[[Config], None]] = []
        # The settings file; None if there is none.
        self.file: Reloaded[FileSettings] | None = None
        if self._origin.file is not None:
            path = Path(self._origin.file)
            loaded = self._origin.loaded
            former = FileSettings(loaded, bool(loaded.workers))
            self.file = self.files.add("settings", [path], lambda: self._read(path), former=former)
            self.file.subscribe(self._take)
            self._take()

    @property
    def in_force(self) -> Config:
        """The settings in force, with the workers that the settings file lists now.

        `config` has the workers of the start, because the source of workers applies their changes.
        """
        if self.file is None:
            return self.config
        return msgspec.structs.replace(self.config, workers=self.file.value.config.workers)

    def subscribe(self, apply: Callable[[Config], None]) -> None:
        """Call `apply` with all settings whenever one of `RELOADS` has changed."""
        self._subscribers.append(apply)

    def cautions(self) -> list[str]:
        """Return a warning that names the changed settings that wait for a restart, if there are any."""
        if not self.waiting:
            return []
        return [f"{self._origin.file} has changed since the start, in {', '.join(self.waiting)}: restart the router"]

    def _read(self, path: Path) -> FileSettings:
        """Return the settings that a start would read now, with the same flags and environment.

        Raises OSError and SettingError.
        """
        text = read_text(path, MAX_SETTINGS_BYTES)
        if self.file is not None and not text.strip():
            # A writer that does not rename leaves the file empty for a moment.
            raise SettingError(f"{path} is empty: {FORM}")
        listed = listed_settings(path, text)
        return FileSettings(load_config(path, self._environ, self._origin.flags, listed), WORKERS in listed)

    def _take(self) -> None:
        """Apply the settings of the file that can change at run time, and report the others."""
        if self.file is None:
            return
        config, loaded = self.file.value.config, self._origin.loaded
        waiting = sorted(
            name for name in FIELDS if name not in RELOADS and getattr(config, name) != getattr(loaded, name)
        )
        if waiting != self.waiting:
            self.waiting = waiting
            if waiting:
                log.warning("settings changed: restart the router to apply them", extra={"settings": waiting})
            else:
                log.info("settings are the same as at the start again")
        changed = {
            # WORKERS is left out, because the source of workers applies it (`router/follow/discovery/sources.py`), and
            # only in the first process.
            name: getattr(config, name)
            for name in RELOADS - {WORKERS}
            if getattr(config, name) != getattr(self.config, name)
        }
        if changed:
            self.config = msgspec.structs.replace(self.config, **changed)
            log.info("settings applied", extra={"settings": sorted(changed)})
            for apply in self._subscribers:
                apply(self.config)
