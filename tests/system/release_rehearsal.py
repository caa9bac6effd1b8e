# SPDX-License-Identifier: Apache-2.0
"""Rehearsal of a release without a registry (`make release-check`).

    python -m tests.system.release_rehearsal [--python VERSION ...] [--without STEP ...]

It builds the commit that is checked out, as the release workflow does, and tries what it built:

- sdists and wheels of both distributions, twice, in two folders; the files must be the same, byte for byte;
- the wheels in a clean environment of every Python of this machine that is promised, with the demo;
- the chart, the SBOM, and the image's steps in a chroot (`tests/system/image_chroot.py`, as root);
- `provenance.json`: an in-toto statement (SLSA 1) with the commit and the SHA-256 of each file. It is not signed; the
  workflow's attestations are.

Everything lies in build/release afterwards. The exit code is 1 if a step failed. A step that needs a program or a Python
that is not here is left out, and the table at the end says so. Wheels have this machine's platform; those of a release
are built in the images of cibuildwheel.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.system.test_installation import VERSIONS, interpreter

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "release"
CHART = ROOT / "deploy" / "helm" / "kvrouter"
LOCK = ROOT / "requirements-build.lock"
# Folders of two lengths, in which nothing but the commit may decide what a build makes.
FOLDERS = ("a", "another-folder")
# Steps by the names that --without takes.
STEPS = ("distributions", "install", "chart", "sbom", "image")
BUILD_TYPE = "https://slsa-framework.github.io/github-actions-buildtypes/workflow/v1"
CAUTION = "from kvrouter.router.base.common.compiled import caution; raise SystemExit(caution())"
PATCH = "import kvrouter.engine_patch.plugin, kvrouter.engine_patch.events.patch.messages"
# Helm's library returns what it finds wrong, and does not fail.
PACKAGE = """
import sys, helm_python
if errors := helm_python.lint(sys.argv[1], strict=True)["errors"]:
    sys.exit("\\n".join(map(str, errors)))
