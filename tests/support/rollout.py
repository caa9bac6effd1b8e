# SPDX-License-Identifier: Apache-2.0
"""A rolling update as Kubernetes does it, with processes instead of pods.

Two routers on one store are replaced one after the other, with the flags and times of the chart, while clients hold
streams open. As with a Service, a client connects to any listed endpoint and keeps its connection until an answer
closes it. A pod is listed once /ready says so. A pod that ends gets SIGTERM at once, leaves the list some time later,
and is killed at the end of its grace period. By hand, with the chart's own times:

    python -m tests.support.rollout --streams 200
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from tests.support.chart import CHART, container, one
from tests.support.helm_template import helm_template
from tests.support.replica_process import MODEL, ReplicaProcess
from tests.support.router_process import RouterProcess
from tests.support.store_server import StoreServer

REPLICAS = 2
WAIT_S = 60.0
READY_PERIOD_S = 0.1
# Time until the last node knows that a pod is no longer an endpoint.
PROPAGATION_S = 1.0
# Time between the listing of a new pod and the end of an old one, in which streams start on the new pod.
SETTLE_S = 2.0


class Times(msgspec.Struct, frozen=True):
    """The times that the chart gives a router's pod, in seconds."""

    # The flags of the delay and of the drain.
    arguments: list[str]
    # The pod's grace period.
    grace_s: float


def chart_times(values: Mapping[str, Any]) -> Times:
    deployment = one(helm_template(CHART, dict(values)), "Deployment")
    words = container(deployment)["args"]
    # The chart's other flags need a cluster.
    arguments = [word for word in words[1:] if word.startswith(("--shutdown-delay-s", "--drain-s"))]
    assert len(arguments) == 2
    return Times(arguments, deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"])


class Service:
    """The endpoints that new connections go to."""

    def __init__(self) -> None:
        self.ports: list[int] = []
        self._turn = itertools.count()

    def endpoint(self) -> int:
        return self.ports[next(self._turn) % len(self.ports)]


class Client:
    """A client that requests one stream after the other and counts how each ended, "whole" or a fault."""

    def __init__(self, service: Service, number: int, found: Counter[str]) -> None:
        self._service = service
        self._random = random.Random(number)
        self._found = found
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.open = False
        # How long the kept connection was idle before its last request.
        self._idle_s = 0.0
        self._answered_at = 0.0

    async def run(self, until: asyncio.Event) -> None:
        while not until.is_set():
            try:
                self._found[await self._stream()] += 1
            except ConnectionRefusedError:
                self._found["refused"] += 1
            except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
                where = (
                    "in an answer" if self.open else f"before an answer, after {self._idle_s:.1f} s without a request"
                )
                self._found[f"broken: {type(error).__name__} {where}"] += 1
            finally:
                self.open = False
        self._close()

    def _close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
        self._streams = None

    async def _stream(self) -> str:
        tokens = self._random.randrange(10, 100)
        body = {"model": MODEL, "prompt": [self._random.randrange(9_000) for _ in range(64)], "max_tokens": tokens}
        payload = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(payload)}\r\n\r\n"
        if self._streams is None or self._streams[0].at_eof():
            self._close()
            self._streams = await asyncio.open_connection("127.0.0.1", self._service.endpoint())
        reader, writer = self._streams
        try:
            async with asyncio.timeout(WAIT_S):
                self._idle_s = time.monotonic() - self._answered_at
                writer.write(head.encode() + payload)
                answer = await reader.readuntil(b"\r\n\r\n")
                self.open = True
                text = await chunks(reader) if b"transfer-encoding: chunked" in answer.lower() else b""
        except BaseException:
            self._close()
            raise
        self._answered_at = time.monotonic()
        if b"connection: close" in answer.lower():
            self._close()
        if not answer.startswith(b"HTTP/1.1 200 "):
            self._close()
            status = answer.partition(b"\r\n")[0].decode()
            return f"broken: {status}"
        usage = json.loads(text.split(b"data: ")[-2])["usage"]
        whole = text.endswith(b"data: [DONE]\n\n") and usage["completion_tokens"] == tokens
        return "whole" if whole else "broken: cut"


