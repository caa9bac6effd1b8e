# SPDX-License-Identifier: Apache-2.0
"""Cache salts that the router makes from a secret and the name of a tenant. Pure, except for reading the secret."""

from __future__ import annotations

import hmac
from pathlib import Path

import msgspec

from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.base.common.regular_file import read_regular

# An HMAC is as strong as its key, up to the length of the hash.
MIN_SECRET_BYTES = 32
MAX_SECRET_BYTES = 4_096
# The first part of what is hashed, so that the same secret may serve another purpose, too.
PURPOSE = b"kvrouter cache salt 1"


class SaltMaker(msgspec.Struct, frozen=True):
    """The maker of all cache salts. Two tenants have the same salt only if SHA-256 is broken."""

    secret: bytes
    combines: bool
    """Whether a client's own salt counts beside its tenant; otherwise it is ignored."""

    def __repr__(self) -> str:
        """Return a text without the secret."""
        return "SaltMaker()"

    def make(self, tenant: str, own: str | None) -> str:
        """Return the salt of a tenant's prompts, 64 hex digits, which every engine takes.

        Args:
            tenant: The name of the tenant.
            own: The salt that the client sent, or None.
        """
        parts = [tenant] if own is None or not self.combines else [tenant, own]
        message = bytearray(PURPOSE)
        for part in parts:
            raw = part.encode("utf-8", "surrogatepass")
            # The length before each part keeps different lists of parts from having the same bytes.
            message += b"%d:%b" % (len(raw), raw)
        return hmac.digest(self.secret, message, "sha256").hex()


def read_secret(file: Path) -> bytes:
    """Return the secret in a file, without the line ends behind it.

    Raises OSError if the file cannot be read, and SettingError if the secret is too short.
    """
    secret = read_regular(file, MAX_SECRET_BYTES).rstrip(b"\r\n")
    if len(secret) < MIN_SECRET_BYTES:
        raise SettingError(
            f"cache_salt_secret_file {file} has {len(secret)} bytes, and at least {MIN_SECRET_BYTES} are needed: write a "
            "secret into it, for example with openssl rand -hex 32"
        )
    return secret
