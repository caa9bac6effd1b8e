# SPDX-License-Identifier: Apache-2.0
"""A script that fills in `payload` of events_vllm_0_32.json from vLLM's own structs and encoder.

Run it where vLLM is installed. A case states its events by field; bytes are written as {"hex": ...}. The payload is the
message that vLLM 0.32.0 sends.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from vllm.distributed import kv_events

CASES = Path(__file__).with_name("events_vllm_0_32.json")


def plain(value: Any) -> Any:
    """Return a JSON value with each {"hex": ...} replaced by its bytes."""
    if isinstance(value, dict):
        return bytes.fromhex(value["hex"])
    return [plain(item) for item in value] if isinstance(value, list) else value


def payload(case: dict[str, Any]) -> bytes:
    """Return the payload of a case as vLLM encodes it."""
    events = [
        getattr(kv_events, event["type"])(**{name: plain(value) for name, value in event.items() if name != "type"})
        for event in case["events"]
    ]
    batch = kv_events.KVEventBatch(ts=case["ts"], events=events, data_parallel_rank=case["dp_rank"])
    return msgspec.msgpack.Encoder().encode(batch)


if __name__ == "__main__":
    cases = json.loads(CASES.read_text())
    for case in cases:
        case["payload"] = payload(case).hex()
    CASES.write_text(json.dumps(cases, indent=1) + "\n")
