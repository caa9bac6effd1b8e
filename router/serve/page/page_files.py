# SPDX-License-Identifier: Apache-2.0
"""The files of the web page, with the headers that they are sent with.

All of them are in the package and contain no data of the fleet: the page's scripts get that from the API, with the API
key if one is set.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import NamedTuple

PAGE = "/"
FILES = "/page/"
INDEX = "index.html"

MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
# A browser loads and runs only files of this router, and sends requests to it alone. No page may frame this one, and
# the page contains no inline script.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class PageFile(NamedTuple):
    """One file and the headers of its answer."""

    content: bytes
    headers: dict[str, str]


# Marks the page for its script: the API needs a key.
KEY_WANTED = b'<meta name="key" content="wanted">\n'


def login_page(index: PageFile) -> PageFile:
    """Return the page for a browser without an API key, marked so that it asks for one."""
    content = index.content.replace(b"<title>", KEY_WANTED + b"<title>", 1)
    return PageFile(content, {name: value for name, value in index.headers.items() if name != "etag"})


def page_files() -> dict[str, PageFile]:
    """Return every file by its name."""
    by_name = {}
    for path in files(__package__).joinpath("static").iterdir():
        content = path.read_bytes()
        by_name[path.name] = PageFile(
            content,
            {
                "content-type": MEDIA_TYPES[path.name.rpartition(".")[2]],
                "etag": f'"{hashlib.sha256(content).hexdigest()[:32]}"',
                # A router of another version has other files under the same names, so a cached copy must be checked.
                "cache-control": "no-cache",
                "content-security-policy": POLICY,
                "x-content-type-options": "nosniff",
                "referrer-policy": "no-referrer",
            },
        )
    return by_name
