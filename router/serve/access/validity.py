# SPDX-License-Identifier: Apache-2.0
"""The time from when and until when a certificate is valid (RFC 5280, 4.1). Pure.

The two times are read from the DER, because Python's ssl shows them only for the certificate of a peer.
"""

from __future__ import annotations

import re
import ssl
from datetime import UTC, datetime

import msgspec

PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)

SEQUENCE, VERSION, UTC_TIME, GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18
# The number of bytes that a long length may have. The byte before them is over 0x80.
MAX_LENGTH_BYTES = 4


class Validity(msgspec.Struct, frozen=True):
    """A period of validity. Both times are in seconds since 1970."""

    begins_s: float
    ends_s: float


def validity_of(pem: str) -> Validity:
    """Return the period in which all certificates of a chain are valid.

    Raises ValueError if a certificate cannot be read, or if there is none.
    """
    validities = [_validity_of_one(ssl.PEM_cert_to_DER_cert(block)) for block in PEM.findall(pem)]
    if not validities:
        raise ValueError("it holds no certificate")
    return Validity(max(validity.begins_s for validity in validities), min(validity.ends_s for validity in validities))


def _validity_of_one(der: bytes) -> Validity:
    """Return the period of validity of one certificate in DER.

    A certificate is a sequence whose first part is a sequence of version, serial number, the signature's algorithm,
    issuer and validity. Raises ValueError if there is no readable validity.
    """
    try:
        _, certificate, _ = _element(der)
        _, signed, _ = _element(certificate)
        tag, _, rest = _element(signed)
        if tag != VERSION:
            rest = signed
        for _ in ("serial number", "algorithm", "issuer"):
            _, _, rest = _element(rest)
        tag, validity, _ = _element(rest)
        if tag != SEQUENCE:
            raise ValueError
        begins, ends = _element(validity)[:2], _element(_element(validity)[2])[:2]
        return Validity(_time(*begins), _time(*ends))
    except (IndexError, ValueError):
        raise ValueError("its certificate has no validity that can be read") from None


def _element(der: bytes) -> tuple[int, bytes, bytes]:
    """Return the tag and the content of the first DER element, and the bytes after it.

    Raises IndexError or ValueError if the bytes are no complete element.
    """
    tag, length, start = der[0], der[1], 2
    if length & 0x80:
        size = length & 0x7F
        if not 0 < size <= MAX_LENGTH_BYTES:
            raise ValueError
        length, start = int.from_bytes(der[2 : 2 + size], "big"), 2 + size
    if start + length > len(der):
        raise ValueError
    return tag, der[start : start + length], der[start + length :]


def _time(tag: int, content: bytes) -> float:
    text = content.decode("ascii", "replace")
    if tag == UTC_TIME:
        # The year has two digits; 50 and above belong to the last century.
        text = ("19" if int(text[:2]) >= 50 else "20") + text
    elif tag != GENERALIZED_TIME:
        raise ValueError
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
