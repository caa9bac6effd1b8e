# SPDX-License-Identifier: Apache-2.0
"""The parser of a file that lists workers, as YAML or JSON (which is YAML). A SettingError names the line.

The file is a list, or a mapping with the list under the key `workers`, as in the settings file.
"""

from __future__ import annotations

from typing import Any

import yaml

from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.base.common.yaml_text import Loader, read_yaml
from kvrouter.router.follow.discovery.candidate import Candidate, candidate_of
from kvrouter.router.follow.discovery.reconcile import Name, name_of
from kvrouter.router.model.config.live_settings import WORKERS
from kvrouter.router.model.workers.listed_worker import listed_worker

FORM = "write a list of workers, like `- {worker_id: w0, url: http://10.0.0.5:8000}`, or [] for none"


def parse_workers(text: str, where: str, source: str) -> list[Candidate]:
    """Return the workers that the text lists. Raises SettingError.

    Args:
        text: The content of the file.
        where: The name of the file in errors.
        source: The name of the source in the registrations.
    """

    def read(loader: Loader) -> list[tuple[yaml.Node, Any]]:
        """Return the entries of the list, each with its node, which knows its line."""
        node = loader.get_single_node()
        if node is None:
            # A writer that does not rename leaves the file empty for a moment, which must not drop the fleet.
            raise SettingError(f"{where} is empty: {FORM}")
        if isinstance(node, yaml.MappingNode) and [key.value for key, _ in node.value] == [WORKERS]:
            node = node.value[0][1]
        if not isinstance(node, yaml.SequenceNode):
            raise SettingError(f"{where} line {node.start_mark.line + 1} is no list: {FORM}")
        return [(item, loader.construct_object(item, deep=True)) for item in node.value]

    candidates: list[Candidate] = []
    lines: dict[Name, int] = {}
    for item, entry in read_yaml(text, where, FORM, read):
        line = item.start_mark.line + 1
        try:
            candidate = candidate_of(listed_worker(entry), source)
        except SettingError as error:
            raise SettingError(f"{where} line {_line(item, error.message)}: {error.message}") from None
        name = name_of(candidate.registration)
        if name in lines:
            raise SettingError(
                f"{where} line {line}: {name[0]!r} is in line {lines[name]} too; give each its own worker_id or dp_rank"
            )
        lines[name] = line
        candidates.append(candidate)
    return candidates


def _line(item: yaml.Node, message: str) -> int:
    """Return the line of the field with which the message begins, or else of the entry."""
    first = message.partition(" ")[0].partition(".")[0]
    if isinstance(item, yaml.MappingNode):
        for key, _ in item.value:
            if getattr(key, "value", None) == first:
                return int(key.start_mark.line) + 1
    return int(item.start_mark.line) + 1