print(helm_python.package(sys.argv[1], destination=sys.argv[2]))
"""


class Failed(Exception):
    """A step that did not go as in a release; the text names the reason."""


class LeftOut(Exception):
    """A step that needs what is not on this machine; the text names it."""


@dataclass
class Rehearsal:
    """The steps so far, as rows of the table."""

    rows: list[tuple[str, str, str]] = field(default_factory=list)

    def step(self, name: str, work: Callable[[], str]) -> bool:
        """Do a step and note how it went. Return whether it may go on from there."""
        print(f"{name} ...", flush=True)
        began = time.monotonic()
        try:
            result, detail = "ok", work()
        except LeftOut as reason:
            result, detail = "left out", str(reason)
        except Failed as reason:
            result, detail = "FAILED", str(reason)
        print(f"{name}: {result}, {time.monotonic() - began:.0f} s; {detail}", flush=True)
        self.rows.append((name, result, detail.splitlines()[-1] if detail else ""))
        return result == "ok"

    def finish(self) -> int:
        """Print the table, and return the exit code."""
        width = max(len(name) for name, _, _ in self.rows)
        print()
        for name, result, detail in self.rows:
            print(f"{name:{width}}  {result:8}  {detail}")
        failed = sum(result == "FAILED" for _, result, _ in self.rows)
        left_out = sum(result == "left out" for _, result, _ in self.rows)
        print(f"{len(self.rows) - failed - left_out} passed, {failed} failed, {left_out} left out: {OUT}")
        return int(failed > 0)


def run(command: Sequence[str | Path], cwd: Path = ROOT, **variables: str) -> str:
    """Return a command's output. Raises Failed with the end of what it printed."""
    # Settings of this environment's Python, of our programs, and of make, which would pass its flags on.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "KVROUTER_", "MAKE", "MFLAGS"))
    }
    done = subprocess.run(
        command, cwd=cwd, env=environment | variables, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode:
        raise Failed(
            f"{' '.join(map(str, command))} ended with {done.returncode}\n{(done.stdout + done.stderr)[-2000:]}"
        )
    return done.stdout


def sha256(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def environment(python: Path, folder: Path, *packages: str | Path) -> Path:
    """Make a virtual environment with packages, and return its folder of programs."""
    run([python, "-m", "venv", folder])
    run([folder / "bin" / "pip", "--quiet", "--disable-pip-version-check", "install", *packages])
    return folder / "bin"


class Distributions:
    """The files of both distributions, built twice from clones of one commit."""

    def __init__(self, scratch: Path, commit: str, epoch: str) -> None:
        self._scratch = scratch
        self._commit = commit
        self._epoch = epoch

    def tools(self, version: str, python: Path) -> Path:
        """Return the programs of an environment that builds, with what the image's build uses."""
        folder = self._scratch / f"tools-{version}"
        if folder.exists():
            return folder / "bin"
        tools = environment(python, folder, "build>=1.2,<2")
        run([tools / "pip", "--quiet", "install", "--require-hashes", "--no-deps", "--requirement", LOCK])
        return tools

    def build(self, tools: Path, source: Path, out: Path, *kinds: str) -> None:
        """Build a source folder's files of these kinds into a folder."""
        command: list[str | Path] = [tools / "python", "-m", "build", "--no-isolation", *kinds, "--outdir", out, source]
        run(command, cwd=self._scratch, SOURCE_DATE_EPOCH=self._epoch)

    def sources(self, version: str, python: Path) -> str:
        """Build the sdists, and the patch's wheel out of its sdist, in both folders."""
        tools = self.tools(version, python)
        for name in FOLDERS:
            clone, out = self._scratch / name / "clone", self._scratch / name / "out"
            run(["git", "clone", "--quiet", "--no-checkout", ROOT, clone])
            run(["git", "checkout", "--quiet", self._commit], cwd=clone)
            self.build(tools, clone, out, "--sdist")
            self.build(tools, clone / "engine_patch", out)
            plain: list[str | Path] = [tools / "python", clone / ".ci" / "plain_sdist.py", *out.glob("*.tar.gz")]
            run(plain, SOURCE_DATE_EPOCH=self._epoch)
        return self.compare("*")

    def wheels(self, version: str, python: Path) -> str:
        """Build the router's wheel for one Python out of the sdist, in both folders."""
        tools = self.tools(version, python)
        (sdist,) = (self._scratch / FOLDERS[0] / "out").glob("hybrid_kv_router-*.tar.gz")

        def build(name: str) -> None:
            unpacked = self._scratch / name / f"sdist-{version}"
            with tarfile.open(sdist) as archive:
                archive.extractall(unpacked, filter="data")
            (source,) = unpacked.iterdir()
            self.build(tools, source, self._scratch / name / "out", "--wheel")

        with ThreadPoolExecutor() as pool:
            list(pool.map(build, FOLDERS))
        return self.compare(f"hybrid_kv_router-*-cp{version.replace('.', '')}-*.whl")

    def compare(self, pattern: str) -> str:
        """Keep the files of the first folder that are the same in the other. Raises Failed at a difference."""
        first, second = ({path.name: path for path in (self._scratch / name / "out").glob(pattern)} for name in FOLDERS)
        if not first or first.keys() != second.keys():
            raise Failed(f"one build made {sorted(first)}, the other {sorted(second)}")
        different = [name for name in first if sha256(first[name]) != sha256(second[name])]
        if different:
            kept = self._scratch.with_name("release-differs")
            for name in FOLDERS:
                shutil.copytree(self._scratch / name / "out", kept / name, dirs_exist_ok=True)
            raise Failed(f"two builds differ, compare them in {kept}: {', '.join(sorted(different))}")
        for path in first.values():
            shutil.copy(path, OUT)
        return f"the same bytes twice: {', '.join(sorted(first))}"


def try_wheels(version: str, python: Path, scratch: Path) -> str:
    """Install both wheels in a clean environment, and run what they bring."""
    (router,) = OUT.glob(f"hybrid_kv_router-*-cp{version.replace('.', '')}-*.whl")
    (patch,) = OUT.glob("hybrid_kv_engine_patch-*.whl")
    bin_folder = environment(python, scratch / f"try-{version}", router, patch)
    run([bin_folder / "pip", "check"])
    shown = run([bin_folder / "kvrouter", "--version"], cwd=scratch).strip()
    run([bin_folder / "python", "-c", CAUTION], cwd=scratch)
    run([bin_folder / "python", "-c", PATCH], cwd=scratch)
    # The demo fails if one prediction is not what the replicas reuse.
    run([bin_folder / "kvrouter", "demo"], cwd=scratch)
    return f"{shown}; the modules are compiled, the patch is imported, the demo predicts right"


def chart() -> str:
    """Check and package the chart."""
    # In a process of its own, which Helm's library may end.
    return f"{Path(run([sys.executable, '-c', PACKAGE, CHART, OUT]).split()[-1]).name}"


def sbom() -> str:
    """Write what is in the image."""
    run(["make", "sbom"])
    document = OUT / "hybrid-kv-router.cdx.json"
    shutil.copy(ROOT / "build" / "sbom.json", document)
    components = json.loads(document.read_text())["components"]
    return f"{document.name} names {len(components)} packages"


def image() -> str:
    """Run the image's steps in a chroot."""
    if os.geteuid() or shutil.which("debootstrap") is None:
        raise LeftOut("needs root and debootstrap (apt-get install debootstrap)")
    return run([sys.executable, "-m", "tests.system.image_chroot"]).splitlines()[-1]


def provenance(version: str, commit: str, files: Mapping[str, str], began: str) -> dict[str, Any]:
    """Return an in-toto statement about these files.

    Args:
        version: The version of the release.
        commit: The commit that was built.
        files: The SHA-256 of each file, by name.
        began: When the builds began, as a time of RFC 3339.
    """
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in sorted(files.items())],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {
                    "workflow": {"path": ".github/workflows/release.yml", "ref": f"refs/tags/v{version}"}
                },
                "resolvedDependencies": [
                    {"uri": "git+file:.", "digest": {"gitCommit": commit}},
                    {"uri": f"file:{LOCK.name}", "digest": {"sha256": sha256(LOCK)}},
                ],
            },
            "runDetails": {
                "builder": {"id": "make release-check"},
                "metadata": {"startedOn": began, "finishedOn": rfc3339()},
            },
        },
    }


