# SPDX-License-Identifier: Apache-2.0
"""A script that fills in `payload` of report_messages.json from the structs of `kvrouter.events.patch.messages`.

A case states its message by field; bytes are written as {"hex": ...}. `docs/reference/protocol-examples.md` shows
the same cases.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from kvrouter.events.patch import messages as report

CASES = Path(__file__).with_name("report_messages.json")
SIDES = {"report": report.Report, "request": report.Request, "reply": report.Reply}


def plain(value: Any) -> Any:
    """Return a JSON value with each {"hex": ...} replaced by its bytes."""
    if isinstance(value, dict):
        if value.keys() == {"hex"}:
            return bytes.fromhex(value["hex"])
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def message(case: dict[str, Any]) -> Any:
    """Return the message of a case as a struct."""
    return msgspec.convert(plain(case["message"]), SIDES[case["side"]])


if __name__ == "__main__":
    cases = json.loads(CASES.read_text())
    for case in cases:
        case["payload"] = msgspec.msgpack.encode(message(case)).hex()
    CASES.write_text(json.dumps(cases, indent=1) + "\n")
