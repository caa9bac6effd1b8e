# SPDX-License-Identifier: Apache-2.0
"""systemd's own judgement of the unit; the tests are skipped without systemd."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

UNIT = Path(__file__).resolve().parents[2] / "deploy" / "systemd" / "kvrouter.service"
# The highest exposure allowed, in tenths of a point; the scale ends at 10. systemd 252 says 1.2, and calls up to 2 OK.
EXPOSURE_TENTHS = 15


@pytest.fixture
def analyze() -> str:
    path = shutil.which("systemd-analyze")
    if path is None:
        pytest.skip("no systemd-analyze on PATH, so the systemd unit was not verified: apt-get install systemd")
    return path


def judged(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "SYSTEMD_COLORS": "0"}
    )


def test_systemd_finds_no_fault(analyze: str, tmp_path: Path) -> None:
    # Name the program's path on this machine, because systemd looks whether it is there.
    program = Path(sys.executable).with_name("kvrouter")
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/kvrouter/bin/kvrouter", str(program)))
    done = judged(analyze, "verify", "--man=no", str(unit))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    unit.write_text(unit.read_text().replace("KillMode=mixed", "KillMode=most"))
    assert "kill mode" in judged(analyze, "verify", "--man=no", str(unit)).stderr


def test_its_exposure_is_low(analyze: str, tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    shutil.copy(UNIT, unit)
    done = judged(analyze, "security", "--offline=true", f"--threshold={EXPOSURE_TENTHS}", "--no-pager", str(unit))
    assert done.returncode == 0, done.stdout[-3_000:] + done.stderr
    looser = unit.read_text().replace("SystemCallFilter=@system-service\n", "").replace("DynamicUser=yes\n", "")
    unit.write_text(looser)
    done = judged(analyze, "security", "--offline=true", f"--threshold={EXPOSURE_TENTHS}", "--no-pager", str(unit))
    assert done.returncode != 0
