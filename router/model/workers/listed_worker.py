# SPDX-License-Identifier: Apache-2.0
"""A worker as a list of workers describes it: in `--worker`, the settings file, or a file of workers. Pure.

An entry is a SPEC (`worker_spec.py`), or a mapping with the fields of `POST /register` and `state`.
"""

from __future__ import annotations

import difflib
from typing import Any

import msgspec

from kvrouter.contract.registrations import RegisterBody
from kvrouter.router.base.common.errors import BadQuestion, SettingError
from kvrouter.router.model.workers.registration import UNKNOWN_MODEL, Registration
from kvrouter.router.model.workers.registration_from_body import registration_of
from kvrouter.router.model.workers.worker_spec import body_of, in_words_of_spec

FIELDS = (*RegisterBody.__struct_fields__, "state")
STATES = ("active", "draining")


class ListedWorker(msgspec.Struct, frozen=True):
    """A worker as an entry of a list describes it."""

    # The registration, with UNKNOWN_MODEL if the entry names no model: the engine is queried for it.
    registration: Registration
    # Whether the entry names no rank, so it stands for all ranks of its engine.
    any_rank: bool
    # Whether the entry's URL ended in /v1, which the registration leaves out.
    had_base_path: bool = False


def listed_worker(entry: Any) -> ListedWorker:
    """Return the worker that an entry describes. Raises SettingError."""
    if isinstance(entry, str):
        try:
            return _worker(body_of(entry))
        except BadQuestion as error:
            raise SettingError(in_words_of_spec(error.message)) from None
    if not isinstance(entry, dict):
        raise SettingError(
            "is not a worker; write a mapping like {worker_id: w0, url: http://10.0.0.5:8000}, or a SPEC"
        )
    for field in entry:
        if field not in FIELDS:
            close = difflib.get_close_matches(str(field), FIELDS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"the fields are {', '.join(FIELDS)}"
            raise SettingError(f"{field} is not a field of a worker; {hint}")
    state = entry.get("state", STATES[0])
    if state not in STATES:
        raise SettingError(f"state must be one of {', '.join(STATES)}")
    try:
        body = msgspec.convert({key: value for key, value in entry.items() if key != "state"}, RegisterBody)
        return _worker(body, retiring=state == "draining")
    except msgspec.ValidationError as error:
        # An example of the message is "Expected `int`, got `str` - at `$.dp_rank`".
        what, _, at = str(error).partition(" - at ")
        field = at.strip("`").removeprefix("$.") or "it"
        raise SettingError(f"{field} is wrong: {what}") from None
    except BadQuestion as error:
        raise SettingError(error.message) from None


def _worker(body: RegisterBody, *, retiring: bool = False) -> ListedWorker:
    registration = registration_of(body, UNKNOWN_MODEL)
    if registration.url is None and registration.worker.model == UNKNOWN_MODEL:
        raise SettingError("model is missing: without url the router cannot get it from the engine")
    return ListedWorker(
        msgspec.structs.replace(registration, retiring=retiring),
        any_rank=body.dp_rank is None,
        had_base_path=body.url != registration.url,
    )
