# SPDX-License-Identifier: Apache-2.0
"""What the proxy adds to a request at the median and at the 99th percentile, and how many a core takes, beside vllm-router.

Two stub engines answer at once; the same client asks them directly, through `kvrouter serve`, and through vllm-router (cache_aware,
and kv_aware with the same event streams), in turns. Prompts are 256, 4,096 and 32,768 tokens, as text of a chat and as ids of a
completion, over 1 connection (what is added) and over 64 (requests for each second of the router's CPU). kvrouter's engines know no
tokenizer, so its texts are placed by load; ids are hashed and looked up.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from http_client import HttpClient
from processes import HERE, Publisher, child, cpu_s, free_port
from report import Others, Result, machine, markdown, progress, save
from workload import MODEL, Publishing, Workload, write_frames

SIZES = (256, 4_096, 32_768)
ENGINES = 2
CONNECTIONS = 64
WORDS = 997
START_TIMEOUT_S = 120.0


class ProxyRow(msgspec.Struct):
    """One router, kind and size of prompt. added: to the same request sent directly, in us."""

    router: str
    kind: str
    tokens: int
    added_p50_us: float
    added_p99_us: float
    requests_per_cpu_s: float
    requests_per_s: float


def bodies(kind: str, tokens: int, count: int) -> list[bytes]:
    """Different prompts with a common beginning of half their length."""
    rng = np.random.default_rng(tokens)
    common = rng.integers(10, 100_000, tokens // 2).tolist()
    made = []
    for _ in range(count):
        ids = [*common, *rng.integers(10, 100_000, tokens - len(common)).tolist()]
        if kind == "ids":
            made.append(json.dumps({"model": MODEL, "prompt": ids, "max_tokens": 1}).encode())
            continue
        # Some four bytes a token.
        text = " ".join(f"{token % WORDS:03d}" for token in ids)
        messages = [{"role": "user", "content": text}]
        made.append(json.dumps({"model": MODEL, "messages": messages, "max_tokens": 1}).encode())
    return made


def request_of(port: int, kind: str, body: bytes) -> bytes:
    path = "/v1/completions" if kind == "ids" else "/v1/chat/completions"
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def timed(client: HttpClient, request: bytes) -> float:
    """Seconds of one exchange."""
    began = time.perf_counter()
    status, answer = client.send(request)
    taken = time.perf_counter() - began
    if status != 200:
        raise RuntimeError(f"{status}: {answer[:300]!r}")
    return taken


def latencies(ports: dict[str, int], kind: str, made: list[bytes], count: int) -> dict[str, list[float]]:
    """The same requests by each way in turns, so that what else the machine does meets all alike."""
    clients = {name: HttpClient(port) for name, port in ports.items()}
    found: dict[str, list[float]] = {name: [] for name in ports}
    for n in range(count + 20):
        for name, client in clients.items():
            taken = timed(client, request_of(ports[name], kind, made[n % len(made)]))
            if n >= 20:
                found[name].append(taken)
    for client in clients.values():
        client.close()
    return found


def throughput(port: int, pid: int, kind: str, made: list[bytes], seconds: float) -> tuple[float, float]:
    """(requests for each second of the router's CPU, requests/s) with CONNECTIONS at once."""
    requests = [request_of(port, kind, body) for body in made]
    counts = [0] * CONNECTIONS
    until = time.monotonic() + seconds

    def ask(number: int) -> None:
        client = HttpClient(port)
        while time.monotonic() < until:
            timed(client, requests[(number + counts[number]) % len(requests)])
            counts[number] += 1
        client.close()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(CONNECTIONS)]
    before, began = cpu_s(pid), time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (cpu_s(pid) - before), sum(counts) / (time.monotonic() - began)


@contextlib.contextmanager
def serving(command: list[str], port: int, log: Path) -> Iterator[int]:
    """A router that answers; its process id."""
    with child(command, log) as process:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command} does not serve; see {log}: {log.read_text()[-2000:]}")
            with contextlib.suppress(OSError, ValueError):
                client = HttpClient(port)
                if client.send(client.request("GET", "/health"))[0] == 200:
                    break
            time.sleep(0.1)
        yield process.pid


