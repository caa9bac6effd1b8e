# SPDX-License-Identifier: Apache-2.0
"""Check of the image without a container engine (`make image-check`): the Dockerfile runs in chroots of Debian.

The chroots are of the image's Debian release and made of Debian's packages alone. The check runs the Dockerfile's
instructions, then the image's command as its user, its health check, and its end. Exit code 0 means that everything
works as in the image.

It differs from a container engine as follows: Python is Debian's (3.11.2 of bookworm) and not python.org's, so redis
needs one package more than the lock has (async-timeout, before 3.11.3); there are no cgroups, namespaces or
capabilities. The check needs root, debootstrap and the package registries, and takes some minutes.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support.container_files import ROOT, Instruction, dockerfile, last
from tests.support.ports import free_port

# libpython3-dev has Python's headers, which python.org's image includes.
PACKAGES = ("python3", "python3-venv", "python3-pip", "libpython3-dev", "ca-certificates")
PATIENCE_S = 60.0
# Files by which pip and apt reach their registries. A container engine passes on its own.
HOST_FILES = [
    *("etc/pip.conf", "etc/resolv.conf", "etc/hosts", "etc/ssl/certs/ca-certificates.crt"),
    *("etc/apt/sources.list", "etc/apt/sources.list.d", "etc/apt/apt.conf.d", "etc/apt/auth.conf.d"),
]


class Stage:
    """A stage of the Dockerfile: one FROM and the instructions after it, run in a chroot."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.user = "0:0"
        self.cwd = "/"
        self.env = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
            **{
                name: value
                for name, value in os.environ.items()
                if name.startswith("PIP_") or name.lower().endswith("_proxy")
            },
        }

    def command(self, words: Sequence[str]) -> list[str]:
        variables = [f"{name}={value}" for name, value in self.env.items()]
        inside = ["env", "-i", *variables, "sh", "-c", f"cd {shlex.quote(self.cwd)} && exec {shlex.join(words)}"]
        return ["chroot", f"--userspec={self.user}", "--groups=", str(self.root), *inside]

    def run(self, words: Sequence[str]) -> None:
        subprocess.run(self.command(words), check=True)


def base(release: str, root: Path) -> None:
    """Make a chroot that is as near to `python:*-slim-RELEASE` as Debian's packages come."""
    # Take the mirror from this machine's source that has Debian's own release.
    urls = re.findall(r"^(?:deb .*?|URIs: *)(https?://\S+?)/?(?:\s|$)", sources(), re.MULTILINE)
    mirror = next(url for url in urls if url.endswith("/debian"))
    include = f"--include={','.join(PACKAGES)}"
    subprocess.run(
        ["debootstrap", "--variant=minbase", include, release, str(root), mirror], check=True, stdout=subprocess.DEVNULL
    )
    for name in HOST_FILES:
        there, here = Path("/", name), root / name
        if there.is_dir():
            shutil.copytree(there, here, dirs_exist_ok=True)
        elif there.exists():
            here.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(there, here)
    (root / "usr/local/bin/python").symlink_to("/usr/bin/python3")
    # python.org's image lets pip install beside Debian's packages.
    for guard in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
        guard.unlink()


