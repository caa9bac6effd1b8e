# SPDX-License-Identifier: Apache-2.0
"""Claim: an exchange over the proxy's own connections takes less than a third of the CPU time of aiohttp's client.

Each client sends one request of 256 token ids again and again over a kept connection to an engine that answers at once
with a small answer. httpx is included because OpenAI's client uses it. See docs/adr/0013.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable

import aiohttp
import httpx
import uvloop

from benchmarks.processes import serving
from benchmarks.proxy_overhead import Prompts
from benchmarks.report import machine, markdown, parser_of, scratch
from kvrouter.router.base.common.direct_task import directly
from kvrouter.router.model.upstream.origin import target_of
from kvrouter.router.model.upstream.pool import Pool
from kvrouter.router.model.workers.allow_list import AllowList
from kvrouter.router.serve.proxy.headers import request_head
from tests.support.ports import free_port

PATH = "/v1/completions"
HEADERS = {"content-type": "application/json", "x-request-id": "x"}
SILENCE_S = 60.0


async def own(url: str, body: bytes, count: int) -> None:
    await directly(exchanges(url, body, count))


async def exchanges(url: str, body: bytes, count: int) -> None:
    pool = Pool(asyncio.get_running_loop(), AllowList())
    target = target_of(url)
    for _ in range(count):
        connection = pool.idle(target) or await pool.connect(target)
        headers = [(b"content-type", b"application/json")]
        head = request_head(
            target, PATH.encode(), headers, length=len(body), request_id=b"x", authorization=None, rank=None
        )
        parts: list[bytes] = []
        await connection.ask(head, body, SILENCE_S)
        await connection.relay(parts.extend)
        assert parts
        pool.give_back(target, connection)
    pool.close()


async def with_aiohttp(url: str, body: bytes, count: int) -> None:
    timeout = aiohttp.ClientTimeout(total=None, sock_read=SILENCE_S)
    async with aiohttp.ClientSession(auto_decompress=False, timeout=timeout) as session:
        for _ in range(count):
            async with session.post(url + PATH, data=body, headers=HEADERS, allow_redirects=False) as answer:
                assert [part async for part in answer.content.iter_any()]


async def with_httpx(url: str, body: bytes, count: int) -> None:
    async with httpx.AsyncClient() as session:
        for _ in range(count):
            async with session.stream("POST", url + PATH, content=body, headers=HEADERS) as answer:
                assert [part async for part in answer.aiter_raw()]


CLIENTS: dict[str, Callable[[str, bytes, int], Awaitable[None]]] = {
    "own, on httptools": own,
    "aiohttp": with_aiohttp,
    "httpx": with_httpx,
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--count", type=int, default=4_000, help="exchanges a round")
    count = parser.parse_args().count
    body = Prompts("ids", 256).body()
    port = free_port()
    rounds: dict[str, list[float]] = {name: [] for name in CLIENTS}
    command = [sys.executable, "-m", "benchmarks.proxy_stub", str(port)]
    with scratch() as folder, serving(command, port, folder / "stub.log"):
        for _ in range(3):
            for name, client in CLIENTS.items():
                before = time.process_time()
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    runner.run(client(f"http://127.0.0.1:{port}", body, count))  # type: ignore[arg-type]
                rounds[name].append((time.process_time() - before) / count * 1e6)
    lines = [["client", "us of CPU an exchange, three rounds"]]
    lines += [[name, ", ".join(f"{round_us:.0f}" for round_us in taken)] for name, taken in rounds.items()]
    print(markdown(lines))
    print("; ".join(f"{name}: {value}" for name, value in machine().items()))


if __name__ == "__main__":
    main()
