# SPDX-License-Identifier: Apache-2.0
"""Decisions a second of `--processes 2` beside one process.

The decisions are choices by 512 hashes over 64 connections. The client runs on the same cores, so CPU is counted: a
router can make as many decisions a second as its busiest process allows, and as all its processes together allow on two
cores, Valkey included.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time
from collections.abc import Sequence
from typing import cast

import numpy as np

from benchmarks.http_client import TIMEOUT_S, HttpClient
from benchmarks.peers.dynamo import rotate
from benchmarks.peers.packages import PeerSettings
from benchmarks.peers.samples import capacity
from benchmarks.peers.table import OURS, Findings, peer_row
from benchmarks.processes import Ours, Publisher, cpu_by_process
from benchmarks.report import progress
from benchmarks.workload import MODEL, WORKERS, Publishing, Workload, chains_for, last_placed, write_frames

PEER = "itself, one process"
GOAL = 1.7
CONNECTIONS = 64
PROMPTS = 64
BLOCKS_PER_EVENT = 32
# The number of connections that are made to reach every process behind the port.
CHECKS = 8


def decide(port: int, requests: Sequence[bytes], seconds: float) -> int:
    """Return how many requests were answered over CONNECTIONS connections, each sending again after every answer.

    One thread sends them and decodes nothing, because the client must take as little of the cores as it can.
    """
    answered = 0
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        for number in range(CONNECTIONS):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), TIMEOUT_S))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(requests[number % len(requests)])
            selector.register(connection, selectors.EVENT_READ)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for key, _ in selector.select(TIMEOUT_S):
                connection = cast(socket.socket, key.fileobj)
                # An answer is one write of some hundred bytes, which arrives in one piece.
                answer = connection.recv(65_536)
                if not answer.startswith(b"HTTP/1.1 200 ") or not answer.endswith(b"}"):
                    raise RuntimeError(f"answered {answer[:300]!r}")
                answered += 1
                connection.sendall(requests[answered % len(requests)])
    return answered


def check(router: Ours, request: bytes, holders: Sequence[int]) -> None:
    """Raise AssertionError unless every process behind the port chooses a worker that holds the prompt."""
    for _ in range(CHECKS):
        client = HttpClient(router.port)
        status, content = client.send(request)
        client.close()
        if status != 200 or int(json.loads(content)["worker_id"]) - 1 not in holders:
            raise AssertionError(f"{status} {content[:300]!r}, {holders} hold the prompt")


def measure(settings: PeerSettings) -> Findings:
    rounds = settings.pick(5, 2)
    seconds = settings.pick(4, 1)
    count = chains_for(settings.pick(200_000, 40_000))
    progress("processes: making events")
    chains = Workload().chains(count)
    publishing = Publishing()
    path = settings.folder / "frames.bin"
    batches, _ = write_frames(path, publishing.frames(enumerate(chains), BLOCKS_PER_EVENT))
    values: dict[str, list[float]] = {}
    rates: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        routers = []
        for name, processes in ((PEER, 1), (OURS, 2)):
            router = stack.enter_context(Ours.run(settings.folder, "--processes", str(processes)))
            router.name = name
            routers.append(router)
            publisher = stack.enter_context(Publisher.run(path, WORKERS))
            router.register(publisher.endpoints)
            publisher.wait()
            publisher.send(batches)
            for index, worker in last_placed(publishing.held, count):
                router.wait_visible(chains[index], worker)
        questions = []
        for chain in chains[:PROMPTS]:
            body = {"model_name": MODEL, "block_hashes": chain.hashes.view(np.int64).tolist()}
            questions.append(routers[0].client.request("POST", "/select", body))
        for router in routers:
            check(router, questions[0], publishing.held[0])
        for turn in range(rounds):
            progress(f"processes: round {turn + 1} of {rounds}")
            for router in rotate(routers, turn):
                before = cpu_by_process(router.pid)
                done = decide(router.port, questions, seconds)
                used = {pid: after - before.get(pid, 0.0) for pid, after in cpu_by_process(router.pid).items()}
                values.setdefault(router.name, []).append(capacity(done, used))
                rates.setdefault(router.name, []).append(done / seconds)
    rows = [
        peer_row("/select, 512 hashes, --processes 2, client aside", "decisions/s", PEER, values, goal=GOAL, more=True)
    ]
    wall = ", ".join(f"{name} {np.median(router_rates):,.0f}" for name, router_rates in rates.items())
    return Findings(rows, [f"decisions/s as the client saw them, which shares the cores: {wall}"])
