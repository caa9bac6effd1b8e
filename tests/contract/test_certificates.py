# SPDX-License-Identifier: Apache-2.0
"""Certificates as read from their files, compared with the output of openssl."""

from __future__ import annotations

import calendar
import time
from pathlib import Path

import pytest

from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.serve.access.certificate import CertificateFiles, read_certificate
from kvrouter.router.serve.access.validity import validity_of
from tests.support.certificates import Authority, openssl

DAY_S = 86_400.0


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def test_the_validity_is_what_openssl_says(authority: Authority) -> None:
    pair = authority.issue("dated", days=45)
    validity = validity_of(pair.certificate.read_text())

    def said(which: str) -> float:
        line = openssl(pair.certificate.parent, "x509", f"-{which}", "-noout", "-in", str(pair.certificate))
        return calendar.timegm(time.strptime(line.partition("=")[2].strip(), "%b %d %H:%M:%S %Y %Z"))

    assert (validity.begins_s, validity.ends_s) == (said("startdate"), said("enddate"))
    assert 44 * DAY_S < validity.ends_s - time.time() < 46 * DAY_S
    # The validity of a chain is that of all its certificates; a year after 2049 is encoded in another way.
    late = authority.issue("late", days=365 * 40)
    assert validity_of(late.certificate.read_text()).ends_s - time.time() > 39 * 365 * DAY_S
    chain = validity_of(late.certificate.read_text() + pair.certificate.read_text())
    assert chain.ends_s == validity.ends_s


@pytest.mark.parametrize("cut", [0, 1, 4, 20, 60, 100])
def test_a_certificate_that_is_cut_is_refused_and_nothing_else(authority: Authority, cut: int) -> None:
    whole = authority.file.read_text().splitlines()
    body = "".join(whole[1:-1])
    text = "\n".join([whole[0], body[: cut // 4 * 4], whole[-1]])
    with pytest.raises(ValueError, match=r"validity|no certificate"):
        validity_of(text)


def test_invalid_pairs_are_refused_with_the_reason(authority: Authority, tmp_path: Path) -> None:
    pair, other = authority.issue("one"), authority.issue("two")
    assert read_certificate(CertificateFiles(*pair)).validity.ends_s > time.time()
    with pytest.raises(SettingError, match="no pair that can be used"):
        read_certificate(CertificateFiles(pair.certificate, other.key))
    with pytest.raises(SettingError, match="holds no certificate"):
        read_certificate(CertificateFiles(pair.key, pair.key))
    with pytest.raises(SettingError, match="no pair that can be used"):
        read_certificate(CertificateFiles(pair.certificate, pair.certificate))
    with pytest.raises(SettingError, match="holds no authority"):
        read_certificate(CertificateFiles(*pair, client_ca=pair.key))
    with pytest.raises(FileNotFoundError):
        read_certificate(CertificateFiles(pair.certificate, tmp_path / "none"))
    # For an encrypted key, OpenSSL would prompt at the terminal.
    locked = tmp_path / "locked.key"
    openssl(tmp_path, "ec", "-in", str(pair.key), "-out", str(locked), "-aes256", "-passout", "pass:secret")
    with pytest.raises(SettingError, match="is encrypted"):
        read_certificate(CertificateFiles(pair.certificate, locked))
