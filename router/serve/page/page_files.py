# SPDX-License-Identifier: Apache-2.0
"""The files of the page, as they are sent. All of them are in the package, and hold nothing of the fleet: what the page
shows, its scripts get from the API, with the API key where one is set."""

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
# Only what this router sends is loaded and run, requests go to it alone, nobody may frame it, and no script is written
# into the page.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class PageFile(NamedTuple):
    content: bytes
    headers: dict[str, str]


# Says to the page's script that the API wants a key.
KEY_WANTED = b'<meta name="key" content="wanted">\n'


def login_page(index: PageFile) -> PageFile:
    """What a browser without the key gets: the page, which asks for it."""
    content = index.content.replace(b"<title>", KEY_WANTED + b"<title>", 1)
    return PageFile(content, {name: value for name, value in index.headers.items() if name != "etag"})


def page_files() -> dict[str, PageFile]:
    """Every file by its name."""
    found = {}
    for one in files(__package__).joinpath("static").iterdir():
        content = one.read_bytes()
        found[one.name] = PageFile(
            content,
            {
                "content-type": MEDIA_TYPES[one.name.rpartition(".")[2]],
                "etag": f'"{hashlib.sha256(content).hexdigest()[:32]}"',
                # A router of another version has other files under the same names.
                "cache-control": "no-cache",
                "content-security-policy": POLICY,
                "x-content-type-options": "nosniff",
                "referrer-policy": "no-referrer",
            },
        )
    return found