async def chunks(reader: asyncio.StreamReader) -> bytes:
    """Read the body of a chunked answer."""
    pieces = []
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        pieces.append((await reader.readexactly(size + 2))[:-2])
    await reader.readuntil(b"\r\n")
    return b"".join(pieces)


class Pod:
    """A router's process in the role of a Deployment's pod."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path, arguments: list[str]) -> None:
        self.router = RouterProcess(folder, arguments)
        stack.enter_context(self.router)

    def ready(self) -> bool:
        return self.router.text("/ready").startswith('{"status":"ready"')

    async def end(self, service: Service, grace_s: float) -> float:
        """End the pod as Kubernetes does, and return the seconds that this took.

        Fails if the process has not ended by the end of the grace period, or ends with another exit code than 0.
        """
        began = time.monotonic()
        self.router.signal(signal.SIGTERM)
        await asyncio.sleep(PROPAGATION_S)
        service.ports.remove(self.router.port)
        while (code := self.router.poll()) is None:
            assert time.monotonic() - began < grace_s, "killed at the end of its grace period"
            await asyncio.sleep(READY_PERIOD_S)
        assert code == 0, self.router.log_tail()
        return time.monotonic() - began


@contextlib.contextmanager
def engines(folder: Path) -> Iterator[list[str]]:
    """Run simulated replicas that answer with about ten tokens a second, and yield a router's flags for them."""
    with contextlib.ExitStack() as stack:
        flags = []
        for number in range(REPLICAS):
            replica = ReplicaProcess(folder / f"replica-{number}", ["--model", MODEL, "--step-ms", "100"])
            stack.enter_context(replica)
            flags += ["--worker", replica.spec(f"w{number}")]
        yield flags


async def replace_all(
    stack: contextlib.ExitStack, folder: Path, arguments: list[str], streams: int, times: Times
) -> tuple[Counter[str], int, list[float]]:
    """Replace both pods under load.

    Returns:
        The number of streams by the way they ended, the number of streams that were open as the first pod ended, and
        the seconds that each pod's end took.
    """
    loop = asyncio.get_running_loop()
    service, outcomes, finished = Service(), Counter[str](), asyncio.Event()
    names = itertools.count()

    async def surge() -> Pod:
        pod = await loop.run_in_executor(None, Pod, stack, folder / f"router-{next(names)}", arguments)
        while not await loop.run_in_executor(None, pod.ready):
            await asyncio.sleep(READY_PERIOD_S)
        service.ports.append(pod.router.port)
        return pod

    old = [await surge(), await surge()]
    clients = [Client(service, number, outcomes) for number in range(streams)]
    tasks = [asyncio.ensure_future(client.run(finished)) for client in clients]
    opened, ends = 0, []
    for pod in old:
        await surge()
        await asyncio.sleep(SETTLE_S)
        opened = opened or sum(client.open for client in clients)
        # A Deployment does not wait for the end of a pod before it starts the next one.
        ends.append(asyncio.ensure_future(pod.end(service, times.grace_s)))
    ends_s = [await end for end in ends]
    finished.set()
    await asyncio.gather(*tasks)
    return outcomes, opened, ends_s


def rollout(folder: Path, streams: int, values: Mapping[str, Any]) -> tuple[Counter[str], int, list[float]]:
    times = chart_times(values)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(StoreServer(folder / "store"))
        flags = stack.enter_context(engines(folder))
        return asyncio.run(
            replace_all(stack, folder, [*flags, "--redis", server.url, *times.arguments], streams, times)
        )


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--streams", type=int, default=200)
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tally, opened, took = rollout(Path(folder), arguments.streams, {})
    print(
        f"{opened} streams open as the first router ended; {dict(tally)}; ends took {[round(end, 1) for end in took]} s"
    )
    return int(set(tally) != {"whole"})


if __name__ == "__main__":
    sys.exit(main())