def sources() -> str:
    files = [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")]
    return "\n".join(path.read_text() for path in files if path.is_file())


def build(folder: Path) -> Stage:
    """Run all instructions, and return the last stage."""
    pristine = folder / "base"
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for step in dockerfile():
        print(f"{step.name} {step.text}"[:160], flush=True)
        if step.name == "FROM":
            image, *named = step.words()
            if not pristine.exists():
                base(image.rpartition("-")[2], pristine)
            stage = Stage(folder / f"stage{len(stages)}")
            subprocess.run(["cp", "-a", str(pristine), str(stage.root)], check=True)
            stages[named[1] if named else ""] = stage
        else:
            assert stage is not None
            instruct(stage, step, stages)
    assert stage is not None
    return stage


def instruct(stage: Stage, step: Instruction, stages: dict[str, Stage]) -> None:
    match step.name:
        case "WORKDIR":
            stage.cwd = step.text
            (stage.root / step.text.lstrip("/")).mkdir(parents=True, exist_ok=True)
        case "ENV":
            for word in step.words():
                name, _, value = word.partition("=")
                stage.env[name] = value.replace("$PATH", stage.env["PATH"])
        case "USER":
            stage.user = step.text
        case "RUN":
            stage.run(["sh", "-c", step.text])
            if "requirements-image.lock" in step.text:
                stage.run(["pip", "--python", "/opt/kvrouter", "install", "--quiet", "async-timeout"])
        case "COPY":
            *words, target = step.words()
            source_root = ROOT
            if words[0].startswith("--from="):
                source_root = stages[words.pop(0).partition("=")[2]].root
            into = (
                stage.root / stage.cwd.lstrip("/") / target if not target.startswith("/") else stage.root / target[1:]
            )
            for word in words:
                copy(source_root / word.lstrip("/"), into)
        case "LABEL" | "EXPOSE" | "HEALTHCHECK" | "ENTRYPOINT" | "CMD":
            pass
        case _:
            raise SystemExit(f"the check does not know {step.name}")


def copy(source: Path, into: Path) -> None:
    if source.is_dir():
        # Leave out the files that .dockerignore leaves out.
        left_out = shutil.ignore_patterns("__pycache__", "*.py[cod]", "*.so", "build", "*.egg-info")
        ignored = left_out if source.is_relative_to(ROOT) else None
        shutil.copytree(source, into, symlinks=True, ignore=ignored, dirs_exist_ok=True)
    else:
        into.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, into)


def serve(stage: Stage) -> None:
    """Check that the image's command turns healthy, runs as its user, and ends with 0."""
    stage.env["KVROUTER_PORT"] = str(free_port())
    health = stage.command(json.loads(last("HEALTHCHECK").text.partition(" CMD ")[2]))
    command = stage.command([*last("ENTRYPOINT").words(), *last("CMD").words()])
    assert subprocess.run(health, capture_output=True).returncode != 0, "healthy before its start"
    with subprocess.Popen(command) as process:
        try:
            deadline = time.monotonic() + PATIENCE_S
            while subprocess.run(health, capture_output=True).returncode:
                assert process.poll() is None and time.monotonic() < deadline, "it does not turn healthy"
                time.sleep(0.2)
            status = Path(f"/proc/{process.pid}/status").read_text()
            user = stage.user.partition(":")[0]
            assert re.search(rf"^Uid:\s+{user}\s+{user}\s", status, re.MULTILINE), status
            data = stage.root / stage.env["KVROUTER_DATA_DIR"].lstrip("/")
            assert any(data.rglob("*.aof")), "the private store keeps nothing where the volume is"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_S)
    assert process.returncode == 0, process.returncode


def main() -> int:
    if os.geteuid() or shutil.which("debootstrap") is None:
        print("image-check needs root and debootstrap (apt-get install debootstrap)", file=sys.stderr)
        return 2
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvrouter-image-") as name:
        stage = build(Path(name))
        serve(stage)
        stage.run(["python", "-c", "import tokenizers, jinja2, opentelemetry.sdk, grpc"])
        megabytes = sum(path.lstat().st_size for path in stage.root.glob("opt/kvrouter/**/*")) / 1e6
        if len(sys.argv) > 1:
            patched(stage, sys.argv[1])
    print(f"1 passed, 0 failed: /opt/kvrouter is {megabytes:.0f} MB; {time.monotonic() - began:.0f} s")
    return 0


def patched(stage: Stage, python: str) -> None:
    """Copy the patch as the engine image and the chart's init step do, and load it in a vLLM of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(stage.root / "opt/kvrouter-patch", folder, dirs_exist_ok=True)
        load = "from vllm.plugins import load_plugins_by_group as load; print(sorted(load('vllm.general_plugins')))"
        env = {**os.environ, "PYTHONPATH": folder}
        done = subprocess.run([python, "-c", load], env=env, cwd=folder, capture_output=True, text=True, check=True)
        assert "'kvrouter'" in done.stdout, done.stdout + done.stderr
        print("vLLM loads the patch from the copy")


if __name__ == "__main__":
    sys.exit(main())
