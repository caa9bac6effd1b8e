# SPDX-License-Identifier: Apache-2.0
"""The page and its files: their names, their headers, and the answer to a browser without the key."""

from __future__ import annotations

import hashlib
import re

import pytest

from kvrouter.router.serve.page.page_files import FILES, INDEX, KEY_WANTED, MEDIA_TYPES, page_files
from tests.contract.api_support import TinyCore, build, call

KEY = "correct-horse-battery"
HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
# The hashes of the files of uPlot, in the release that docs/reference/dependencies.md names.
UPLOT_SHA256 = {
    "uPlot.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
NAMES = sorted(page_files())


@pytest.mark.parametrize("name", NAMES)
def test_every_file_is_served_without_the_key_and_runs_nothing_from_elsewhere(name: str) -> None:
    app, _ = build(TinyCore(), api_key=KEY)
    answer = call(app, "GET", f"{FILES}{name}")
    assert answer.status == 200 and answer.body == page_files()[name].content
    assert answer.headers["content-type"] == MEDIA_TYPES[name.rpartition(".")[2]]
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    again = call(app, "GET", f"{FILES}{name}", headers={"if-none-match": answer.headers["etag"]})
    assert (again.status, again.body) == (304, b"")


def test_a_file_that_is_not_there_is_a_404_and_with_a_key_a_401() -> None:
    for name in ("nothing.js", "..%2fpage_files.py", "%2e%2e/page_files.py", "", "index.html%00"):
        app, _ = build(TinyCore())
        assert call(app, "GET", f"{FILES}{name}").status == 404
        app, _ = build(TinyCore(), api_key=KEY)
        assert call(app, "GET", f"{FILES}{name}").status == 401


def test_the_page_is_html_for_everybody_where_no_key_is_set() -> None:
    app, _ = build(TinyCore())
    for headers in (HTML, {}, {"accept": "*/*"}):
        answer = call(app, "GET", "/", headers=headers)
        assert answer.status == 200 and b"<!doctype html>" in answer.body and KEY_WANTED not in answer.body


def test_a_browser_without_the_key_gets_the_page_that_wants_it_and_programs_the_error() -> None:
    app, _ = build(TinyCore(), api_key=KEY)
    for headers in (HTML, HTML | {"authorization": "Bearer wrong"}):
        page = call(app, "GET", "/", headers=headers)
        assert page.status == 401 and KEY_WANTED in page.body and KEY.encode() not in page.body
        assert page.headers["content-type"].startswith("text/html") and "etag" not in page.headers
        assert page.headers["www-authenticate"] == "Bearer" and "content-security-policy" in page.headers
    program = call(app, "GET", "/")
    assert (program.status, program.error["code"]) == (401, "invalid_api_key")
    # Only the page itself is open; the data that it shows require the key.
    for path in ("/workers", "/metrics", "/events", "/store"):
        assert call(app, "GET", path, headers=HTML).error["code"] == "invalid_api_key"
    right = call(app, "GET", "/", headers=HTML | {"authorization": f"Bearer {KEY}"})
    assert right.status == 200 and right.body == page_files()[INDEX].content


def test_the_files_name_each_other_and_nothing_else() -> None:
    texts = {name: file.content.decode() for name, file in page_files().items()}
    own = {name: text for name, text in texts.items() if not name.startswith("uPlot")}
    html = own[INDEX]
    assert "<style" not in html and re.search(r"<script(?![^>]*\bsrc=)", html) is None
    assert re.search(r"\son\w+=|style=", html) is None
    named = set(re.findall(r'(?:href|src)="/page/([^"]+)"', html))
    for name, text in own.items():
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            name
        )
        # The address of a namespace is never fetched.
        assert not re.search(r"(?:https?:)?//[a-z0-9-]+\.[a-z]", text.replace("http://www.w3.org/2000/svg", "")), name
        named |= set(re.findall(r'from "\./([^"]+)"', text))
    assert named == set(texts) - {INDEX, "uPlot-license.txt"}


def test_the_chart_library_is_the_release_that_is_named() -> None:
    for name, wanted in UPLOT_SHA256.items():
        assert hashlib.sha256(page_files()[name].content).hexdigest() == wanted
