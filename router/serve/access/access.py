# SPDX-License-Identifier: Apache-2.0
"""The current access rules of the router's port, reloaded when their files change.

This is the async shell around the certificate files, the key file and the rate limits.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from pathlib import Path

from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.model.config.live_settings import LiveSettings
from kvrouter.router.model.config.reloaded import read_text
from kvrouter.router.model.config.settings import Config
from kvrouter.router.serve.access.access_metrics import KEY_OUTCOMES, UNAUTHORIZED, AccessMetrics
from kvrouter.router.serve.access.api_keys import UNKNOWN_NAME, ApiKey, ApiKeys, parse_keys, setting_key
from kvrouter.router.serve.access.browser_policy import BrowserPolicy
from kvrouter.router.serve.access.certificate import CertificateFiles, GatewayPems, read_certificate, read_pems
from kvrouter.router.serve.access.salt_maker import SaltMaker, read_secret
from kvrouter.router.serve.access.tenants import Tenants, check_keys, secret_path

# `MAX_KEYS` entries with long names take about 20 kB.
MAX_KEYS_BYTES = 256 * 1024
# Registrations that may come in one burst, as a multiple of `max_workers`. A whole fleet that starts, is dropped and
# registers again fits, with some to spare.
BURST_SHARE = 4


def certificate_files(config: Config) -> CertificateFiles | None:
    """Return the certificate files of the HTTP port, or None if it has no TLS.

    Raises SettingError if the settings name a certificate without a key, a key without a certificate, or only
    authorities.
    """
    if (config.tls_certificate is None) != (config.tls_key is None):
        raise SettingError("tls_certificate and tls_key go together: give both files, or neither")
    if config.tls_certificate is None or config.tls_key is None:
        if config.tls_client_ca is not None:
            raise SettingError("tls_client_ca needs tls_certificate and tls_key: give them, or leave it out")
        return None
    client_ca = None if config.tls_client_ca is None else Path(config.tls_client_ca)
    return CertificateFiles(Path(config.tls_certificate), Path(config.tls_key), client_ca)


def gateway_files(config: Config) -> CertificateFiles | None:
    """Return the certificate files of the gateway's port, or None if it has no TLS.

    Raises SettingError if the settings name a certificate without a key, a key without a certificate, or only
    authorities.
    """
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


def read_keys(file: Path, config: Config) -> list[ApiKey]:
    """Read the API keys that a file lists.

    Raises OSError if the file cannot be read, and SettingError if its content is not valid.
    """
    keys = parse_keys(read_text(file, MAX_KEYS_BYTES), f"api_keys_file {file}")
    check_keys(keys, config)
    return keys


class TokenBucket:
    """A token bucket, which admits a burst at once, then a steady rate.

    It holds at most `burst` tokens and regains `rate_per_s` tokens each second. Times are in seconds of any clock
    that does not go back.
    """

    __slots__ = ("_at_s", "_burst", "_rate_per_s", "_tokens")

    def __init__(self, rate_per_s: float, burst: float, now_s: float) -> None:
        self._rate_per_s = rate_per_s
        self._burst = self._tokens = burst
        self._at_s = now_s

    def take(self, now_s: float) -> float:
        """Take one token and return 0.0, or return the seconds until there is one without taking any."""
        self._tokens = min(self._burst, self._tokens + (now_s - self._at_s) * self._rate_per_s)
        self._at_s = now_s
        if self._tokens >= 1.0:
            self._tokens -= 1.0
            return 0.0
        return (1.0 - self._tokens) / self._rate_per_s


class Access:
    """The rules for requests to the router's port: certificate, API keys, browser policy and rate of registrations.

    `keys` holds the API keys that admit a request; it is None if every request is admitted without a key. `tenants` finds
    the tenants of requests; it is None if the router makes no cache salts.
    """

    def __init__(
        self,
        settings: LiveSettings,
        metrics: AccessMetrics,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """Read all files once, and raise SettingError if one of them cannot be used.

        Args:
            settings: The settings, with the paths of the files and the limits.
            metrics: The metrics of access.
            clock: Returns monotonic seconds.
            wall_clock: Returns seconds since 1970.
        """
        config = settings.config
        self.settings = settings
        self.metrics = metrics
        self.browsers = BrowserPolicy(config)
        self._clock = clock
        self._wall_clock = wall_clock
        self._rate_per_s = config.registrations_per_s
        self._burst = BURST_SHARE * config.max_workers
        # The token bucket that limits the registrations of each API key, by the key's name. Requests without a key
        # share one.
        self._buckets: dict[str, TokenBucket] = {}
        self._setting = None if config.api_key is None else setting_key(config.api_key)
        add, files = settings.files.add, certificate_files(config)
        self._certificate = None if files is None else add("certificate", files.paths, lambda: read_certificate(files))
        secret_file = secret_path(config)
        keys_file = None if config.api_keys_file is None else Path(config.api_keys_file)
        self._listed = None if keys_file is None else add("api_keys", [keys_file], lambda: read_keys(keys_file, config))
        if secret_file is not None and keys_file is None and config.api_key is not None:
            check_keys((), config)
        self._secret = (
            None if secret_file is None else add("cache_salt_secret", [secret_file], lambda: read_secret(secret_file))
        )
        self._combines, self._tenant_header = config.client_salts == "combine", config.tenant_header
        pems = gateway_files(config)
        self._gateway = None if pems is None else add("gateway_certificate", pems.paths, lambda: read_pems(pems))
        self.keys: ApiKeys | None = None
        self.tenants: Tenants | None = None
        self._take_keys()
        self._show_expiry()
        settings.subscribe(self._take_limits)
        if self._listed is not None:
            self._listed.subscribe(self._take_keys)
        if self._secret is not None:
            self._secret.subscribe(self._take_keys)
        if self._certificate is not None:
            self._certificate.subscribe(self._show_expiry)

    @property
    def context(self) -> ssl.SSLContext | None:
        """The TLS context for a new connection, or None if the port has no TLS."""
        return None if self._certificate is None else self._certificate.value.context

    @property
    def gateway_pems(self) -> GatewayPems | None:
        """The certificate for a new connection to the gateway's port, or None if that port has no TLS.

        Any thread may read this property.
        """
        return None if self._gateway is None else self._gateway.value

    @property
    def expiry_problem(self) -> str | None:
        """The reason why clients refuse the certificate now, or None if its period of validity is no reason."""
        if self._certificate is None:
            return None
        return self._certificate.value.expiry_problem(self._wall_clock())

    @property
    def expiry_caution(self) -> str | None:
        """A warning that the certificate expires soon, or None if it does not."""
        if self._certificate is None:
            return None
        return self._certificate.value.expiry_caution(self._wall_clock())

    def health(self) -> Sequence[str]:
        """Return the problems that make access unhealthy: unusable files and an expired certificate."""
        expired = self.expiry_problem
        return [*self.settings.files.problems, *([] if expired is None else [expired])]

    def cautions(self) -> Sequence[str]:
        """Return warnings about what still works: settings that wait for a restart, a certificate near its end."""
        near = self.expiry_caution
        return [*self.settings.cautions(), *([] if near is None else [near])]

    def registration_pause_s(self, key: str) -> float:
        """Take a registration from the key's bucket and return 0.0, or return the seconds to wait for the next one."""
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
        """Count one request of the key with this name. `outcome` is one of `KEY_OUTCOMES` or `UNAUTHORIZED`."""
        self.metrics.key_requests.labels(key, outcome).inc()

    def _take_limits(self, config: Config) -> None:
        """Replace the token buckets if the rate changed, because each bucket keeps the rate with which it was made."""
        if config.registrations_per_s != self._rate_per_s:
            self._rate_per_s = config.registrations_per_s
            self._buckets.clear()

    def _take_keys(self) -> None:
        if self._secret is not None:
            self.tenants = Tenants(SaltMaker(self._secret.value, self._combines), self._tenant_header)
        if self._setting is None and self._listed is None:
            return
        former_names = [] if self.keys is None else self.keys.names
        setting = [] if self._setting is None else [self._setting]
        keys = [*setting, *([] if self._listed is None else self._listed.value)]
        self.keys = ApiKeys(keys if self.tenants is None else map(self.tenants.salted, keys))
        self.metrics.key_requests.labels(UNKNOWN_NAME, UNAUTHORIZED)
        for name in self.keys.names:
            for outcome in KEY_OUTCOMES:
                self.metrics.key_requests.labels(name, outcome)
        for name in set(former_names) - set(self.keys.names):
            self._buckets.pop(name, None)
            for outcome in KEY_OUTCOMES:
                self.metrics.key_requests.remove(name, outcome)

    def _show_expiry(self) -> None:
        if self._certificate is not None:
            validity = self._certificate.value.validity
            self.metrics.start.set(validity.begins_s)
            self.metrics.expiry.set(validity.ends_s)
