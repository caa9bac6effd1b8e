# SPDX-License-Identifier: Apache-2.0
"""Files that cannot be read while a router runs, because a FIFO takes the place of each.

Such a file is named, the other files are still read, and the end of the router does not wait for it.
"""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

from tests.support.certificates import Authority
from tests.support.fleet import until
from tests.support.router_process import RouterProcess

OLD_KEY, NEW_KEY = "a-key-that-is-revoked", "a-key-that-takes-its-place"


def listed(key: str) -> str:
    return f"keys:\n- {{name: gateway, scopes: [ask, watch], key: {key}}}\n"


def replace_by_fifo(file: Path) -> None:
    """Put a FIFO in the file's place, which no writer ever opens."""
    fifo = file.with_suffix(".fifo")
    os.mkfifo(fifo)
    fifo.rename(file)


def test_a_file_that_hangs_stops_neither_the_others_nor_the_end(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    pair = authority.issue("router")
    keys, workers = tmp_path / "keys.yaml", tmp_path / "workers.yaml"
    keys.write_text(listed(OLD_KEY))
    workers.write_text("[]")
    flags = [
        *("--tls-certificate", str(pair.certificate), "--tls-key", str(pair.key)),
        *("--api-keys-file", str(keys), "--workers-file", str(workers)),
    ]
    with RouterProcess(tmp_path / "router", flags, tls=authority.client(), api_key=OLD_KEY) as router:

        def status(key: str) -> int:
            return router._ask("GET", "/workers", None, {"authorization": f"Bearer {key}"})[0]

        def is_named(file: Path) -> bool:
            reasons = router.request("GET", "/health")["reasons"]
            return any(str(file) in reason and "not a regular file" in reason for reason in reasons)

        until(lambda: status(OLD_KEY) == 200, "the router takes its key")
        replace_by_fifo(pair.key)
        until(lambda: is_named(pair.key), "the key of the certificate is named")
        assert router.metric("kvrouter_access_file_stale", file="certificate") == 1.0
        keys.write_text(listed(NEW_KEY))
        until(lambda: status(OLD_KEY) == 401 and status(NEW_KEY) == 200, "keys are rotated beside it")
        for file in (workers, keys):
            replace_by_fifo(file)
            until(partial(is_named, file), f"{file} is named")
        assert status(NEW_KEY) == 200
        router.signal(signal.SIGTERM)
        assert router.wait() == 0
