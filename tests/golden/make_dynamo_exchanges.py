# SPDX-License-Identifier: Apache-2.0
"""A script that writes dynamo_1_6_1.json, the answers of Dynamo's selection service and indexer to a Dynamo client.

Run it with this project's Python; the services run in the venv of ai-dynamo-runtime 1.6.1 that the benchmarks use.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import zmq

from tests.support.fake_engine import FakeEngine
from tests.system.test_dynamo_client import GOLDEN, VERSION, indexer_exchanges, selection_exchanges, service, written

TESTS = Path(__file__).parents[1]


if __name__ == "__main__":
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pair = (FakeEngine(context), FakeEngine(context))
    with tempfile.TemporaryDirectory() as folder:
        with service("dynamo.select_service", Path(folder)) as port:
            selection = written(selection_exchanges(port, pair), pair)
        with service("dynamo.indexer", Path(folder)) as port:
            indexer = written(indexer_exchanges(port, pair[0]), pair)
    for engine in pair:
        engine.close()
    context.destroy(linger=0)
    found = {"ai-dynamo-runtime": VERSION, "selection": selection, "indexer": indexer}
    GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
