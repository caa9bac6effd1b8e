# SPDX-License-Identifier: Apache-2.0
"""Rewrite sdists so that their bytes depend on the files in them alone.

    SOURCE_DATE_EPOCH=SECONDS python .ci/plain_sdist.py FILE.tar.gz ...

setuptools puts the times, owners and modes of the folder that it packs into a sdist, and the time of day into its gzip
header. Here all times are SOURCE_DATE_EPOCH, as in its wheels. The standard library only, because a release runs it.
"""

from __future__ import annotations

import gzip
import os
import sys
import tarfile
from pathlib import Path


def rewrite(path: Path, epoch: int) -> None:
    """Write an archive again, with its members by name, without times, owners and modes of their own."""
    plain = path.with_suffix(".plain")
    with (
        tarfile.open(path) as old,
        plain.open("wb") as raw,
        # Without a name, and at the best level, whatever a Python's default is.
        gzip.GzipFile(filename="", fileobj=raw, mode="wb", compresslevel=9, mtime=epoch) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            entry = tarfile.TarInfo(member.name)
            entry.type, entry.size, entry.mtime = member.type, member.size, epoch
            entry.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            if not (member.isdir() or member.isreg()):
                raise SystemExit(f"{path}: {member.name} is neither a file nor a folder")
            new.addfile(entry, old.extractfile(member) if member.isreg() else None)
    plain.replace(path)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        rewrite(Path(name), int(os.environ["SOURCE_DATE_EPOCH"]))
