# SPDX-License-Identifier: Apache-2.0
"""The parts of a release: a tag that is the version, a section of the changelog, and a workflow that GitHub accepts."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.system.release_rehearsal import LeftOut, Rehearsal, provenance, run

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"
PYPROJECT = '[project]\nversion = "1.2.0"\n'
PYPROJECTS = {"pyproject.toml": PYPROJECT, "engine_patch/pyproject.toml": PYPROJECT}
CHANGELOG = "# Changelog\n\n## Unreleased\n\n## 1.2.0 (2026-12-01)\n\n- New.\n\n## 1.2\n\n- Old.\n"


def release_check() -> Any:
    spec = importlib.util.spec_from_file_location("release_check", ROOT / ".ci" / "release_check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_notes_are_the_section_of_that_version() -> None:
    assert release_check().notes("v1.2.0", PYPROJECTS, CHANGELOG) == "- New.\n"


@pytest.mark.parametrize(
    ("tag", "changelog", "problem"),
    [
        ("v1.2.1", CHANGELOG, "pyproject.toml says 1.2.0"),
        ("1.2.0", CHANGELOG, "pyproject.toml says 1.2.0"),
        ("v1.2.0", CHANGELOG.replace("- New.\n", ""), "no section `## 1.2.0` with text"),
        ("v1.2.0", CHANGELOG.replace("1.2.0", "1.2.0rc1"), "no section `## 1.2.0` with text"),
    ],
)
def test_a_release_that_does_not_fit_is_refused(tag: str, changelog: str, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        release_check().notes(tag, PYPROJECTS, changelog)


@pytest.mark.parametrize("name", PYPROJECTS)
def test_both_distributions_have_the_tags_version(name: str) -> None:
    other = PYPROJECTS | {name: PYPROJECT.replace("1.2.0", "1.2.1")}
    with pytest.raises(ValueError, match=f"the tag is v1.2.0 and {name} says 1.2.1"):
        release_check().notes("v1.2.0", other, CHANGELOG)


def test_the_distributions_of_the_tree_have_one_version() -> None:
    settings = [tomllib.loads((ROOT / name).read_text())["project"] for name in release_check().PYPROJECTS]
    assert settings[0]["version"] == settings[1]["version"]
    assert settings[0]["requires-python"] == settings[1]["requires-python"]


def test_the_release_has_both_distributions() -> None:
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    commands = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    assert any("python -m build --no-isolation --sdist\n" in command + "\n" for command in commands)
    assert any("python -m build --no-isolation --outdir dist engine_patch" in command for command in commands)


def test_the_workflow_is_one() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(WORKFLOW)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    broken = subprocess.run(
        [*command[:-1], "/dev/stdin"],
        input=WORKFLOW.read_text().replace("runs-on", "runs"),
        capture_output=True,
        text=True,
    )
    assert broken.returncode == 1


def test_the_workflow_publishes_nothing_that_was_not_tested() -> None:
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    assert set(jobs["publish"]["needs"]) == jobs.keys() - {"publish"}
    assert any(".ci/run" in step.get("run", "") for step in jobs["check"]["steps"])
    targets = {
        step["run"].split()[1]
        for job in jobs.values()
        for step in job["steps"]
        if step.get("run", "").startswith("make ")
    }
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_wheels_are_built_for_every_python_that_is_promised() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lowest = int(settings["project"]["requires-python"].removeprefix(">=3."))
    built = settings["tool"]["cibuildwheel"]["build"].split()
    assert built == [f"cp3{minor}-*" for minor in range(lowest, lowest + len(built))] and len(built) >= 3


def test_sdists_of_the_same_files_become_the_same_bytes(tmp_path: Path) -> None:
    made = [sdist(tmp_path / name, time_s) for name, time_s in (("a", 1_000_000_000), ("b", 1_700_000_000))]
    assert made[0].read_bytes() != made[1].read_bytes()
    for path in made:
        done = subprocess.run(
            [sys.executable, ROOT / ".ci" / "plain_sdist.py", path],
            env={**os.environ, "SOURCE_DATE_EPOCH": "1800000000"},
        )
        assert done.returncode == 0
    assert made[0].read_bytes() == made[1].read_bytes()
    # gzip's header has a time, too.
    assert int.from_bytes(made[0].read_bytes()[4:8], "little") == 1_800_000_000
    with tarfile.open(made[0]) as archive:
        assert [member.name for member in archive] == ["p", "p/one.py", "p/two.sh"]
        assert {(member.mtime, member.uid, member.uname) for member in archive} == {(1_800_000_000, 0, "")}
        content = archive.extractfile("p/one.py")
        assert content is not None and content.read() == b"one = 1\n"
        assert [oct(member.mode) for member in archive] == ["0o755", "0o644", "0o755"]


def sdist(folder: Path, time_s: int) -> Path:
    """Pack a folder whose files have this time, as setuptools packs it."""
    source = folder / "p"
    source.mkdir(parents=True)
    (source / "one.py").write_text("one = 1\n")
    (source / "two.sh").write_text("true\n")
    (source / "two.sh").chmod(0o775)
    for path in (*source.iterdir(), source):
        os.utime(path, (time_s, time_s))
    with tarfile.open(folder / "p.tar.gz", "w:gz") as archive:
        archive.add(source, "p")
    return folder / "p.tar.gz"


def test_the_provenance_names_the_commit_and_each_files_hash() -> None:
    statement = provenance("1.2.0", "c0ffee", {"b.whl": "22", "a.tar.gz": "11"}, "2026-12-01T00:00:00Z")
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    assert statement["subject"] == [
        {"name": "a.tar.gz", "digest": {"sha256": "11"}},
        {"name": "b.whl", "digest": {"sha256": "22"}},
    ]
    built = statement["predicate"]["buildDefinition"]
    assert {"gitCommit": "c0ffee"} in [each["digest"] for each in built["resolvedDependencies"]]
    assert built["buildType"] and statement["predicate"]["runDetails"]["builder"]["id"]


def test_a_rehearsal_with_a_failed_step_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    def missing() -> str:
        raise LeftOut("no such program")

    def broken() -> str:
        return run([sys.executable, "-c", "raise SystemExit('two builds differ')"])

    rehearsal = Rehearsal()
    assert rehearsal.step("good", lambda: "done") and not rehearsal.step("absent", missing)
    assert rehearsal.finish() == 0
    assert not rehearsal.step("bad", broken)
    assert rehearsal.finish() == 1
    table = capsys.readouterr().out.split("\n\n")[-1]
    assert "1 passed, 1 failed, 1 left out" in table
    assert re.search(r"^bad +FAILED +two builds differ$", table, re.MULTILINE)
    assert re.search(r"^absent +left out +no such program$", table, re.MULTILINE)


def test_a_release_has_the_image_and_the_chart() -> None:
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    used = [step.get("uses", "").partition("@")[0] for step in jobs["publish"]["steps"]]
    assert "docker/build-push-action" in used and used.count("actions/attest-build-provenance") == 3
    commands = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    assert any("helm package deploy/helm/kvrouter" in command for command in commands)
    assert any(command.startswith("helm push all/kvrouter-*.tgz") for command in commands)
    # Both builds of a commit have one time.
    assert sum("SOURCE_DATE_EPOCH" in command for command in commands) == 2