def rfc3339() -> str:
    """Return the time now."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", action="append", metavar="VERSION", choices=VERSIONS, help="only these Pythons")
    parser.add_argument(
        "--without", action="append", metavar="STEP", choices=STEPS, default=[], help="leave out a step"
    )
    options = parser.parse_args()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    commit = run(["git", "rev-parse", "HEAD"]).strip()
    epoch = run(["git", "show", "--no-patch", "--format=%ct", commit]).strip()
    began = rfc3339()
    print(f"release {version} of commit {commit}, into {OUT}", flush=True)
    if run(["git", "status", "--porcelain"]).strip():
        print("there are changes that are not committed: they are not built", flush=True)
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    rehearsal = Rehearsal()
    pythons = {each: interpreter(each) for each in options.python or VERSIONS}
    here = {each: path for each, path in pythons.items() if path is not None}
    with tempfile.TemporaryDirectory(prefix="kvrouter-release-") as name:
        scratch = Path(name)
        if "distributions" not in options.without and here:
            build(rehearsal, Distributions(scratch, commit, epoch), here, "install" not in options.without, scratch)
        for each in pythons.keys() - here.keys():
            rehearsal.rows.append((f"Python {each}", "left out", "no such Python on the PATH or in pyenv"))
        for step, work in (("chart", chart), ("sbom", sbom), ("image", image)):
            if step not in options.without:
                rehearsal.step(step, work)
    files = {path.name: sha256(path) for path in OUT.iterdir()}
    (OUT / "provenance.json").write_text(json.dumps(provenance(version, commit, files, began), indent=2) + "\n")
    return rehearsal.finish()


def build(
    rehearsal: Rehearsal, distributions: Distributions, pythons: Mapping[str, Path], with_trial: bool, scratch: Path
) -> None:
    """Build for each Python, and try what was built."""
    first = next(iter(pythons.items()))
    if not rehearsal.step("sdists, the patch's wheel", lambda: distributions.sources(*first)):
        return
    for version, python in pythons.items():
        built = rehearsal.step(f"wheel for Python {version}", partial(distributions.wheels, version, python))
        if built and with_trial:
            rehearsal.step(f"installed, Python {version}", partial(try_wheels, version, python, scratch))


if __name__ == "__main__":
    sys.exit(main())
