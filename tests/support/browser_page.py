# SPDX-License-Identifier: Apache-2.0
"""The router's page in Debian's Chromium, with the console messages and the hosts that it contacted."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
TIMEOUT_MS = 30_000
# axe takes every link to a part of the page for a skip link if no link to another page stands before it, so it would
# want the views' links to have targets, once the nav of a narrow window has scrolled them away.
RULES = {"rules": {"skip-link": {"enabled": False}}}


@contextmanager
def browser() -> Iterator[Browser]:
    """Start Chromium, or skip the test where it is not installed; `.ci/run` installs it."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("no Chromium: apt-get install chromium")
    # As long as any other wait: the library's 5 s are too short for a machine under load.
    expect.set_options(timeout=TIMEOUT_MS)
    with sync_playwright() as playwright:
        # Containers run tests as root, and have little shared memory.
        flags = ["--no-sandbox", "--disable-dev-shm-usage"]
        chromium = playwright.chromium.launch(executable_path=path, args=flags)
        try:
            yield chromium
        finally:
            chromium.close()


def violations(page: Page) -> list[tuple[str, list[str]]]:
    """Return the rules that axe finds violated, each with the first elements that violate it."""
    found = Axe().run(page, options=RULES).response["violations"]
    return [(violation["id"], [node["html"] for node in violation["nodes"]][:3]) for violation in found]


class BrowserPage:
    """One tab of the browser; `close` fails if the console had an error or warning, or another host was contacted."""

    def __init__(self, browser: Browser, port: int, **options: Any) -> None:
        """Open the tab.

        Args:
            browser: The running Chromium.
            port: The router's port.
            **options: Options of the browser context, such as `viewport` and `color_scheme`.
        """
        self._context = browser.new_context(**options)
        self.page: Page = self._context.new_page()
        self.page.set_default_timeout(TIMEOUT_MS)
        self.address = f"http://127.0.0.1:{port}/"
        self.problems: list[str] = []
        self.hosts: set[str] = set()
        self.page.on("console", lambda line: self._console(line.type, line.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))

    def _console(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.problems.append(text)

    def open(self, view: str) -> Page:
        """Switch to a view and wait until the page marks it as the current one."""
        if self.page.url == "about:blank":
            self.page.goto(f"{self.address}#{view}")
        else:
            self.page.click(f"nav a[href='#{view}']")
        self.page.wait_for_selector(f"nav a[href='#{view}'][aria-current]")
        return self.page

    def close(self) -> None:
        self._context.close()
        assert not self.problems, self.problems
        assert self.hosts == {urlsplit(self.address).netloc}
