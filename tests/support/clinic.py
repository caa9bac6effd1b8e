# SPDX-License-Identifier: Apache-2.0
"""A router process whose findings tests read in the way of `kvrouter doctor`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from kvrouter.contract.diagnosis import Finding
from kvrouter.router.app.cli.api_client import Client
from kvrouter.router.app.cli.doctor_report import DoctorReport, diagnose
from tests.support.router_process import RouterError, RouterProcess

TIMEOUT_S = 40.0
POLL_S = 0.05


class Clinic:
    """A reader of one router's findings, which can also register workers for the duration of a `with` block."""

    def __init__(self, router: RouterProcess, api_key: str | None = None) -> None:
        self.router = router
        self._url = f"http://127.0.0.1:{router.port}"
        self._key = api_key

    def report(self) -> DoctorReport:
        return diagnose(Client(self._url, self._key), self._url, time.time)

    def codes(self) -> list[str]:
        return [finding.code for finding in self.report().findings]

    def find(self, code: str, subject: str = "") -> Finding:
        """Wait for a finding with this code whose subject contains `subject`, and return it."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            report = self.report()
            for finding in report.findings:
                if finding.code == code and subject in finding.subject:
                    assert finding.fix and finding.evidence
                    return finding
            assert time.monotonic() < deadline, f"no {code} of {subject!r}: {report}\n{self.router.log_tail()}"
            time.sleep(POLL_S)

    def wait_gone(self, code: str, subject: str = "") -> None:
        """Wait until no finding has this code and a subject that contains `subject`."""
        deadline = time.monotonic() + TIMEOUT_S
        while findings := [
            finding for finding in self.report().findings if finding.code == code and subject in finding.subject
        ]:
            assert time.monotonic() < deadline, f"{findings}\n{self.router.log_tail()}"
            time.sleep(POLL_S)

    def wait_well(self) -> DoctorReport:
        """Wait for a report without findings, and return it."""
        deadline = time.monotonic() + TIMEOUT_S
        while (report := self.report()).findings:
            assert time.monotonic() < deadline, f"{report}\n{self.router.log_tail()}"
            time.sleep(POLL_S)
        return report

    @contextlib.contextmanager
    def worker(self, worker_id: str, model: str = "m", **fields: Any) -> Iterator[str]:
        """Register a worker for the duration of a `with` block, and yield the subject that its findings have."""
        # The patch is off: its port would be derived from the engine's, and another test may listen there.
        body = {"worker_id": worker_id, "model": model, "patch_endpoint": "off"} | fields
        self.router.request("POST", "/register", {name: value for name, value in body.items() if value is not None})
        try:
            yield f"worker {worker_id}"
        finally:
            # The test may have unregistered the worker itself.
            with contextlib.suppress(RouterError):
                self.router.unregister(worker_id)

    def complete(self, model: str, prompt: list[int], **more: Any) -> dict[str, Any]:
        """Send a completion through the proxy and return its answer."""
        body = {"model": model, "prompt": prompt, "max_tokens": 1} | more
        return dict(self.router.request("POST", "/v1/completions", body))
