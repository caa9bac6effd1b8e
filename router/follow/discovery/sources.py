# SPDX-License-Identifier: Apache-2.0
"""The sources of workers that the settings name."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvrouter.router.follow.discovery.candidate import candidate_of
from kvrouter.router.follow.discovery.files.file_source import FileSource
from kvrouter.router.follow.discovery.files.settings_file import SettingsFile, overridden
from kvrouter.router.follow.discovery.files.workers_file import parse_workers
from kvrouter.router.follow.discovery.kubernetes.access import Access, access_from
from kvrouter.router.follow.discovery.source import Source, StaticSource
from kvrouter.router.model.config.loading import Origin
from kvrouter.router.model.config.settings import Config
from kvrouter.router.model.workers.listed_worker import listed_worker
from kvrouter.router.model.workers.source_precedence import CONFIG, FILE, STATIC

# Imported for types only, because a wrong file is refused before there is a session.
if TYPE_CHECKING:
    import aiohttp


def sources_of(
    config: Config,
    origin: Origin,
    environ: Mapping[str, str],
    *,
    alone: bool,
    session: aiohttp.ClientSession,
    rng: random.Random,
) -> list[Source]:
    """Return all sources that the settings name, with their files read once. Raises SettingError for a wrong file.

    Args:
        config: The settings.
        origin: Where the settings come from.
        environ: The environment variables.
        alone: Whether no other host's router uses this store.
        session: A session for Kubernetes' API only, because the API must not see the key of an engine.
        rng: Varies pauses.
    """
    sources = named_sources(config, origin, environ, alone=alone)
    access = cluster_access(config, environ)
    if access is not None and config.kubernetes_selector is not None:
        # Imported here, because most routers run without Kubernetes.
        from kvrouter.router.follow.discovery.kubernetes.api import ClusterApi
        from kvrouter.router.follow.discovery.kubernetes.source import KubernetesSource

        api = ClusterApi(session, access, config.kubernetes_selector, rng=rng)
        sources.append(KubernetesSource(api, rng=rng))
    return sources


def named_sources(config: Config, origin: Origin, environ: Mapping[str, str], *, alone: bool) -> list[Source]:
    """Return the sources in settings and files, with the files read once. Raises SettingError for a wrong file.

    Args:
        config: The settings.
        origin: Where the settings come from.
        environ: The environment variables.
        alone: Whether no other host's router uses this store.
    """
    sources: list[Source] = []
    named = origin.file is None or overridden(origin, environ)
    entries = config.workers if named else ()
    if entries or alone:
        # Without --worker flags, publish an empty list only if no other router shares the store, because another router
        # may name workers.
        sources.append(StaticSource([candidate_of(listed_worker(entry), STATIC) for entry in entries]))
    if origin.file is not None:
        path = Path(origin.file)
        sources.append(_begun(FileSource(CONFIG, path, SettingsFile(path, origin, environ).read)))
    if config.workers_file is not None:
        where = config.workers_file
        sources.append(_begun(FileSource(FILE, Path(where), lambda text: parse_workers(text, where, FILE))))
    return sources


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


def _begun(source: FileSource) -> FileSource:
    source.begin()
    return source
