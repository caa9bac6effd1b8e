# SPDX-License-Identifier: Apache-2.0
"""One tenant guesses which prompts another tenant has sent, by all that its key can read.

With salts that the router makes, its guesses are no better than those of a coin.
`make salt-attack` runs 100,000 trials.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.salt_attack import ASKING, PROXIED, READABLE, run_attack, sigmas

TRIALS = int(os.environ.get("KVROUTER_TEST_SALT_TRIALS", "1500"))
# The same for every run, because one of 370 seeds passes 3 sigma although nothing is wrong.
SEED = int(os.environ.get("KVROUTER_TEST_SEED", "32"))
# Without salts, the guesses are so often right that few trials show it.
TRIALS_WITHOUT = 400
MOST_SIGMAS = 3.0
# The paths that a tenant must not read at all.
OPERATORS_PATHS = ("/decisions", "/events", "/metrics", "/workers", "/history", "/store", "/diagnosis", "/settings")


def test_with_made_salts_a_guess_is_no_better_than_a_coin(tmp_path: Path) -> None:
    outcome = run_attack(tmp_path, TRIALS, SEED, makes_salts=True)
    for path in (*PROXIED, *ASKING, *READABLE):
        assert outcome.statuses[path], path
    for path in OPERATORS_PATHS:
        assert outcome.statuses[path] == {403}, path
    for path in (*PROXIED, "/query", "/select", "/select_and_reserve"):
        assert outcome.statuses[path] == {200}, path
    trials, right = outcome.total
    print(f"seed {SEED}: {right} of {trials} guesses after as many for learning: {sigmas(trials, right):+.2f} sigma")
    assert abs(sigmas(trials, right)) <= MOST_SIGMAS, (SEED, dict(outcome.trials), dict(outcome.right))


def test_without_made_salts_the_same_guesses_are_right(tmp_path: Path) -> None:
    outcome = run_attack(tmp_path, TRIALS_WITHOUT, SEED, makes_salts=False)
    trials, right = outcome.total
    assert sigmas(trials, right) > 2 * MOST_SIGMAS, (SEED, trials, right)
    for path in ("/query", "/select", *PROXIED):
        # Some 13 guesses a path, the first of which are made while little was learned: with more, all are right.
        assert outcome.right[path] > 0.7 * outcome.trials[path], (SEED, path, outcome.trials[path], outcome.right[path])
