# SPDX-License-Identifier: Apache-2.0
"""`make sanitize`: the compiled modules under AddressSanitizer and UndefinedBehaviorSanitizer.

    python -m tests.fuzz.sanitize [--inputs N] [--heads N] [--seed N]

It builds the package into a temporary folder with gcc's sanitizers, and runs the fuzz targets, the heads of requests
and the property tests of the compiled modules against that build. Python allocates its objects with malloc, so that a
read past the end of one is detected too. First it proves that the sanitizers stop a faulty program; otherwise none of
the runs could find anything.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SOURCES = (
    "client",
    "contract",
    "events",
    "router",
    "simulator",
    "replay",
    "shadow",
    "pyproject.toml",
    "setup.py",
    "README.md",
    "LICENSE",
)
# Property tests that compare compiled modules with brute force or with their plain twins.
PROPERTIES = (
    *("test_chain_hash.py", "test_page_hash.py", "test_hit_rule.py", "test_sglang_rule.py", "test_long_prompts.py"),
    *("test_numbers.py", "test_query_template.py", "test_residency.py", "test_tables.py", "test_plain_head.py"),
    *("test_held_runs.py", "test_events_codec.py", "test_event_runs.py", "test_libzmq.py"),
)
FAULT = "int main(int argc, char **argv) { char *page = __builtin_malloc(8); return page[8 + argc]; }"
UNDEFINED = "int main(int argc, char **argv) { return (2147483647 + argc) & 1; }"
FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-w")


def runtime(name: str) -> str:
    path = subprocess.run(
        ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(path).is_absolute():
        raise SystemExit(f"gcc has no {name}: install its sanitizers (Debian: libgcc-12-dev, or that of your gcc)")
    return path


def prove(folder: Path) -> None:
    """Check that both sanitizers stop a faulty program; exit if one does not."""
    for name, source, words in (("read", FAULT, "heap-buffer-overflow"), ("sum", UNDEFINED, "signed integer overflow")):
        file = folder / f"{name}.c"
        file.write_text(source)
        subprocess.run(["gcc", *FLAGS, "-o", str(file.with_suffix("")), str(file)], check=True)
        process = subprocess.run(
            [str(file.with_suffix(""))], capture_output=True, text=True, errors="replace", check=False
        )
        if process.returncode == 0 or words not in process.stderr:
            raise SystemExit(f"the sanitizers do not see a {words}: {process.stderr}")
    print("the sanitizers stop a read past the end and an overflow", flush=True)


def build(folder: Path) -> Path:
    """Compile the package with the sanitizers, and return its folder for PYTHONPATH."""
    clone, site = folder / "clone", folder / "site"
    clone.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy(ROOT / name, clone)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    options = ["--no-deps", "--no-build-isolation", "--no-compile", "--target", str(site)]
    subprocess.run([*pip, "install", *options, str(clone)], env={**os.environ, "KVROUTER_SANITIZE": "1"}, check=True)
    missing = [
        path
        for wing in ("events", "router")
        for path in (ROOT / wing).rglob("*.p[xy][dx]")
        if not list((site / "kvrouter" / path.relative_to(ROOT)).parent.glob(f"{path.stem}.*.so"))
    ]
    if missing:
        raise SystemExit(f"not compiled: {', '.join(map(str, missing))}")
    return site


def run(environment: Mapping[str, str], command: Sequence[str]) -> bool:
    print(" ".join(command), flush=True)
    # PYTHONPATH decides which `kvrouter` is imported: the compiled one, not that of this checkout.
    process = subprocess.run([sys.executable, *command], env=environment, cwd=ROOT, check=False)
    return process.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=100_000, help="of the fuzz targets together")
    parser.add_argument("--heads", type=int, default=300_000, help="heads of requests, read by both parsers")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1, 2**31))
    options = parser.parse_args()
    print(f"seed {options.seed}: repeat with --seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prove(folder)
        site = build(folder)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]),
            "LD_PRELOAD": " ".join(map(runtime, ("libasan.so", "libubsan.so"))),
            "PYTHONMALLOC": "malloc",
            # CPython frees little at its end, so leaks are not reported.
            "ASAN_OPTIONS": "detect_leaks=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "KVROUTER_TEST_EXAMPLES": "few",
        }
        properties = [str(ROOT / "tests" / "property" / file) for file in PROPERTIES]
        check_site = f"import kvrouter.router as found; assert found.__file__.startswith({str(site)!r}), found.__file__"
        passed = [
            run(environment, ["-c", check_site]),
            run(environment, ["-m", "tests.fuzz.plain_fuzz", str(options.inputs), str(options.seed)]),
            run(environment, ["-m", "tests.property.test_plain_head", str(options.heads), str(options.seed)]),
            run(environment, ["-m", "pytest", "--capture=sys", "-p", "no:cacheprovider", *properties]),
        ]
    print("no finding" if all(passed) else "FAILED: see above")
    return not all(passed)


if __name__ == "__main__":
    sys.exit(main())
