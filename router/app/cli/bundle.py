# SPDX-License-Identifier: Apache-2.0
"""`kvrouter doctor --bundle FILE`: one archive with everything that is needed to investigate a wrong prediction.

It contains answers of the router's API, and neither prompts nor secrets.
"""

from __future__ import annotations

import errno
import os
import platform
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from kvrouter.router.app.cli.api_client import Client, ClientError
from kvrouter.router.app.cli.doctor_report import diagnose
from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.base.common.redaction import redacted, redacted_text
from kvrouter.router.base.common.version import VERSION

# The paths whose answers are archived, by the name of the file. Only secrets are replaced.
JSON_PATHS = {
    "version.json": "/version",
    "settings.json": "/settings",
    "workers.json": "/workers",
    "loads.json": "/loads",
    "health.json": "/health",
    "store.json": "/store",
}
# The archive has the last decisions, and earlier ones only if their prediction was wrong, because a decision with its
# candidates takes some kB per worker.
MAX_LISTED, MAX_LAST, MAX_WRONG = 1_000, 50, 50

# The remedies if the archive cannot be written, by the error's number (`OSError.errno`).
NO_FOLDER, NO_RIGHT, NO_ROOM = (
    "name a file in a folder that exists",
    "name a file in a folder that you may write to",
    "free some space, or name a file on another disk",
)
REMEDIES = {
    errno.ENOENT: NO_FOLDER,
    errno.ENOTDIR: NO_FOLDER,
    errno.EACCES: NO_RIGHT,
    errno.EPERM: NO_RIGHT,
    errno.EROFS: NO_RIGHT,
    errno.ENOSPC: NO_ROOM,
    errno.EDQUOT: NO_ROOM,
    errno.EISDIR: "name a file in it",
    errno.ENAMETOOLONG: "name a file with a shorter name",
}

README = """\
A report of kvrouter about a router and its fleet, made by `kvrouter doctor --bundle`.

It has no prompt, no token ids, no API key and no seed of block hashes. Ids of sessions are numbered. It names the
workers, their addresses and the requests' ids: look through it before you share it.

diagnosis.json  what `kvrouter doctor` found
decisions.json  the last decisions with their candidates, and those whose prediction was wrong
command.json    where and when this was made
metrics.txt     GET /metrics
Each other file is the router's answer to the path with the file's name, such as GET /workers.
"""


class BundleMember(msgspec.Struct, frozen=True):
    """One file of an archive."""

    name: str
    content: bytes


def write_bundle(client: Client, file: Path, *, force: bool, progress: Callable[[str], None]) -> list[BundleMember]:
    """Write the archive, and return its files. Raises SettingError and ClientError.

    Args:
        client: The client of the router.
        file: The archive to write.
        force: Whether an existing file is replaced.
        progress: Called with each name before its content is collected.
    """
    if os.path.lexists(file) and not force:
        raise SettingError(f"--bundle {file}: it exists; name another file, or pass --force to replace it")
    # Stop here if the router does not answer: the archive would be empty, and the ClientError says what to do.
    client.call("GET", "/version")
    members = list(_members(client, progress))
    try:
        _write(file, members)
    except OSError as error:
        remedy = REMEDIES.get(error.errno or 0, "name another file")
        raise SettingError(f"--bundle {file}: {error.strerror or error}; {remedy}") from None
    return members


def _write(file: Path, members: list[BundleMember]) -> None:
    """Write the archive to a temporary file in the same folder and rename it, so that no partial archive is seen."""
    number, name = tempfile.mkstemp(prefix=f".{file.name}-", dir=file.parent)
    temporary = Path(name)
    try:
        with os.fdopen(number, "wb") as output, zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED) as archive:
            for member in members:
                archive.writestr(member.name, member.content)
        temporary.replace(file)
    except BaseException:
        temporary.unlink()
        raise


def _members(client: Client, progress: Callable[[str], None]) -> Iterator[BundleMember]:
    secrets = () if client.api_key is None else (client.api_key,)
    parts: dict[str, Callable[[], Any]] = {
        "command.json": lambda: _command(client),
        "diagnosis.json": lambda: msgspec.to_builtins(diagnose(client, client.url, time.time)),
        **{name: _reader(client, path) for name, path in JSON_PATHS.items()},
        "decisions.json": lambda: _decisions(client),
    }
    yield BundleMember("README.txt", README.encode())
    for name, read in parts.items():
        progress(name)
        yield BundleMember(name, _json(redacted(_tried(read), secrets)))
    progress("metrics.txt")
    metrics = _tried(lambda: client.text("/metrics"))
    yield BundleMember("metrics.txt", redacted_text(str(metrics), secrets).encode())


def _reader(client: Client, path: str) -> Callable[[], Any]:
    return lambda: client.call("GET", path)


def _tried(read: Callable[[], Any]) -> Any:
    """Return the result of `read`, or its error as JSON, such as the error for a path that the key may not read."""
    try:
        return read()
    except ClientError as error:
        return {"error": str(error)}


def _json(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=1)


def _command(client: Client) -> dict[str, Any]:
    return {
        "time_s": round(time.time(), 3),
        "url": client.url,
        "version": VERSION,
        "python": sys.version,
        "platform": platform.platform(),
    }


def _decisions(client: Client) -> list[Any]:
    """Return the decisions for the archive with their candidates, the newest first."""
    listed = client.call("GET", f"/decisions?limit={MAX_LISTED}")["decisions"]
    wrong = [decision for decision in listed[MAX_LAST:] if _is_wrong(decision)]
    sessions: dict[str, str] = {}
    decisions = []
    for decision in [*listed[:MAX_LAST], *wrong[:MAX_WRONG]]:
        full = _tried(_reader(client, f"/decisions/{quote(decision['selection_id'], safe='')}"))
        session = full.get("session_id")
        if session is not None:
            # A client's id may be a person's name. Numbers suffice to show which decisions belong to one session.
            full["session_id"] = sessions.setdefault(session, f"session-{len(sessions) + 1}")
        decisions.append(full)
    return decisions


def _is_wrong(decision: dict[str, Any]) -> bool:
    outcome = decision.get("outcome") or {}
    predicted, delivered = outcome.get("predicted_tokens"), outcome.get("delivered_tokens")
    return None not in (predicted, delivered) and predicted != delivered
