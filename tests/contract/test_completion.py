# SPDX-License-Identifier: Apache-2.0
"""Shell completion of the command line, in a real bash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# The steps of bash for `kvrouter WORDS<TAB>`: it calls the function that the script registers, with the words so far.
COMPLETE = """
source "$1"; shift
[[ "$(complete -p kvrouter)" == *"-F _kvrouter_completion"* ]] || exit 3
COMP_WORDS=("$@"); COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_kvrouter_completion kvrouter
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return an environment with `kvrouter` on the path, and a home directory to install into."""
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "kvrouter"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m kvrouter.router.cli "$@"\n')
    command.chmod(0o755)
    return {**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}", "HOME": str(tmp_path), "SHELL": "/bin/bash"}


def bash(script: str, environment: dict[str, str], *arguments: object) -> str:
    command = ["bash", "--norc", "-c", script, "bash", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# The flags with which a client's command reaches a router that requires authentication.
ACCESS = ("--api-key", "--ca-file", "--client-certificate", "--client-key")


HAND_OVER = ("--hand-over", "--to", "--max-bytes", "--within")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["kvrouter", "wor"], {"workers"}),
        (["kvrouter", "config", ""], {"schema", "markdown", "example"}),
        (["kvrouter", "drain", "--"], {*HAND_OVER, "--model", "--url", *ACCESS, "--json", "--help"}),
        (["kvrouter", "serve", "--log-l"], {"--log-level"}),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_bash_completes_commands_and_flags(
    environment: dict[str, str], tmp_path: Path, words: list[str], wanted: set[str]
) -> None:
    # Typer recognises the shell by its process; the second command keeps bash from replacing itself.
    (tmp_path / "script").write_text(bash("kvrouter --show-completion; true", environment))
    assert set(bash(COMPLETE, environment, tmp_path / "script", *words).splitlines()) == wanted


def test_completion_is_installed_into_the_file_of_the_shell(environment: dict[str, str], tmp_path: Path) -> None:
    output = bash("kvrouter --install-completion; true", environment)
    assert "bash completion installed" in output
    assert "kvrouter" in (tmp_path / ".bashrc").read_text()
    script = tmp_path / ".bash_completions" / "kvrouter.sh"
    assert "workers" in bash(COMPLETE, environment, script, "kvrouter", "wo").split()
