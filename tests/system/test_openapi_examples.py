# SPDX-License-Identifier: Apache-2.0
"""Every example of the OpenAPI document, sent to a router: answers fit their schemas, and all that need no engine succeed."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema

from kvrouter.router.serve.api.examples import EXAMPLES, MODEL, PATH_PARTS, WORKER
from tests.support.exchange import exchange
from tests.support.ports import free_port
from tests.support.router_process import RouterProcess
from tests.support.scripted_engine import ScriptedEngine, plain

# Addresses in the examples, where nothing listens. Closed ports of this machine take their place.
ADDRESSES = ("10.0.0.2:8000", "10.0.0.2:5557", "10.0.0.2:5558")

# Requests that succeed only with engines that lend each other blocks, and the status without them. With them:
# tests/engine/test_hand_over_engine.py.
NEEDS_LENDERS = {
    ("POST", "/workers/{worker_id}/hand_over"): 409,
    ("GET", "/hand_overs/{number}"): 404,
    ("DELETE", "/hand_overs/{number}"): 404,
}


def test_the_answer_to_every_example_of_the_document_fits_its_schema(tmp_path: Path) -> None:
    closed = {address: f"127.0.0.1:{free_port()}" for address in ADDRESSES}
    with ScriptedEngine(plain(b'{"id": "x"}')) as engine, RouterProcess(tmp_path) as router:
        router.request("POST", "/register", {"worker_id": WORKER, "model": MODEL, "url": engine.url})
        response = f"/v1/responses/{PATH_PARTS['response_id'][1]}"
        engine.pages = {path: plain(b'{"id": "x"}') for path in (response, f"{response}/input_items")}
        document = router.request("GET", "/openapi.json")
        for (method, template), example in EXAMPLES.items():
            operation = document["paths"][template][method.lower()]
            text = json.dumps(example)
            for address, here in closed.items():
                text = text.replace(address, here)
            path = template.format(**{name: value for name, (_, value) in PATH_PARTS.items()})
            status, headers, answer = exchange(router.port, method, path, json.loads(text))
            kind = headers["content-type"].partition(";")[0]
            refusal = NEEDS_LENDERS.get((method, template))
            assert status == refusal if refusal else status < 300, (method, path, status, answer)
            assert str(status) in operation["responses"], (method, path, status, answer)
            if kind == "application/json":
                schema = operation["responses"][str(status)]["content"][kind]["schema"]
                jsonschema.validate(json.loads(answer), {**schema, "components": document["components"]})
            else:
                assert (template, kind) == ("/metrics", "text/plain")
        assert router.request("GET", "/workers") == {"workers": []}
