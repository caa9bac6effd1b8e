# SPDX-License-Identifier: Apache-2.0
"""`make fuzz`: the decoders and the stages after them under atheris, a coverage-guided fuzzer (libFuzzer).

    python -m tests.fuzz.run [--inputs N] [--seed N] [--keep FOLDER]
    python -m tests.fuzz.run replay TARGET FILE

It runs at most two processes. An input that fails, hangs or takes too much memory is saved and named; the second form
replays it and needs no atheris. The seed is printed; the same seed and the same code give the same inputs.
"""

from __future__ import annotations

import argparse
import importlib
import random
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# This module is run as a program, and no other module imports it.
from tests.fuzz.script import mutated

HERE = Path(__file__).resolve().parent

# Share of the inputs by target: single payloads are fast, stories also go through all stages after the decoders.
SHARES = {"payload_target": 0.92, "stock_target": 0.03, "report_target": 0.05}
INPUTS = 1_050_000
PROCESSES = 2

# One input takes milliseconds at worst; a process has 200 MB.
HANG_S = 10
MAX_RSS_MB = 768
MAX_INPUT_BYTES = 32_768

# Share of the project's own mutations; the others are libFuzzer's, guided by the same coverage.
OWN_SHARE = 0.8


def fuzz(target: str, arguments: list[str]) -> None:
    """Fuzz one target in this process; never returns."""
    import atheris

    with atheris.instrument_imports(include=["kvrouter.events", "kvrouter.router"]):
        module = importlib.import_module(f"tests.fuzz.{target}")
    donors = module.corpus()
    for data in donors:
        module.run(data)

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < OWN_SHARE:
            return bytes(mutated(data, rng, donors)[:max_size])
        return bytes(atheris.Mutate(data, len(data)))

    atheris.Setup([target, *arguments], module.run, custom_mutator=mutate)
    atheris.Fuzz()


def start(target: str, inputs: int, seed: int, keep: Path) -> str | None:
    """Fuzz one target in a child process.

    Returns:
        A text with the error and the failing input's file, or None if no input failed.
    """
    keep.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for number, data in enumerate(importlib.import_module(f"tests.fuzz.{target}").corpus()):
            (Path(folder) / f"{number:03}").write_bytes(data)
        options = [
            f"-runs={inputs}",
            f"-seed={seed}",
            f"-timeout={HANG_S}",
            f"-rss_limit_mb={MAX_RSS_MB}",
            f"-max_len={MAX_INPUT_BYTES}",
            "-len_control=0",
            "-print_final_stats=1",
            "-verbosity=0",
            f"-artifact_prefix={keep / target}-",
            folder,
        ]
        begin = time.monotonic()
        command = [sys.executable, "-m", "tests.fuzz.run", "child", target, *options]
        process = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        took_s = time.monotonic() - begin
    output = process.stdout + process.stderr
    counts = dict(re.findall(r"stat::(\w+):\s+(\d+)", output))
    ran = int(counts.get("number_of_executed_units", 0))
    print(
        f"{target}: {ran:,} inputs in {took_s:.0f} s ({ran / took_s:,.0f}/s), "
        f"{counts.get('new_units_added', '?')} that reached new code, peak {counts.get('peak_rss_mb', '?')} MB",
        flush=True,
    )
    if process.returncode == 0:
        return None
    saved = re.search(r"Test unit written to (\S+)", output)
    file = saved[1] if saved else "(none saved)"
    return f"{target}: failed on {file}\n{output[-4_000:]}\nreplay: python -m tests.fuzz.run replay {target} {file}"


def replay(target: str, file: Path) -> None:
    importlib.import_module(f"tests.fuzz.{target}").run(file.read_bytes())
    print("passed")


def main() -> int:
    if sys.argv[1:2] == ["child"]:
        fuzz(sys.argv[2], sys.argv[3:])
    if sys.argv[1:2] == ["replay"]:
        replay(sys.argv[2], Path(sys.argv[3]))
        return 0
    parser = argparse.ArgumentParser(description="Coverage-guided fuzzing of what comes over the wire.")
    parser.add_argument("--inputs", type=int, default=INPUTS, help="of all targets together")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1, 2**31))
    parser.add_argument("--keep", type=Path, default=HERE / "found", help="where failing inputs are saved")
    options = parser.parse_args()
    print(f"seed {options.seed}: repeat with --seed {options.seed}", flush=True)
    with ThreadPoolExecutor(PROCESSES) as pool:
        work = [
            pool.submit(start, t, int(options.inputs * share), options.seed, options.keep)
            for t, share in SHARES.items()
        ]
        failures = [failure for result in work if (failure := result.result())]
    print("\n\n".join(failures) if failures else f"{options.inputs:,} inputs, none failed")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
