# SPDX-License-Identifier: Apache-2.0
"""All values that routers write into Redis for each other, by their form.

A change of a form is decided by ADR 42: if routers of the version before would misread it, or write it away,
`keys.SCHEMA` rises, and `keys.FORMER_PREFIX` follows it.

To write the file: `python -m tests.unit.test_schema`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvrouter.router.base.common.ids import Place, WorkerKey
from kvrouter.router.follow.fleet.heartbeat import VERSION, Heartbeat
from kvrouter.router.follow.fleet.router_peers import Claims
from kvrouter.router.index.ingest.net_changes import ResidencyDelta
from kvrouter.router.index.store import keys
from kvrouter.router.index.store.checkpoint import pack_places, places_text
from kvrouter.router.index.store.commit import LeaseValue, copies_value
from kvrouter.router.index.store.log_entry import EntryKind, entry_fields
from kvrouter.router.index.store.registry import StoredRegistration
from kvrouter.router.observe.history.history_entry import HistoryEntry
from kvrouter.router.observe.history.saved_days import COLUMNS
from kvrouter.router.route.load.load_messages import LoadMessage
from kvrouter.router.route.owners.response_owner import ResponseOwner, packed

FILE = Path(__file__).parents[1] / "golden" / "schema.json"
WORKER = WorkerKey("m", "w", 1)
PLACE = Place(0, "GPU")


def without_descriptions(part: Any) -> Any:
    """Leave the sentences of a JSON schema away: no router reads them, and versions of msgspec indent them differently."""
    if isinstance(part, dict):
        return {name: without_descriptions(value) for name, value in part.items() if name != "description"}
    return [without_descriptions(value) for value in part] if isinstance(part, list) else part


def forms() -> dict[str, Any]:
    hashes = np.array([1, 2], np.uint64)
    entry = entry_fields(
        WORKER, EntryKind.COMMIT, 7, "e", (3, 4), [ResidencyDelta(PLACE, hashes, hashes[:1])], {"catalog": b"c"}
    )
    _, structs = msgspec.json.schema_components(
        [StoredRegistration, Heartbeat, Claims, LoadMessage, HistoryEntry], ref_template="{name}"
    )
    return {
        "schema": keys.SCHEMA,
        "former": [keys.FORMER_SCHEMA, keys.FORMER_PREFIX],
        "keys": [
            keys.SCHEMAS,
            keys.ADOPTED,
            keys.MODELS,
            keys.REGISTRATIONS,
            keys.ROUTERS,
            keys.CLAIMS,
            keys.LOADS,
            keys.response_owner("resp_1"),
            keys.router_lease("token"),
            keys.registry("m"),
            keys.meta(WORKER),
            keys.log(WORKER),
            keys.lease(WORKER),
            keys.copies(WORKER, "e"),
            keys.residents(WORKER, "e", PLACE),
            keys.HISTORY_STEPS,
            keys.HISTORY_MINUTES,
            keys.savings("2026-11-27"),
            keys.history_writer("writer"),
        ],
        "registry field": keys.registry_field(WORKER),
        "meta": sorted(keys.META_FIELDS),
        "places": places_text(pack_places({PLACE: hashes})).decode(),
        "copies field": keys.copies_field(PLACE, 1).decode("latin-1"),
        "copies value": copies_value(keys.copies_field(PLACE, 1), 2).decode(),
        "lease": LeaseValue("token", 7).value.decode(),
        "entry": [part.decode("latin-1") for part in entry],
        "response owner": packed(ResponseOwner(WORKER, "key", 1.5, 7)).decode(),
        "heartbeat": VERSION,
        "savings field": keys.savings_field("m", COLUMNS[0]),
        "savings": list(COLUMNS),
        "structs": without_descriptions(structs),
    }


def test_a_changed_schema_has_another_number() -> None:
    recorded = json.loads(FILE.read_text())
    current = json.loads(json.dumps(forms()))
    different = [name for name in recorded.keys() | current.keys() if recorded.get(name) != current.get(name)]
    assert not different, f"{different} changed: decide by ADR 42 whether keys.SCHEMA rises, then write the file again"


def test_no_key_of_one_schema_is_a_key_of_another() -> None:
    own_keys = [key for key in forms()["keys"] if key != keys.SCHEMAS]
    assert all(key.startswith(keys.PREFIX) for key in own_keys)
    assert keys.PREFIX != keys.FORMER_PREFIX
    # Only the registry of the former schema is read.
    assert keys.registry("m", keys.FORMER_PREFIX) not in own_keys and keys.FORMER_REGISTRATIONS not in own_keys


if __name__ == "__main__":
    FILE.write_text(json.dumps(forms(), indent=1) + "\n")
