# SPDX-License-Identifier: Apache-2.0
"""A server that stands in for a router and sends the answers that a test sets, and typical answers for it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any, Self

import pytest

from kvrouter.contract.choices import CostTerms
from tests.support.quiet_server import QuietServer

WORKER: dict[str, Any] = {
    "worker_id": "w0",
    "dp_rank": 1,
    "model": "m",
    "url": "http://e:8000",
    "state": "suspect",
    "reason": "gap 5..9 [not a tag]",
    "epoch": "e",
    "seq": 4,
    "catalog": None,
    "catalog_source": "learned",
    "hash_scheme": "sha256 (verified)",
    "residency": {"g0:GPU": 3, "g1:GPU": 4, "g0:STORAGE:o": 5},
    "lag_ms": 1.25,
    "gaps": 2,
    "last_event_age_s": 1.0,
    "source": "register",
    "role": "both",
    "draining": False,
    "closed": "",
    "predictions": "",
    "reuse": {"predicted_tokens": 12_288, "delivered_tokens": 1_024, "answers": 3},
}
LOAD: dict[str, Any] = {
    "worker_id": "w0",
    "dp_rank": 1,
    "active_requests": 3,
    "potential_prefill_tokens": 20_480,
    "saturated": False,
}
SELECTED: dict[str, Any] = {
    "selection_id": "s",
    "model": "m",
    "worker_id": "w0",
    "dp_rank": 0,
    "endpoint": "http://e:8000",
    "overlap": {"longest_matched": 2, "gpu": 1, "cpu": 2, "disk": 2},
    "effective_prefill_tokens": 1,
    "reason": "reuses 2 of 3 tokens",
    "candidates": [
        {
            "worker_id": name,
            "dp_rank": 0,
            "overlap": {"longest_matched": disk, "gpu": 1, "cpu": 2, "disk": disk},
            "load": 0,
            "cost": 3 - disk,
            "parts": dict.fromkeys(CostTerms.__struct_fields__, 0) | {"prefill": 3 - disk},
            "state": "live",
            "limited_by": {"group_idx": 1, "kind": "mamba", "why": "no state"},
        }
        for name, disk in (("w0", 2), ("w1", 0))
    ],
}


def loads(*entries: dict[str, Any], model: str = "m") -> list[dict[str, Any]]:
    """Return an answer to `GET /loads` with these entries."""
    return [{"model_name": model, "loads": [*entries]}]


def unset_client_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset the variables from which client commands read the router's address, so that only their flags count."""
    for name in ("KVROUTER_URL", "KVROUTER_PORT", "KVROUTER_API_KEY", "KVROUTER_CONFIG", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


class StubRouter:
    """A server that listens from entry to exit and answers from `answers`."""

    def __init__(self) -> None:
        # The status and the content of each answer, by path.
        self.answers: dict[str, tuple[int, bytes]] = {}
        # The requests so far: method, path, body, and authorization header.
        self.received: list[tuple[str, str, bytes, str | None]] = []
        # Called with the number of each request before it is answered.
        self.on_request: Callable[[int], None] = lambda number: None
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                stub.received.append((self.command, self.path, body, self.headers.get("authorization")))
                stub.on_request(len(stub.received))
                status, content = stub.answers.get(self.path, (404, b"nothing"))
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PATCH = do_DELETE = answer

            def log_message(self, *_: Any) -> None:
                pass

        self._server = QuietServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, path: str, body: Any, status: int = 200) -> None:
        self.answers[path] = (status, json.dumps(body).encode())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
