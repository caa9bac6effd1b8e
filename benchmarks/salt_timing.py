# SPDX-License-Identifier: Apache-2.0
"""Claim: with salts made by the router, the time of an answer shows nothing of another tenant's prompt.

One tenant sends one of two prompts. Another tenant sends both, compares only the times of the answers, and guesses which
prompt was sent before. Replicas are simulated: a token that is not cached takes 50 us, so a prompt takes 4 ms.
"""

from __future__ import annotations

from benchmarks.report import Row, Settings, progress, run
from tests.support.salt_attack import Outcome, run_attack, sigmas

PATHS = ("/query", "/select", "/v1/completions", "/v1/chat/completions")
TOKEN_S = 50e-6
SEED = 32
# The largest accepted difference from the guesses of a coin, in standard deviations.
MOST_SIGMAS = 3.0


def measure(settings: Settings) -> tuple[list[Row], list[str]]:
    """Return the share of right guesses for each path, without and with salts."""
    trials, rows = settings.pick(4_000, 400), []
    for makes_salts in (False, True):
        progress(f"{trials} trials, {'with' if makes_salts else 'without'} salts")
        folder = settings.folder
        outcome = run_attack(folder, trials, SEED, makes_salts=makes_salts, timed=PATHS, token_s=TOKEN_S)
        rows += [_row(outcome, path, makes_salts=makes_salts) for path in PATHS]
    return rows, ["half of the trials are for learning; a coin is right in 50 %"]


def _row(outcome: Outcome, path: str, *, makes_salts: bool) -> Row:
    trials, right = outcome.trials[path], outcome.right[path]
    spread = sigmas(trials, right)
    name = f"{path}, {'with' if makes_salts else 'without'} salts, {trials} guesses ({spread:+.1f} sigma)"
    share = 100.0 * right / trials
    if not makes_salts:
        return Row(name, "% right", share)
    return Row(name, "% right", share, f"within {MOST_SIGMAS:.0f} sigma of 50", abs(spread) <= MOST_SIGMAS)


if __name__ == "__main__":
    run("salt_timing", __doc__, measure)
