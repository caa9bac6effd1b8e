# SPDX-License-Identifier: Apache-2.0
"""The parser of a file that lists workers, as YAML or JSON (which is YAML). Pure.

A SettingError names the line. An entry is a SPEC as for `--worker`, or a mapping with the fields of `POST /register` and `state`.
"""

from __future__ import annotations

import difflib
from typing import Any

import msgspec
import yaml

from kvrouter.contract.registrations import RegisterBody
from kvrouter.router.base.common.errors import BadQuestion, SettingError
from kvrouter.router.follow.discovery.candidate import Candidate, candidate_of
from kvrouter.router.follow.discovery.reconcile import Name, name_of
from kvrouter.router.model.workers.registration import UNKNOWN_MODEL
from kvrouter.router.model.workers.registration_from_body import registration_of
from kvrouter.router.model.workers.worker_spec import parse_worker

FIELDS = (*RegisterBody.__struct_fields__, "state")
STATES = ("active", "draining")
FORM = "write a list of workers, like `- {worker_id: w0, url: http://10.0.0.5:8000}`, or [] for none"


def parse_workers(text: str, where: str, source: str) -> list[Candidate]:
    """Return the workers that the text lists. Raises SettingError.

    Args:
        text: The content of the file.
        where: The name of the file in errors.
        source: The name of the source in the registrations.
    """
    loader: yaml.SafeLoader | None = None
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            # A writer that does not rename leaves the file empty for a moment, which must not drop the fleet.
            raise SettingError(f"{where} is empty: {FORM}")
        if not isinstance(node, yaml.SequenceNode):
            raise SettingError(f"{where} line {node.start_mark.line + 1} is no list: {FORM}")
        entries = [(item, loader.construct_object(item, deep=True)) for item in node.value]
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "cannot be read"
        raise SettingError(f"{where}{line} is not YAML ({problem}): {FORM}") from None
    finally:
        if loader is not None:
            loader.dispose()
    candidates: list[Candidate] = []
    lines: dict[Name, int] = {}
    for item, entry in entries:
        line = item.start_mark.line + 1
        try:
            candidate = _candidate(entry, source)
        except (SettingError, BadQuestion) as error:
            raise SettingError(f"{where} line {_line(item, error.message)}: {error.message}") from None
        name = name_of(candidate.registration)
        if name in lines:
            raise SettingError(
                f"{where} line {line}: {name[0]!r} is in line {lines[name]} too; give each its own worker_id or dp_rank"
            )
        lines[name] = line
        candidates.append(candidate)
    return candidates


def _candidate(entry: Any, source: str) -> Candidate:
    if isinstance(entry, str):
        return candidate_of(parse_worker(entry), source)
    if not isinstance(entry, dict):
        raise SettingError(
            "is not a worker; write a mapping like {worker_id: w0, url: http://10.0.0.5:8000}, or a SPEC"
        )
    for field in entry:
        if field not in FIELDS:
            close = difflib.get_close_matches(str(field), FIELDS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"the fields are {', '.join(FIELDS)}"
            raise SettingError(f"{field} is not a field of a worker; {hint}")
    state = entry.pop("state", STATES[0])
    if state not in STATES:
        raise SettingError(f"state must be one of {', '.join(STATES)}")
    try:
        body = msgspec.convert(entry, RegisterBody)
    except msgspec.ValidationError as error:
        # An example of the message is "Expected `int`, got `str` - at `$.dp_rank`".
        what, _, at = str(error).partition(" - at ")
        field = at.strip("`").removeprefix("$.") or "it"
        raise SettingError(f"{field} is wrong: {what}") from None
    registration = registration_of(body, UNKNOWN_MODEL)
    if registration.url is None and registration.worker.model == UNKNOWN_MODEL:
        raise SettingError("model is missing: without url the router cannot get it from the engine")
    described = msgspec.structs.replace(registration, source=source, retiring=state == "draining")
    return Candidate(described, any_rank=body.dp_rank is None)


def _line(item: yaml.Node, message: str) -> int:
    """Return the line of the field with which the message begins, or else of the entry."""
    first = message.partition(" ")[0].partition(".")[0]
    if isinstance(item, yaml.MappingNode):
        for key, _ in item.value:
            if getattr(key, "value", None) == first:
                return int(key.start_mark.line) + 1
    return int(item.start_mark.line) + 1
