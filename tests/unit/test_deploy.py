# SPDX-License-Identifier: Apache-2.0
"""Examples of workers on the pages, each of which the router accepts."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from kvrouter.router.follow.discovery.files.workers_file import parse_workers
from kvrouter.router.follow.discovery.kubernetes.access import access_from
from kvrouter.router.model.config.loading import load_config
from kvrouter.router.model.workers.source_precedence import FILE

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("page", ["docs/how-to/discovery.md", "docs/how-to/kubernetes.md"])
def test_the_pages_examples_are_what_the_router_takes(page: str) -> None:
    text = (ROOT / page).read_text()
    commands = re.findall(r"^kvrouter (serve(?:[^\n]*\\\n)*[^\n]*)", text, re.MULTILINE)
    assert commands or page.endswith("kubernetes.md")
    for command in commands:
        words = shlex.split(command.replace("\\\n", " "), comments=True)
        arguments: dict[str, Any] = {}
        for flag, value in zip(words[1::2], words[2::2], strict=True):
            name = {"--worker": "workers", "--allow-host": "allow_hosts"}.get(flag, flag[2:].replace("-", "_"))
            if name in ("workers", "allow_hosts"):
                arguments.setdefault(name, []).append(value)
            elif name != "config":
                arguments[name] = value
        config = load_config(None, {}, arguments)
        if config.kubernetes_api is not None:
            access_from(
                {}, api=config.kubernetes_api, namespace=config.kubernetes_namespace, token_file=None, ca_file=None
            )
    lists = re.findall(r"^```yaml\n(- .*?)^```", text, re.MULTILINE | re.DOTALL)
    assert all(parse_workers(entries, "example", FILE) for entries in lists)