@contextlib.contextmanager
def routers(folder: Path, vllm_router: Path | None) -> Iterator[tuple[dict[str, int], dict[str, int]]]:
    """Ports and process ids by name; `direct` is the first engine itself."""
    with contextlib.ExitStack() as stack:
        chains = Workload().chains(ENGINES)
        frames = folder / "frames.bin"
        write_frames(frames, Publishing(ENGINES).frames(enumerate(chains), 32))
        publisher = stack.enter_context(Publisher.run(frames, ENGINES))
        engines = [free_port() for _ in range(ENGINES)]
        for port in engines:
            stub = [sys.executable, str(HERE / "proxy_stub.py"), str(port)]
            stack.enter_context(serving(stub, port, folder / "stub.log"))
        ports, pids = {"direct": engines[0]}, {}
        port = free_port()
        command = [sys.executable, "-m", "kvrouter.router.cli", "serve", "--port", str(port), "--log-level", "warning"]
        command += ["--data-dir", str(folder / "data")]
        for n, (engine, endpoint) in enumerate(zip(engines, publisher.endpoints, strict=True)):
            command += ["--worker", f"w{n}=http://127.0.0.1:{engine},events={endpoint},model={MODEL},block_size=16"]
        pids["kvrouter"] = stack.enter_context(serving(command, port, folder / "kvrouter.log"))
        ports["kvrouter"] = port
        if vllm_router is not None:
            urls = [f"http://127.0.0.1:{engine}" for engine in engines]
            for policy in ("cache_aware", "kv_aware"):
                port = free_port()
                command = [str(vllm_router), "--port", str(port), "--policy", policy, "--worker-urls", *urls]
                command += ["--prometheus-port", str(free_port()), "--log-level", "warning"]
                if policy == "kv_aware":
                    pairs = zip(urls, publisher.endpoints, strict=True)
                    command += [part for url, end in pairs for part in ("--kv-event-source", f"{url}={end}")]
                    command += ["--kv-event-block-size", "16", "--kv-event-model", MODEL]
                name = f"vllm-router {policy}"
                pids[name] = stack.enter_context(serving(command, port, folder / f"{policy}.log"))
                ports[name] = port
        publisher.wait()
        publisher.send(len(list(Publishing(ENGINES).frames(enumerate(chains), 32))))
        time.sleep(1.0)
        yield ports, pids


def measure(folder: Path, vllm_router: Path | None, *, quick: bool) -> tuple[list[ProxyRow], list[str]]:
    rows, notes = [], []
    with routers(folder, vllm_router) as (ports, pids):
        for kind in ("ids", "text"):
            for tokens in SIZES:
                progress(f"proxy: {tokens} tokens, {kind}")
                made = bodies(kind, tokens, 32 if quick else 256)
                count = 200 if quick else max(400, min(3_000, 20_000_000 // tokens))
                times = latencies(ports, kind, made, count)
                direct = sorted(times["direct"])
                notes.append(f"{tokens} tokens as {kind}: {statistics.median(direct) * 1e6:.0f} us directly")
                for name in pids:
                    found = sorted(times[name])
                    per_cpu_s, per_s = throughput(ports[name], pids[name], kind, made, 1.0 if quick else 4.0)
                    p50 = statistics.median(found) - statistics.median(direct)
                    at = int(len(found) * 0.99)
                    rows.append(
                        ProxyRow(name, kind, tokens, p50 * 1e6, (found[at] - direct[at]) * 1e6, per_cpu_s, per_s)
                    )
    return rows, notes


def table(rows: list[ProxyRow]) -> str:
    head = ["prompt", "router", "adds p50, us", "adds p99, us", "requests a CPU second", "requests/s, 64 connections"]
    lines = [head]
    for row in rows:
        numbers = (row.added_p50_us, row.added_p99_us, row.requests_per_cpu_s, row.requests_per_s)
        lines.append([f"{row.tokens} tokens, {row.kind}", row.router, *(f"{number:,.0f}" for number in numbers)])
    return markdown(lines)


def main() -> None:
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small and short: shows that it works, not how fast")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to FILE")
    parser.add_argument(
        "--vllm-router", type=Path, metavar="FILE", help="the command of vllm-router 0.1.17, in a venv of its own"
    )
    arguments = parser.parse_args()
    about = machine()
    others = Others()
    with tempfile.TemporaryDirectory(prefix="kvr-bench-", dir="/tmp") as folder:
        rows, notes = measure(Path(folder), arguments.vllm_router, quick=arguments.quick)
    notes.append(others.note())
    save(Result("proxy_overhead", arguments.quick, about, rows, notes), arguments.json)
    print(table(rows))
    for note in notes:
        print(f"- {note}")
    print("- " + "; ".join(f"{name}: {value}" for name, value in about.items()))


if __name__ == "__main__":
    main()
