# SPDX-License-Identifier: Apache-2.0
"""Which sources the settings name."""

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
from kvrouter.router.model.workers.source_precedence import CONFIG, FILE, STATIC
from kvrouter.router.model.workers.worker_spec import parse_worker

# A wrong file is refused before there is a session.
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
    """All of them, files read once. alone: no other host's router is on this store. session: for Kubernetes' API alone,
    as it must be shown no engine's key. Raises SettingError for a file that is wrong."""
    found = named_sources(config, origin, environ, alone=alone)
    access = cluster_access(config, environ)
    if access is not None and config.kubernetes_selector is not None:
        # Most routers run without it.
        from kvrouter.router.follow.discovery.kubernetes.api import ClusterApi
        from kvrouter.router.follow.discovery.kubernetes.source import KubernetesSource

        api = ClusterApi(session, access, config.kubernetes_selector, rng=rng)
        found.append(KubernetesSource(api, rng=rng))
    return found


def named_sources(config: Config, origin: Origin, environ: Mapping[str, str], *, alone: bool) -> list[Source]:
    """Settings and files, the files read once. Raises SettingError."""
    found: list[Source] = []
    named = origin.file is None or overridden(origin, environ)
    specs = config.workers if named else ()
    if specs or alone:
        # A router without any says nothing of them where others may name some; alone, that there are none.
        found.append(StaticSource([candidate_of(parse_worker(spec), STATIC) for spec in specs]))
    if origin.file is not None:
        path = Path(origin.file)
        found.append(_begun(FileSource(CONFIG, path, SettingsFile(path, origin, environ).read)))
    if config.workers_file is not None:
        where = config.workers_file
        found.append(_begun(FileSource(FILE, Path(where), lambda text: parse_workers(text, where, FILE))))
    return found


def cluster_access(config: Config, environ: Mapping[str, str]) -> Access | None:
    """None where the settings select no pods. Raises SettingError."""
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
