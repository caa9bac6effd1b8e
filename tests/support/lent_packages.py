# SPDX-License-Identifier: Apache-2.0
"""The packages that run the tests, lent to a fresh virtual environment, so that nothing is downloaded into it."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

# Names in a site-packages folder that come from this project's distributions.
OURS = ("kvrouter", "hybrid_kv_", "__editable__")


def offline_environment() -> dict[str, str]:
    """Return this environment without our settings; pip in it takes nothing from an index."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("KVROUTER_", "PIP_", "PYTHON"))}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    # PIP_NO_BUILD_ISOLATION=0 is how pip spells --no-build-isolation in the environment.
    return env | {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}


def lend_packages(lent: Path, site_packages: Path, withheld: Sequence[str] = ()) -> None:
    """Let a virtual environment import the packages of this one, except ours.

    Args:
        lent: A new folder for links to the packages.
        site_packages: The virtual environment's folder of packages.
        withheld: Beginnings of further names, in lower case, that are not lent.
    """
    lent.mkdir()
    for folder in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(folder).iterdir():
            if not entry.name.lower().startswith((*OURS, *withheld)):
                (lent / entry.name).symlink_to(entry)
    (site_packages / "lent.pth").write_text(f"{lent}\n")
