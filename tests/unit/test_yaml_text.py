# SPDX-License-Identifier: Apache-2.0
"""Files in YAML whose values PyYAML cannot make: each is refused with its line, by each reader alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.follow.discovery.files.workers_file import parse_workers
from kvrouter.router.model.config.loading import listed_settings, load_config
from kvrouter.router.model.workers.engine_key import parse_engine_keys
from kvrouter.router.serve.access.api_keys import parse_keys

READERS: dict[str, Callable[[str], object]] = {
    "settings": lambda text: load_config(None, {}, {}, listed_settings(Path("f.yaml"), text)),
    "API keys": lambda text: parse_keys(text, "f.yaml"),
    "keys of engines": lambda text: parse_engine_keys(text, "f.yaml"),
    "workers": lambda text: parse_workers(text, "f.yaml", "file"),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("value", ["2024-13-45", "!!int ''", "!!bool HUSH", "!!timestamp HUSH", "!!float HUSH"])
def test_a_value_that_is_none_is_refused_with_its_line(reader: str, value: str) -> None:
    text = f"-\n- {value}\n" if reader == "workers" else f"a: b\nqueue_size: {value}\n"
    with pytest.raises(SettingError) as caught:
        READERS[reader](text)
    assert caught.value.message.startswith("f.yaml line 2 is not YAML: write ") and "HUSH" not in caught.value.message


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("text", ["[" * 3_000, "a: " + "{a: " * 3_000, "- " * 3_000, "\x00", "a: b: c", "&a *b"])
def test_a_text_that_is_no_yaml_is_refused(reader: str, text: str) -> None:
    with pytest.raises(SettingError, match=r"^f\.yaml.* is not YAML: write "):
        READERS[reader](text)
