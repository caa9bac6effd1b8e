# SPDX-License-Identifier: Apache-2.0
"""A script that writes schema_2.json, the keys that two routers of the previous version left in a Valkey.

`tests/support/former_release.py` names the version's commit. The routers followed engines that stored and evicted
blocks, and had workers of every kind that can be registered.

    .venv/bin/python -m tests.golden.make_former_schema
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.support.churn import Churn
from tests.support.fleet import held, paused, register, until, wait_seqs
from tests.support.former_release import dump, environment, write
from tests.support.router_process import RouterProcess
from tests.support.store_server import StoreServer

FILE = Path(__file__).with_name("schema_2.json")
ENGINES = 2
# Enough batches that each engine has evicted blocks, but few enough that the file stays readable.
BLOCKS_A_SECOND = 500.0
SEQ = 30
# Registrations of workers whose addresses nobody listens on.
OTHERS = (
    {"worker_id": "drained", "model": "m", "url": "http://127.0.0.1:9"},
    {"worker_id": "prefill", "model": "other", "url": "http://127.0.0.1:9", "role": "prefill"},
    {"worker_id": "a/b:{c}", "model": "m{}:/", "endpoint": "tcp://127.0.0.1:9", "patch_endpoint": "off"},
    {
        "worker_id": "stated",
        "model": "m",
        "endpoint": "tcp://127.0.0.1:9",
        "replay_endpoint": "tcp://127.0.0.1:9",
        "patch_endpoint": "off",
        "dp_rank": 3,
        "catalog": {
            "groups": [{"group_idx": 0, "kind": "full_attention", "block_size": 16}],
            "hash_block_size": 16,
            "hash_algo": "sha256_cbor",
        },
    },
)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        former = environment(folder / "former")
        with StoreServer(folder / "store") as server, Churn(ENGINES, BLOCKS_A_SECOND) as churn:
            flags = ["--redis", server.url]
            with RouterProcess(folder / "a", flags, former) as one, RouterProcess(folder / "b", flags, former) as two:
                register(one, churn)
                for body in OTHERS:
                    two.request("POST", "/register", body)
                two.request("PATCH", "/workers/drained", {"state": "draining"})
                until(lambda: held(one) and held(two), "one of them follows nothing")
                churn.ask("go")
                wait_seqs(two, dict.fromkeys(churn.workers, SEQ))
                wait_seqs(one, paused(churn))
                write(FILE, dump(server.client))
    print(f"{FILE}: {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
