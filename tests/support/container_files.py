# SPDX-License-Identifier: Apache-2.0
"""The parsed Dockerfile and compose file of the repository."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


class Instruction(NamedTuple):
    name: str
    text: str

    def words(self) -> list[str]:
        """Return the words of the instruction, whether it is written in exec form or as a plain line."""
        return json.loads(self.text) if self.text.startswith("[") else shlex.split(self.text)


def dockerfile() -> list[Instruction]:
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    instructions = []
    for line in filter(str.strip, joined.splitlines()):
        name, text = line.strip().split(maxsplit=1)
        instructions.append(Instruction(name, text))
    return instructions


def last(name: str) -> Instruction:
    return [step for step in dockerfile() if step.name == name][-1]
