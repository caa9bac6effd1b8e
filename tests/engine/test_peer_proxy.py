# SPDX-License-Identifier: Apache-2.0
"""Three real vLLM servers behind `kvrouter serve`: it has them fetch blocks from each other, and predicts the reuse."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("nixl_cu12")

from tests.engine.chat_fleet import Fleet, ask, chat_fleet, predicted
from tests.engine.chat_model import VOCAB_SIZE, write_chat_model
from tests.engine.offload_engine import HEARTBEAT_S, SPEC
from tests.support.ports import free_port

pytestmark = pytest.mark.engine

SERVERS = 3
REQUESTS = 40
CPU_BYTES = 64 << 20


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("peers")

    def tier(number: int) -> Sequence[str]:
        slots = folder / f"slots{number}"
        slots.mkdir()
        settings = SPEC | {
            "cpu_bytes_to_use": CPU_BYTES,
            "shared_memory_path": str(slots),
            "peer_port": free_port(),
        }
        connector = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": settings,
        }
        return ["--kv-transfer-config", json.dumps(connector)]

    environment = {"KVROUTER_PATCH": "1", "KVROUTER_PATCH_HEARTBEAT_S": HEARTBEAT_S, "UCX_TLS": "tcp,self"}
    with chat_fleet(
        folder,
        write_chat_model(folder / "model"),
        ["--block-size", "32"],
        SERVERS,
        environment=environment,
        own_arguments=tier,
    ) as running:
        yield running


def sums(fleet: Fleet, name: str) -> Counter[str]:
    """Return a counter of the router's page, summed by its label `outcome`."""
    counts: Counter[str] = Counter()
    for line in fleet.router.text("/metrics").splitlines():
        if line.startswith(f"{name}{{"):
            labels, _, value = line.rpartition(" ")
            outcome = labels.partition('outcome="')[2].partition('"')[0]
            counts[outcome] += int(float(value))
    return counts


def test_a_worker_fetches_what_another_holds_and_answers_the_same(fleet: Fleet) -> None:
    rng = Random(7)
    workers = sorted(fleet.engines)
    prompts = [[rng.randrange(10, VOCAB_SIZE) for _ in range(rng.randint(900, 1_600))] for _ in range(8)]
    answers: dict[int, Any] = {}
    wrong, pulled = [], 0
    for number in range(REQUESTS):
        chosen = rng.randrange(len(prompts))
        worker = rng.choice(workers)
        for name in workers:
            fleet.router.wait_proven(name)
        before = sums(fleet, "kvrouter_peer_pulls_total")
        answer = ask(
            fleet, prompt=prompts[chosen], max_tokens=4, extra_headers={"x-kvrouter-worker": worker}, logprobs=1
        )
        local, reused, place = predicted(answer)
        assert place == worker and local is not None
        text = answer.parse().choices[0].text
        named = sum((sums(fleet, "kvrouter_peer_pulls_total") - before).values())
        pulled += named
        if text != answers.setdefault(chosen, text) or reused < local or (reused > local and not named):
            wrong.append(f"request {number}: {worker} reused {reused}, predicted {local}, pulls {named}: {text!r}")
    assert not wrong, "\n".join(wrong)
    outcomes = sums(fleet, "kvrouter_peer_pulls_total")
    # On a busy machine some of them miss their deadline.
    assert pulled > REQUESTS // 10 and outcomes["whole"] > 0 and not outcomes["unknown"], outcomes
    assert sums(fleet, "kvrouter_peer_tokens_delivered_total")[""] > 0
