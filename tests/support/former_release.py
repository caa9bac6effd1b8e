# SPDX-License-Identifier: Apache-2.0
"""Routers of the previous version, run from this repository's history, and files with the contents of their store.

They run uncompiled, so their sources and the packages that are installed here are enough. `kvrouter` is a namespace
package, so its parts are imported from the folder that comes first on the path.
"""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvrouter.router.base.common.compiled import UNCOMPILED

ROOT = Path(__file__).resolve().parents[2]
# The last commit of schema 2.
COMMIT = "0eb3d3bd429784d637c0d8ccae685ce70cd1665b"
PACKAGES = ("client", "events", "router", "engine_patch", "simulator", "replay")

Stored = dict[str, dict[str, Any]]


def is_known() -> bool:
    """Return whether the repository's history contains the commit; a shallow checkout does not have it."""
    process = subprocess.run(["git", "-C", str(ROOT), "cat-file", "-e", COMMIT], capture_output=True, check=False)
    return process.returncode == 0


def environment(folder: Path) -> dict[str, str]:
    """Unpack the sources into `folder`, and return the environment variables of a process that runs them."""
    site = folder / "kvrouter"
    site.mkdir(parents=True)
    with subprocess.Popen(["git", "-C", str(ROOT), "archive", COMMIT, *PACKAGES], stdout=subprocess.PIPE) as archive:
        subprocess.run(["tar", "-x", "-C", str(site)], stdin=archive.stdout, check=True)
    assert archive.returncode == 0
    return {"PYTHONPATH": str(folder), UNCOMPILED: "1"}


def dump(client: Any, without: tuple[bytes, ...] = ()) -> Stored:
    """Return all keys of a store by name, without those that begin like one of `without`.

    Values that are not readable text are Base64; keys that expire have `expires_ms`.
    """
    stored: Stored = {}
    for key in sorted(client.scan_iter(count=1000)):
        # A router that runs may delete its own keys meanwhile.
        if key.startswith(without):
            continue
        kind = client.type(key).decode()
        stored[_text(key)] = {"type": kind, "value": _READERS[kind](client, key)}
        if (left := client.pttl(key)) > 0:
            stored[_text(key)]["expires_ms"] = left
    return stored


def load(client: Any, stored: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the keys that `dump` returned into a store."""
    for text, entry in stored.items():
        key, value = _data(text), entry["value"]
        if entry["type"] == "string":
            client.set(key, _data(value), px=entry.get("expires_ms"))
        elif entry["type"] == "set":
            client.sadd(key, *map(_data, value))
        elif entry["type"] == "hash":
            client.hset(key, mapping={_data(field): _data(data) for field, data in value})
        else:
            for entry_id, fields in value:
                client.xadd(key, {_data(field): _data(data) for field, data in fields}, id=entry_id)


def _text(data: bytes) -> str:
    """Return readable text unchanged, so that the file can be inspected, and other bytes as Base64."""
    if data.isascii() and data.decode().isprintable() and not data.startswith(b"base64:"):
        return data.decode()
    return "base64:" + base64.b64encode(data).decode()


def _data(text: str) -> bytes:
    return base64.b64decode(text[7:]) if text.startswith("base64:") else text.encode()


def _pairs(fields: Mapping[bytes, bytes]) -> list[tuple[str, str]]:
    return [(_text(field), _text(value)) for field, value in fields.items()]


def _entries(client: Any, key: bytes) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    for entry_id, fields in client.xrange(key):
        yield entry_id.decode(), _pairs(fields)


_READERS: dict[str, Any] = {
    "string": lambda client, key: _text(client.get(key)),
    "set": lambda client, key: sorted(map(_text, client.smembers(key))),
    "hash": lambda client, key: sorted(_pairs(client.hgetall(key))),
    "stream": lambda client, key: list(_entries(client, key)),
}


def read(path: Path) -> Stored:
    return dict(json.loads(path.read_text()))


def write(path: Path, stored: Stored) -> None:
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(entry)}" for key, entry in stored.items())
    path.write_text(f"{{\n{lines}\n}}\n")
