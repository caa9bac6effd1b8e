# SPDX-License-Identifier: Apache-2.0
"""One worker that publishes as fast as it can, and one that holds more blocks than fit into the mirror.

The other workers are not affected.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvrouter.events.vllm.wire import WireStored
from tests.support.fake_engine import NewEngine, prompt, stored
from tests.support.fleet import until
from tests.support.flooding import begin, flood
from tests.support.router_process import RouterError, RouterProcess

MODEL, NOISY = "quiet-model", "noisy-model"
ROUNDS = 25
# The smallest size of a private mirror: some 600,000 blocks.
SMALL_BUDGET = 16 * 1024**2
BATCH_BLOCKS = 20_000
BATCHES = 60


@pytest.mark.parametrize("blocks", [1, 5_000])
def test_a_flood_keeps_nobody_waiting(blocks: int, router: RouterProcess, new_engine: NewEngine) -> None:
    quiet = new_engine()
    name = f"quiet{blocks}"
    quiet.join(router, name, MODEL)
    with flood(blocks) as (port, process):
        noisy = {"worker_id": "noisy", "model": NOISY, "endpoint": f"tcp://127.0.0.1:{port}", "patch_endpoint": "off"}
        router.request("POST", "/register", noisy)
        router.wait_connected("noisy")
        begin(process)
        before = router.wait_seen("noisy", 100)["seq"]
        for number in range(ROUNDS):
            tokens = prompt(1_000 * blocks + number, 2)
            # wait_seen fails after its generous deadline.
            router.wait_seen(name, quiet.publish(stored(tokens, 0, 2)))
            answer = router.request("POST", "/query", {"model": MODEL, "token_ids": tokens})["instances"][name]
            assert (answer["gpu"], answer["state"]) == (32, "live")
        # The noisy worker was followed all the while; otherwise the test would show nothing.
        assert router.wait_seen("noisy", before + ROUNDS)["seq"] > before
        router.unregister("noisy")
    assert router.worker(name)["gaps"] == 0
    assert "Traceback" not in router.log_tail()
    router.unregister(name)


def test_blocks_that_a_full_mirror_refuses_are_counted_and_reported_and_the_others_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_engine: NewEngine
) -> None:
    monkeypatch.setenv("KVROUTER_MIRROR_BUDGET_BYTES", str(SMALL_BUDGET))
    monkeypatch.setenv("KVROUTER_MAX_WORKERS", "2")
    small, large = new_engine(), new_engine()
    rng = np.random.default_rng(1)
    with RouterProcess(tmp_path) as router:
        for name, engine in (("small", small), ("large", large)):
            router.request("POST", "/register", engine.registration(name, MODEL))
            router.wait_connected(name)
        with pytest.raises(RouterError, match=r"409.*too_many_workers"):
            router.request("POST", "/register", {"worker_id": "third", "model": MODEL, "url": "http://127.0.0.1:1"})
        # Registering a worker again, or with another address, adds no further worker.
        router.request("POST", "/register", small.registration("small", MODEL, url="http://127.0.0.1:1"))
        tokens = prompt(1)
        router.wait_seen("small", small.publish(stored(tokens, 0, 12)))
        for _ in range(BATCHES):
            chain = [int(block_hash) for block_hash in rng.integers(2**33, 2**63, BATCH_BLOCKS)]
            seq = large.publish(WireStored(chain, 7, [], 16, None, "GPU", None, None, 0, "full_attention"))
        row = router.wait_seen("large", seq)
        refused = row["refused_blocks"]
        assert 0 < refused < BATCHES * BATCH_BLOCKS
        assert f"{refused} of its blocks found no room" in row["reason"]
        assert "mirror_budget_bytes" in row["reason"]
        assert router.metric("kvrouter_mirror_refused_blocks_total", worker="large") == refused
        assert router.metric("kvrouter_mirror_refused_blocks_total", worker="small") == 0
        assert router.metric("kvrouter_mirror_bytes") <= SMALL_BUDGET
        assert any("found no room" in reason for reason in router.request("GET", "/health")["reasons"])
        assert router.worker("small")["refused_blocks"] == 0
        answer = router.request("POST", "/query", {"model": MODEL, "token_ids": tokens})["instances"]
        assert answer["small"]["gpu"] == 192
        # The engine's new life begins with the room that there is.
        large.restart()
        row = router.wait_seen("large", large.publish(stored(tokens, 0, 12)))
        answer = router.request("POST", "/query", {"model": MODEL, "token_ids": tokens})["instances"]
        assert answer["small"]["gpu"] == 192
        assert "Traceback" not in router.log_tail()


def test_four_hundred_workers_have_sockets_enough(router: RouterProcess) -> None:
    """Follow 400 workers at once.

    ZMQ's own limit of 1,023 sockets and the usual one of 1,024 descriptors once allowed only some hundreds.
    """
    names = [f"many{number}" for number in range(400)]
    for name in names:
        body = {"worker_id": name, "model": "many", "endpoint": "tcp://127.0.0.1:9", "patch_endpoint": "off"}
        router.request("POST", "/register", body)

    def reasons() -> list[str]:
        return [row["reason"] for row in router.request("GET", "/workers")["workers"] if row["model"] == "many"]

    until(lambda: all(reasons()), "workers have no reason")
    assert not any("cannot subscribe" in reason for reason in reasons())
    for name in names:
        router.unregister(name)
    assert "Traceback" not in router.log_tail()
