# SPDX-License-Identifier: Apache-2.0
"""A certificate authority for one test, made with openssl, and the certificates that it signs."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path
from typing import NamedTuple

HOST = "127.0.0.1"
EC_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Pair(NamedTuple):
    """The PEM files of a certificate and of its key."""

    certificate: Path
    key: Path

    def replace(self, other: Pair) -> None:
        """Replace these files by those of another pair, one file after the other, as renewals do."""
        for file, new in zip(self, other, strict=True):
            place = file.with_suffix(".new")
            place.write_bytes(new.read_bytes())
            place.rename(file)


def openssl(folder: Path, *arguments: str) -> str:
    process = subprocess.run(["openssl", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return process.stdout


class Authority:
    """A certificate authority; `file` is its own certificate."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._name = folder, name
        self.file = folder / f"{name}.pem"
        usage = ("-addext", "keyUsage=critical,keyCertSign,cRLSign", "-days", "30", "-subj", f"/CN={name}")
        openssl(folder, "req", "-x509", *EC_KEY, "-keyout", f"{name}.key", "-out", f"{name}.pem", *usage)

    def issue(self, name: str, *, days: int = 30) -> Pair:
        """Sign a certificate for `HOST` (also valid for clients) with `name` as its common name."""
        folder = self._folder
        openssl(folder, "req", *EC_KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        (folder / f"{name}.names").write_text(f"subjectAltName=IP:{HOST}\n")
        signed = ("-CA", f"{self._name}.pem", "-CAkey", f"{self._name}.key", "-CAcreateserial", "-days", str(days))
        request = ("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", "-extfile", f"{name}.names")
        openssl(folder, *request, *signed)
        return Pair(folder / f"{name}.pem", folder / f"{name}.key")

    def client(self, shown: Pair | None = None) -> ssl.SSLContext:
        """Return the TLS context of a client that trusts only this authority and shows the certificate `shown`."""
        context = ssl.create_default_context(cafile=str(self.file))
        if shown is not None:
            context.load_cert_chain(*shown)
        return context


class Tls(NamedTuple):
    """The certificates of a server under test, and the authority that its clients trust."""

    authority: Authority
    server: Pair


class OverTls:
    """The global switch for servers in tests: they speak TLS with `now`, or plain text if it is None."""

    now: Tls | None = None
