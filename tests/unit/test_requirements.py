# SPDX-License-Identifier: Apache-2.0
"""Requirements have bounds on both sides, the lock keeps to them and names no index, and an audit reports its gaps."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
OWN = PROJECT["project"]["name"]


def requirements() -> list[Requirement]:
    every = [*PROJECT["project"]["dependencies"], *PROJECT["build-system"]["requires"]]
    every += [text for texts in EXTRAS.values() for text in texts]
    return [requirement for requirement in map(Requirement, every) if requirement.name != OWN]


def locked() -> dict[str, str]:
    text = (ROOT / "requirements-test.lock").read_text()
    # A requirement may have a marker, such as the versions of Python that need it.
    lines = [line.partition(" ; ")[0] for line in text.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[\w.]+", line) for line in lines)
    return dict(line.split("==") for line in lines)


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_every_dependency_has_a_lower_and_an_upper_bound(requirement: Requirement) -> None:
    operators = {specifier.operator for specifier in requirement.specifier}
    assert operators == {">=", "<"}


def test_the_lock_keeps_to_the_bounds() -> None:
    versions = locked()
    for requirement in requirements():
        # pip-tools leaves installers out.
        if requirement.name != "setuptools":
            assert requirement.specifier.contains(versions[requirement.name.lower()]), requirement


def test_an_empty_audit_is_no_success() -> None:
    spec = importlib.util.spec_from_file_location("audit", ROOT / ".ci" / "audit.py")
    assert spec is not None and spec.loader is not None
    audit = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(audit)
    good = {"name": "a", "version": "1", "vulns": []}
    bad = {"name": "b", "version": "1", "vulns": [{"id": "CVE-1", "fix_versions": ["2"]}]}
    unseen = {"name": "c", "skip_reason": "Dependency not found"}
    own = {"name": OWN, "skip_reason": "Dependency not found"}
    codes = [
        audit.verdict({"dependencies": dependencies})[0]
        for dependencies in ([good, own], [good, bad], [unseen, own], [], [good, unseen])
    ]
    assert codes == [0, 1, 2, 2, 2]
    assert "cannot be reached" in audit.verdict({"dependencies": [unseen]})[1]
    assert "CVE-1, fixed in 2" in audit.verdict({"dependencies": [bad]})[1]
