# SPDX-License-Identifier: Apache-2.0
"""Routers of the version before, run from this repository's history, and what they left in a store as a file.

They run uncompiled, so that a checkout is enough: their sources, and the packages that are installed here. `kvrouter`
is a namespace, so the folder that comes first on the path has its parts."""

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
    """Whether the repository's history is here."""
    found = subprocess.run(["git", "-C", str(ROOT), "cat-file", "-e", COMMIT], capture_output=True, check=False)
    return found.returncode == 0


def environment(folder: Path) -> dict[str, str]:
    """Unpacks the sources into `folder`; what a process needs to run them."""
    site = folder / "kvrouter"
    site.mkdir(parents=True)
    with subprocess.Popen(["git", "-C", str(ROOT), "archive", COMMIT, *PACKAGES], stdout=subprocess.PIPE) as archive:
        subprocess.run(["tar", "-x", "-C", str(site)], stdin=archive.stdout, check=True)
    assert archive.returncode == 0
    return {"PYTHONPATH": str(folder), UNCOMPILED: "1"}


def dump(client: Any) -> Stored:
    """All keys of a store by their names. Bytes are Base64; what expires has `expires_ms`."""
    found: Stored = {}
    for key in sorted(client.scan_iter(count=1000)):
        kind = client.type(key).decode()
        found[_text(key)] = {"type": kind, "value": _READERS[kind](client, key)}
        if (left := client.pttl(key)) > 0:
            found[_text(key)]["expires_ms"] = left
    return found


def load(client: Any, stored: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes what `dump` read."""
    for text, entry in stored.items():
        key, value = _data(text), entry["value"]
        if entry["type"] == "string":
            client.set(key, _data(value), px=entry.get("expires_ms"))
        elif entry["type"] == "set":
            client.sadd(key, *map(_data, value))
        elif entry["type"] == "hash":
            client.hset(key, mapping={_data(field): _data(one) for field, one in value})
        else:
            for entry_id, fields in value:
                client.xadd(key, {_data(field): _data(one) for field, one in fields}, id=entry_id)


def _text(data: bytes) -> str:
    """As it is where it can be read, which makes the file one that can be looked through."""
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
