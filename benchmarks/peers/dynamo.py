# SPDX-License-Identifier: Apache-2.0
"""Dynamo's two services as child processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from benchmarks.processes import Ours, Served, serving
from benchmarks.workload import BLOCK_TOKENS, Chain
from tests.support.ports import free_port

INDEXER = "dynamo.indexer"
SELECT_SERVICE = "dynamo.select_service"
Server = TypeVar("Server", bound=Served)


class Dynamo(Served):
    """A service of dynamo, which computes block hashes of its own from the tokens in events and is queried with i64."""

    @classmethod
    @contextlib.contextmanager
    def run(cls, bin_folder: Path, service: str, folder: Path) -> Iterator[Dynamo]:
        port = free_port()
        command = [str(bin_folder / "python"), "-m", service, "--port", str(port)]
        if service == INDEXER:
            command += ["--block-size", str(BLOCK_TOKENS)]
        with serving(command, port, folder / f"dynamo-{port}.log") as pid:
            yield cls(pid, port, service)

    def hashes(self, chain: Chain) -> NDArray[np.uint64]:
        return chain.dynamo_hashes


@contextlib.contextmanager
def run_servers(service: str, bin_folder: Path | None, folder: Path) -> Iterator[list[Served]]:
    """Run this router, and the peer's service if its package is installed, and yield the servers."""
    with contextlib.ExitStack() as stack:
        servers: list[Served] = [stack.enter_context(Ours.run(folder))]
        if bin_folder is not None:
            servers.append(stack.enter_context(Dynamo.run(bin_folder, service, folder)))
        yield servers


def check_equal(servers: Sequence[Served], chains: Sequence[Chain]) -> None:
    """Raise AssertionError unless all servers give the same (worker -> tokens), not empty, for each prompt."""
    for chain in chains:
        answers = {server.name: server.ask(server.question(chain)) for server in servers}
        if not all(answers.values()) or len({str(sorted(answer.items())) for answer in answers.values()}) > 1:
            raise AssertionError(f"answers differ: {answers}")


def rotate(servers: Sequence[Server], turn: int) -> list[Server]:
    """Return the servers in the order of this round, so that another server goes first in each round."""
    return [*servers[turn % len(servers) :], *servers[: turn % len(servers)]]
