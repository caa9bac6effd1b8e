# SPDX-License-Identifier: Apache-2.0
"""The sources of workers that the settings name."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvrouter.router.follow.discovery.candidate import Candidate, candidate_of
from kvrouter.router.follow.discovery.files.file_source import FileSource
from kvrouter.router.follow.discovery.files.workers_file import parse_workers
from kvrouter.router.follow.discovery.kubernetes.access import Access, access_from
from kvrouter.router.follow.discovery.source import Source, StaticSource
from kvrouter.router.model.config.live_settings import WORKERS, FileSettings, LiveSettings
from kvrouter.router.model.config.loading import Origin
from kvrouter.router.model.config.reloaded import read_text
from kvrouter.router.model.config.settings import ENV_PREFIX, Config
from kvrouter.router.model.workers.listed_worker import listed_worker
from kvrouter.router.model.workers.source_precedence import CONFIG, FILE, STATIC

# Imported for types only, because a wrong file is refused before there is a session.
if TYPE_CHECKING:
    import aiohttp

# Enough for thousands of workers with catalogs; a larger file is no list of workers.
MAX_FILE_BYTES = 16 * 1024**2


def sources_of(
    settings: LiveSettings,
    origin: Origin,
    environ: Mapping[str, str],
    *,
    alone: bool,
    session: aiohttp.ClientSession,
    rng: random.Random,
) -> list[Source]:
    """Return all sources that the settings name, with their files read once. Raises SettingError for a wrong file.

    Args:
        settings: The settings, and the files that they name.
        origin: Where the settings come from.
        environ: The environment variables.
        alone: Whether no other host's router uses this store.
        session: A session for Kubernetes' API only, because the API must not see the key of an engine.
        rng: Varies pauses.
    """
    sources = named_sources(settings, origin, environ, alone=alone)
    config = settings.config
    access = cluster_access(config, environ)
    if access is not None and config.kubernetes_selector is not None:
        # Imported here, because most routers run without Kubernetes.
        from kvrouter.router.follow.discovery.kubernetes.api import ClusterApi
        from kvrouter.router.follow.discovery.kubernetes.source import KubernetesSource

        api = ClusterApi(session, access, config.kubernetes_selector, rng=rng)
        sources.append(KubernetesSource(api, rng=rng))
    return sources


def named_sources(settings: LiveSettings, origin: Origin, environ: Mapping[str, str], *, alone: bool) -> list[Source]:
    """Return the sources in settings and files, with the files read once. Raises SettingError for a wrong file.

    Args:
        settings: The settings, and the files that they name.
        origin: Where the settings come from.
        environ: The environment variables.
        alone: Whether no other host's router uses this store.
    """
    sources: list[Source] = []
    overridden = WORKERS in origin.flags or bool(environ.get(ENV_PREFIX + WORKERS.upper()))
    entries = settings.config.workers if settings.file is None or overridden else ()
    if entries or alone:
        # Without --worker flags, publish an empty list only if no other router shares the store, because another router
        # may name workers.
        sources.append(StaticSource([candidate_of(listed_worker(entry), STATIC) for entry in entries]))
    if settings.file is not None:
        sources.append(FileSource(CONFIG, settings.file, lambda content: _listed(content, overridden=overridden)))
    if settings.config.workers_file is not None:
        path = Path(settings.config.workers_file)

        def read() -> Sequence[Candidate]:
            return parse_workers(read_text(path, MAX_FILE_BYTES), str(path), FILE)

        sources.append(FileSource(FILE, settings.files.add("workers", [path], read), lambda workers: workers))
    return sources


def _listed(content: FileSettings, *, overridden: bool) -> Sequence[Candidate] | None:
    """Return the workers that the settings file lists, or None if it has no list or the list is overridden.

    Args:
        content: The settings of the file.
        overridden: Whether a flag or the environment names the workers.
    """
    if overridden or not content.lists_workers:
        return None
    return [candidate_of(listed_worker(entry), CONFIG) for entry in content.config.workers]


def cluster_access(config: Config, environ: Mapping[str, str]) -> Access | None:
    """Return how to reach Kubernetes' API, or None if the settings select no pods. Raises SettingError."""
    if config.kubernetes_selector is None:
        return None
    return access_from(
        environ,
        api=config.kubernetes_api,
        namespace=config.kubernetes_namespace,
        token_file=config.kubernetes_token_file,
        ca_file=config.kubernetes_ca_file,
    )
