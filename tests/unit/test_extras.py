# SPDX-License-Identifier: Apache-2.0
"""The command that a hint names installs the extra, also where the package itself is on no index."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from kvrouter.router.base.common.extras import install_command

EXTRAS = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize("extra", sorted(EXTRAS))
def test_the_command_of_an_extra_names_its_packages(extra: str) -> None:
    words = install_command(extra).split("'")
    assert words[0] == "pip install "
    assert [Requirement(word) for word in words[1::2]] == [Requirement(need) for need in EXTRAS[extra]]


def test_an_unknown_extra_is_refused() -> None:
    with pytest.raises(ValueError, match="no extra 'plot'"):
        install_command("plot")
