# SPDX-License-Identifier: Apache-2.0
"""A whole router, queried for what is wrong as `kvrouter doctor` does it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from kvrouter.router.app.cli.api_client import Client
from kvrouter.router.app.cli.doctor_report import DoctorReport, diagnose
from kvrouter.router.observe.findings.finding import Finding
from tests.support.router_process import RouterError, RouterProcess

TIMEOUT_S = 40.0
POLL_S = 0.05


class Clinic:
    """Says what is found; workers that are registered through it go at the end of a `with`."""

    def __init__(self, router: RouterProcess, api_key: str | None = None) -> None:
        self.router = router
        self._url = f"http://127.0.0.1:{router.port}"
        self._key = api_key

    def report(self) -> DoctorReport:
        return diagnose(Client(self._url, self._key), self._url, time.time)

    def codes(self) -> list[str]:
        return [finding.code for finding in self.report().findings]

    def find(self, code: str, subject: str = "") -> Finding:
        """The finding of this code, once there is one; subject: what its subject has."""
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
        """Return once no finding of this code has such a subject."""
        deadline = time.monotonic() + TIMEOUT_S
        while findings := [one for one in self.report().findings if one.code == code and subject in one.subject]:
            assert time.monotonic() < deadline, f"{findings}\n{self.router.log_tail()}"
            time.sleep(POLL_S)

    def wait_well(self) -> DoctorReport:
        """The report once it has no finding."""
        deadline = time.monotonic() + TIMEOUT_S
        while (report := self.report()).findings:
            assert time.monotonic() < deadline, f"{report}\n{self.router.log_tail()}"
            time.sleep(POLL_S)
        return report

    @contextlib.contextmanager
    def worker(self, worker_id: str, model: str = "m", **fields: Any) -> Iterator[str]:
        """The subject of its findings."""
        # Without a look for the patch: its port is found by adding to this one, and other tests may be there.
        body = {"worker_id": worker_id, "model": model, "patch_endpoint": "off"} | fields
        self.router.request("POST", "/register", {name: value for name, value in body.items() if value is not None})
        try:
            yield f"worker {worker_id}"
        finally:
            # One that a test dropped itself.
            with contextlib.suppress(RouterError):
                self.router.unregister(worker_id)

    def complete(self, model: str, prompt: list[int], **more: Any) -> dict[str, Any]:
        """A request through the proxy."""
        body = {"model": model, "prompt": prompt, "max_tokens": 1} | more
        return dict(self.router.request("POST", "/v1/completions", body))
