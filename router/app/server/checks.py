# SPDX-License-Identifier: Apache-2.0
"""Checks before anything is started. Optional packages are imported only if a setting needs them."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from kvrouter.router.base.common import compiled
from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.base.common.extras import install_command
from kvrouter.router.base.redis_client.errors import StoreError
from kvrouter.router.base.redis_client.url import parse_url
from kvrouter.router.model.config.cautions import open_to_all, open_to_pages
from kvrouter.router.model.config.loading import Origin
from kvrouter.router.model.config.settings import Config, without_password
from kvrouter.router.model.workers.model_names import parse_tokenizers

if TYPE_CHECKING:
    from kvrouter.router.model.config.live_settings import LiveSettings
    from kvrouter.router.model.config.reloaded import Reloaded
    from kvrouter.router.observe.quality.quality_metrics import QualityMetrics
    from kvrouter.router.observe.quality.tracing import Tracing
    from kvrouter.router.route.tokens.engine.verification import LocalMaker

log = logging.getLogger(__name__)

# Enough for one long key for each of the 6,000 workers that a router can follow.
MAX_KEYS_BYTES = 2 * 1024**2

# The modules of the extra `gateway`.
GATEWAY_MODULES = ("grpc", "google.protobuf")


@contextmanager
def _extra(needs: str, extra: str) -> Iterator[None]:
    """Turn the failure of an import into a SettingError.

    Args:
        needs: The beginning of the message: the setting, and a verb.
        extra: The extra that installs the package.
    """
    try:
        yield
    except ImportError as error:
        raise SettingError(
            f"{needs} a package that is not installed ({error.name}): {install_command(extra)}"
        ) from None


def check_settings(config: Config, origin: Origin, environ: Mapping[str, str]) -> None:
    """Check everything that a start would refuse, before the modules of the router are imported.

    Raises SettingError.
    """
    if config.redis is not None:
        try:
            parse_url(config.redis)
        except StoreError as error:
            raise SettingError(f"redis is {without_password(config.redis)!r}: {error}") from None
    _check_access(config)
    if config.worker_api_keys_file is not None:
        from kvrouter.router.model.config.live_settings import LiveSettings

        engine_keys_file(LiveSettings(config))
    patch_client_secret(config)
    if config.otlp_endpoint is not None:
        _tracing_class()
    if config.gateway_port is not None:
        _check_gateway(config)
    if config.kubernetes_selector is not None or config.workers_file is not None:
        from kvrouter.router.follow.discovery.sources import cluster_access, named_sources
        from kvrouter.router.model.config.live_settings import LiveSettings

        cluster_access(config, environ)
        named_sources(LiveSettings(config, origin, environ), origin, environ, alone=False)


def _check_access(config: Config) -> None:
    tls = (config.tls_certificate, config.tls_key, config.tls_client_ca)
    gateway = (config.gateway_certificate, config.gateway_key, config.gateway_client_ca)
    salts = (config.cache_salt_secret_file, config.tenant_header, config.client_salts != "ignore")
    if not any((*tls, *gateway, *salts, config.api_keys_file)):
        return
    from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
    from kvrouter.router.model.config.live_settings import LiveSettings
    from kvrouter.router.serve.access.access import Access
    from kvrouter.router.serve.access.access_metrics import AccessMetrics

    # Its constructor reads the files and raises SettingError.
    Access(LiveSettings(config), AccessMetrics(MetricRegistry()), clock=time.monotonic, wall_clock=time.time)


def engine_keys_file(settings: LiveSettings) -> Reloaded[dict[str, str]] | None:
    """Return the keys of engines in the file that the settings name, or None if they name none. Raises SettingError."""
    if settings.config.worker_api_keys_file is None:
        return None
    from kvrouter.router.model.config.reloaded import read_text
    from kvrouter.router.model.workers.engine_key import parse_engine_keys

    path = Path(settings.config.worker_api_keys_file)

    def read() -> dict[str, str]:
        return parse_engine_keys(read_text(path, MAX_KEYS_BYTES), f"worker_api_keys_file {path}")

    return settings.files.add("worker_api_keys", [path], read)


def patch_client_secret(config: Config) -> bytes | None:
    """Return the CURVE key that this router shows to engines' patches; None: a different one for each connection.

    Raises SettingError.
    """
    if config.curve_client_key is None:
        return None
    from kvrouter.events.transport.curve import read_secret

    try:
        return read_secret(config.curve_client_key)
    except ValueError as error:
        raise SettingError(f"curve_client_key: {error}") from None


def _check_gateway(config: Config) -> None:
    # An extra of some tens of megabytes that most routers do not need.
    with _extra("gateway_port needs", "gateway"):
        for name in GATEWAY_MODULES:
            importlib.import_module(name)
    if config.gateway_port == 0 and config.processes > 1:
        raise SettingError("gateway_port 0 is another port for each of several processes; name one")


def log_cautions(config: Config) -> None:
    """Log the risks of the settings, once for all processes of this router."""
    for caution in (open_to_all(config), open_to_pages(config), compiled.caution()):
        if caution is not None:
            log.warning(caution)


def tracing_of(config: Config, measures: QualityMetrics) -> Tracing | None:
    """Return the tracing that the settings ask for, or None if they do not. Raises SettingError."""
    if config.otlp_endpoint is None:
        return None
    return _tracing_class()(config.otlp_endpoint, measures.spans)


def _tracing_class() -> type[Tracing]:
    # An extra with a thread and some megabytes that most routers do not need.
    with _extra("otlp_endpoint needs", "otel"):
        from kvrouter.router.observe.quality.tracing import Tracing
    return Tracing


def local_tokenizers(config: Config) -> dict[str, LocalMaker]:
    """Load the tokenizers of the settings, by model; a large vocabulary takes a second. Raises SettingError."""
    if not config.tokenizers:
        return {}
    # An extra that most routers do not need.
    with _extra("tokenizers need", "tokenizer"):
        from kvrouter.router.route.tokens.local.local_tokenizer import LocalTokenizer
    tokenizers: dict[str, LocalMaker] = {}
    for model, folder in parse_tokenizers(config.tokenizers).items():
        try:
            tokenizers[model] = LocalTokenizer(Path(folder), datetime.now)
        except SettingError as error:
            raise SettingError(f"--tokenizer {model}: {error.message}") from None
    return tokenizers
