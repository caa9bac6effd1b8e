# SPDX-License-Identifier: Apache-2.0
"""The certificates of the router's ports: their files, read into TLS contexts or into PEM contents."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import BinaryIO

import msgspec

from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.base.common.regular_file import open_regular, read_regular
from kvrouter.router.serve.access.validity import Validity, validity_of

# The only protocol of the port.
ALPN = ["http/1.1"]

# A certificate is near its end in its last two weeks, or in the last fifth of a short life. Clients that renew
# certificates automatically do so with a third of the life left.
NEAR_S = 14 * 86_400.0
NEAR_SHARE = 0.2
DAY_S = 86_400.0
# The bound on the size of one file; a bundle of all public authorities has 0.2 MB.
MAX_PEM_BYTES = 4 * 1024**2
HOUR_S = 3_600.0


class CertificateFiles(msgspec.Struct, frozen=True):
    """The PEM files of one port."""

    certificate: Path
    key: Path
    # The authorities of client certificates. None means that clients need no certificate.
    client_ca: Path | None = None
    # The prefix of the settings that name these files: `tls` or `gateway`.
    port: str = "tls"

    @property
    def paths(self) -> list[Path]:
        """The paths of all files that are set."""
        return [self.certificate, self.key, *([] if self.client_ca is None else [self.client_ca])]


class Certificate(msgspec.Struct, frozen=True):
    """A certificate that was read from its files.

    Each has its own context, so that no TLS session of a replaced certificate is resumed.
    """

    context: ssl.SSLContext
    validity: Validity

    def expiry_problem(self, now_s: float) -> str | None:
        """Return why clients refuse the certificate at this time, or None if its period of validity is no reason.

        `now_s` is in seconds since 1970.
        """
        if now_s >= self.validity.ends_s:
            return (
                "the certificate of the router's port has expired: clients refuse it; put a new one in its place "
                "(tls_certificate)"
            )
        if now_s < self.validity.begins_s:
            return (
                "the certificate of the router's port is not valid yet: clients refuse it; compare the clocks, or put another "
                "in its place"
            )
        return None

    def expiry_caution(self, now_s: float) -> str | None:
        """Return a warning that the certificate expires soon, or None if it does not.

        `now_s` is in seconds since 1970.
        """
        left_s = self.validity.ends_s - now_s
        near_s = min(NEAR_S, NEAR_SHARE * (self.validity.ends_s - self.validity.begins_s))
        if not 0 < left_s <= near_s:
            return None
        left = f"{left_s / DAY_S:.0f} days" if left_s >= 2 * DAY_S else f"{left_s / HOUR_S:.1f} hours"
        return (
            f"the certificate of the router's port expires in {left}; put a new one in its place (tls_certificate): it is "
            "taken without a restart"
        )


class GatewayPems(msgspec.Struct, frozen=True):
    """The contents of the gateway port's files, in PEM."""

    key: bytes
    certificate: bytes
    # The authorities of client certificates; None if clients need no certificate.
    client_ca: bytes | None


def read_certificate(files: CertificateFiles) -> Certificate:
    """Read the files into a TLS context.

    Raises OSError if a file cannot be read, and SettingError if the files do not fit together.
    """
    name = f"{files.port}_certificate {files.certificate}"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # A client could make the router repeat the costly part of the handshake.
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(ALPN)
    try:
        validity = validity_of(read_regular(files.certificate, MAX_PEM_BYTES).decode("ascii", "replace"))
    except ValueError as error:
        raise SettingError(f"{name}: {error}; name a PEM file with the chain") from None
    try:
        # OpenSSL accepts only paths, and would wait forever if a FIFO had replaced the file in the meantime.
        with open_regular(files.certificate) as chain, open_regular(files.key) as key:
            context.load_cert_chain(_path(chain), _path(key), password=_refuse_password)
    except ssl.SSLError as error:
        raise SettingError(
            f"{name} and {files.port}_key {files.key} are no pair that can be used "
            f"({error.reason or error}); name the PEM files of one certificate and its key"
        ) from None
    except _Encrypted:
        raise SettingError(
            f"{files.port}_key {files.key} is encrypted; name the file of a key without a password"
        ) from None
    if files.client_ca is not None:
        try:
            with open_regular(files.client_ca) as authorities:
                context.load_verify_locations(_path(authorities))
        except ssl.SSLError as error:
            raise SettingError(
                f"{files.port}_client_ca {files.client_ca} holds no authority ({error.reason or error}); name a PEM file "
                "of certificates"
            ) from None
        context.verify_mode = ssl.CERT_REQUIRED
    return Certificate(context, validity)


def read_pems(files: CertificateFiles) -> GatewayPems:
    """Read the files in the form that gRPC takes, after checking that they fit together.

    Raises OSError if a file cannot be read, and SettingError if the files do not fit together.
    """
    read_certificate(files)
    key, certificate = (read_regular(file, MAX_PEM_BYTES) for file in (files.key, files.certificate))
    return GatewayPems(
        key, certificate, None if files.client_ca is None else read_regular(files.client_ca, MAX_PEM_BYTES)
    )


def _path(file: BinaryIO) -> str:
    """Return a path that leads to an open file, even if another file has replaced it at its original path."""
    return f"/proc/self/fd/{file.fileno()}"


class _Encrypted(Exception):
    pass


def _refuse_password() -> str:
    """Raise `_Encrypted`, because OpenSSL would otherwise ask for the password at the terminal."""
    raise _Encrypted
