# SPDX-License-Identifier: Apache-2.0
"""Who may connect to the router's port and do what, at this moment: the async shell around files and limits."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.base.common.regular_file import read_regular
from kvrouter.router.model.config.settings import Config
from kvrouter.router.serve.access.access_metrics import KEY_OUTCOMES, UNAUTHORIZED, AccessMetrics
from kvrouter.router.serve.access.api_keys import UNKNOWN_NAME, ApiKey, ApiKeys, parse_keys, setting_key
from kvrouter.router.serve.access.browser_policy import BrowserPolicy
from kvrouter.router.serve.access.certificate import CertificateFiles, GatewayPems, read_certificate, read_pems
from kvrouter.router.serve.access.reloaded import Reloaded
from kvrouter.router.serve.access.token_bucket import TokenBucket

# A change counts when it has been there for one of these. A look is one stat a file.
POLL_S = 0.5
# MAX_KEYS entries with long names are some 20 kB.
MAX_KEYS_BYTES = 256 * 1024
# Registrations that may come at once, in workers of `max_workers`: a fleet that comes up, and is dropped, and some.
BURST_SHARE = 4


def certificate_files(config: Config) -> CertificateFiles | None:
    """Return the files that the settings name. Raises SettingError where one is missing."""
    if (config.tls_certificate is None) != (config.tls_key is None):
        raise SettingError("tls_certificate and tls_key go together: give both files, or neither")
    if config.tls_certificate is None or config.tls_key is None:
        if config.tls_client_ca is not None:
            raise SettingError("tls_client_ca needs tls_certificate and tls_key: give them, or leave it out")
        return None
    client_ca = None if config.tls_client_ca is None else Path(config.tls_client_ca)
    return CertificateFiles(Path(config.tls_certificate), Path(config.tls_key), client_ca)


def gateway_files(config: Config) -> CertificateFiles | None:
    """Return the files of the gateway's port. Raises SettingError where one is missing."""
    if (config.gateway_certificate is None) != (config.gateway_key is None):
        raise SettingError("gateway_certificate and gateway_key go together: give both files, or neither")
    if config.gateway_certificate is None or config.gateway_key is None:
        if config.gateway_client_ca is not None:
            raise SettingError(
                "gateway_client_ca needs gateway_certificate and gateway_key: give them, or leave it out"
            )
        return None
    client_ca = None if config.gateway_client_ca is None else Path(config.gateway_client_ca)
    return CertificateFiles(Path(config.gateway_certificate), Path(config.gateway_key), client_ca, port="gateway")


def read_keys(file: Path) -> list[ApiKey]:
    """Read the keys that a file lists. Raises OSError and SettingError."""
    try:
        return parse_keys(read_regular(file, MAX_KEYS_BYTES).decode("utf-8"), f"api_keys_file {file}")
    except UnicodeDecodeError:
        raise SettingError(f"api_keys_file {file} is not UTF-8; write it as text") from None


class Access:
    """keys: those that admit; None: all requests are admitted. wall_clock: seconds since 1970; clock: monotonic."""

    def __init__(
        self,
        config: Config,
        metrics: AccessMetrics,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """Reads the files. Raises SettingError."""
        self.metrics = metrics
        self.browsers = BrowserPolicy(config)
        self._clock = clock
        self._wall_clock = wall_clock
        self._rate_per_s = config.registrations_per_s
        self._burst = BURST_SHARE * config.max_workers
        # The bucket of each key by its name; requests without a key share one.
        self._buckets: dict[str, TokenBucket] = {}
        self._setting = None if config.api_key is None else setting_key(config.api_key)
        files = certificate_files(config)
        self._certificate = (
            None if files is None else Reloaded("certificate", files.paths, lambda: read_certificate(files), metrics)
        )
        named = None if config.api_keys_file is None else Path(config.api_keys_file)
        self._listed = None if named is None else Reloaded("api_keys", [named], lambda: read_keys(named), metrics)
        pems = gateway_files(config)
        self._gateway = (
            None if pems is None else Reloaded("gateway_certificate", pems.paths, lambda: read_pems(pems), metrics)
        )
        every: tuple[Reloaded[Any] | None, ...] = (self._certificate, self._listed, self._gateway)
        self._files = [file for file in every if file is not None]
        self.keys: ApiKeys | None = None
        self._take_keys()
        self._show_expiry()

    @property
    def context(self) -> ssl.SSLContext | None:
        """For a new connection; None: it is plain."""
        return None if self._certificate is None else self._certificate.value.context

    @property
    def gateway_pems(self) -> GatewayPems | None:
        """Return the certificate for a new connection to the gateway's port, None if that port is plain. Any thread may
        call it."""
        return None if self._gateway is None else self._gateway.value

    @property
    def expiry_problem(self) -> str | None:
        """Why clients refuse the certificate for its time."""
        if self._certificate is None:
            return None
        return self._certificate.value.expiry_problem(self._wall_clock())

    @property
    def expiry_caution(self) -> str | None:
        """That the certificate ends soon."""
        if self._certificate is None:
            return None
        return self._certificate.value.expiry_caution(self._wall_clock())

    @property
    def file_problems(self) -> list[str]:
        """Why what is used is not what a file holds."""
        return [f"{file.problem}; the former is used" for file in self._files if file.problem]

    def health(self) -> Sequence[str]:
        expired = self.expiry_problem
        return [*self.file_problems, *([] if expired is None else [expired])]

    def cautions(self) -> Sequence[str]:
        near = self.expiry_caution
        return [] if near is None else [near]

    def registration_pause_s(self, key: str) -> float:
        """0.0 where whoever has this key may register now, which counts; else when it may."""
        if not self._rate_per_s:
            return 0.0
        now_s = self._clock()
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = TokenBucket(self._rate_per_s, self._burst, now_s)
        pause_s = bucket.take(now_s)
        if pause_s:
            self.metrics.limited.inc()
        return pause_s

    def count(self, key: str, outcome: str) -> None:
        """One request with the key of this name."""
        self.metrics.key_requests.labels(key, outcome).inc()

    async def watch(self) -> None:
        """Look at the files for ever; a file that hangs does not delay the others."""
        async with asyncio.TaskGroup() as group:
            for file in self._files:
                group.create_task(self._follow(file))
        # Wait for ever if there are no files: the supervisor takes a task that ends for a failure.
        await asyncio.Event().wait()

    async def _follow(self, file: Reloaded[Any]) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            if await file.look():
                self._take_keys()
                self._show_expiry()

    def _take_keys(self) -> None:
        if self._setting is None and self._listed is None:
            return
        before = [] if self.keys is None else self.keys.names
        setting = [] if self._setting is None else [self._setting]
        self.keys = ApiKeys([*setting, *([] if self._listed is None else self._listed.value)])
        self.metrics.key_requests.labels(UNKNOWN_NAME, UNAUTHORIZED)
        for name in self.keys.names:
            for outcome in KEY_OUTCOMES:
                self.metrics.key_requests.labels(name, outcome)
        for name in set(before) - set(self.keys.names):
            self._buckets.pop(name, None)
            for outcome in KEY_OUTCOMES:
                self.metrics.key_requests.remove(name, outcome)

    def _show_expiry(self) -> None:
        if self._certificate is not None:
            validity = self._certificate.value.validity
            self.metrics.start.set(validity.begins_s)
            self.metrics.expiry.set(validity.ends_s)
