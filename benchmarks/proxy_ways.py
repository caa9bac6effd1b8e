# SPDX-License-Identifier: Apache-2.0
"""The routers that `proxy_overhead.py` compares, as child processes.

They stand in front of the same two stub engines and event streams.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks import plain_proxies
from benchmarks.http_client import HttpClient
from benchmarks.processes import START_TIMEOUT_S, Publisher, serving
from benchmarks.workload import MODEL, Publishing, Workload, write_frames
from tests.support.ports import free_port
from tests.support.tiny_tokenizer import write_tokenizer

ENGINES = 2

DIRECT = "direct"
# "kvrouter kv" gets the tokens of texts from an engine, as kv_aware does; with its own tokenizer it computes them
# itself.
OURS = "kvrouter kv"
OURS_LOCAL = "kvrouter kv, own tokenizer"
OURS_ROUND_ROBIN = "kvrouter round_robin"
CACHE_AWARE = "vllm-router cache_aware"
KV_AWARE = "vllm-router kv_aware"
NAMES = (OURS, OURS_LOCAL, OURS_ROUND_ROBIN, CACHE_AWARE, KV_AWARE)


@contextlib.contextmanager
def ways(
    folder: Path, vllm_router: Sequence[str], names: Sequence[str], others: Mapping[str, str] | None = None
) -> Iterator[tuple[dict[str, int], dict[str, int]]]:
    """Run the routers in `names`, and yield the ports and the process ids by name.

    The ports always include DIRECT, the first engine itself, which has no process id.

    Args:
        folder: Where files are written.
        vllm_router: The command of vllm-router; empty if there is none.
        names: The routers that run.
        others: The interpreters of further routers of ours like OURS, by name; `names` may have these names too.
    """
    others = others or {}
    with contextlib.ExitStack() as stack:
        tokenizer = write_tokenizer(folder / "tokenizer")
        chains = Workload().chains(ENGINES)
        frames = folder / "frames.bin"
        write_frames(frames, Publishing(ENGINES).frames(enumerate(chains), 32))
        publisher = stack.enter_context(Publisher.run(frames, ENGINES))
        engines = [free_port() for _ in range(ENGINES)]
        for port in engines:
            stub = [sys.executable, "-m", "benchmarks.proxy_stub", str(port), "--tokenizer", str(tokenizer)]
            stack.enter_context(serving(stub, port, folder / "stub.log"))
        ports, pids = {DIRECT: engines[0]}, {}
        commands: dict[str, list[str]] = {}
        ours: list[tuple[str, str, list[str]]] = [
            (OURS, sys.executable, []),
            (OURS_LOCAL, sys.executable, ["--tokenizer", f"{MODEL}={tokenizer}"]),
            (OURS_ROUND_ROBIN, sys.executable, ["--policy", "round_robin"]),
            *((name, python, []) for name, python in others.items()),
        ]
        for name, python, extra_flags in ours:
            command = [python, "-m", "kvrouter.router.cli", "serve", "--log-level", "warning", *extra_flags]
            command += ["--data-dir", str(folder / f"data-{len(commands)}")]
            for n, (engine, endpoint) in enumerate(zip(engines, publisher.endpoints, strict=True)):
                command += ["--worker", f"w{n}=http://127.0.0.1:{engine},events={endpoint},model={MODEL},block_size=16"]
            commands[name] = command
        if vllm_router:
            urls = [f"http://127.0.0.1:{engine}" for engine in engines]
            for name, policy in ((CACHE_AWARE, "cache_aware"), (KV_AWARE, "kv_aware")):
                command = [*vllm_router, "--policy", policy, "--worker-urls", *urls]
                command += ["--prometheus-port", str(free_port()), "--log-level", "warning"]
                if policy == "kv_aware":
                    pairs = zip(urls, publisher.endpoints, strict=True)
                    command += [part for url, end in pairs for part in ("--kv-event-source", f"{url}={end}")]
                    command += ["--kv-event-block-size", "16", "--kv-event-model", MODEL]
                commands[name] = command
        plain = [name for name in plain_proxies.PLAIN if not plain_proxies.problem(name)]
        for n, name in enumerate(name for name in names if name in commands or name in plain):
            port = ports[name] = free_port()
            if name in plain:
                command = plain_proxies.command(name, folder, port, engines)
            else:
                command = [*commands[name], "--port", str(port)]
            pids[name] = stack.enter_context(serving(command, port, folder / f"router-{n}.log"))
        publisher.wait()
        publisher.send(len(list(Publishing(ENGINES).frames(enumerate(chains), 32))))
        _wait_for_tokens(ports, [(OURS, "render"), (OURS_LOCAL, "local"), *((name, "render") for name in others)])
        yield ports, pids


def _wait_for_tokens(ports: dict[str, int], sources: Sequence[tuple[str, str]]) -> None:
    """Wait until each of our routers finds the tokens of texts in its way; the other routers get the same time."""
    deadline = time.monotonic() + START_TIMEOUT_S
    for name, way in sources:
        if name not in ports:
            continue
        client = HttpClient(ports[name])
        # Request a text, as the router verifies an engine only after a text was requested.
        client.call("POST", "/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]})
        while True:
            rows = client.call("GET", "/workers")["workers"]
            if all(row["tokens"]["way"] == way and not row["tokens"]["problem"] for row in rows):
                break
            if time.monotonic() > deadline:
                raise RuntimeError(f"{name} finds no tokens: {[row['tokens'] for row in rows]}")
            time.sleep(0.2)
        client.close()


def load_now() -> float:
    """Return the machine's load average over the last minute."""
    return os.getloadavg()[0]
