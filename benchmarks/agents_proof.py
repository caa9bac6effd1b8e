# SPDX-License-Identifier: Apache-2.0
"""Claim: for requests of agents, the router predicts exactly the tokens that real engines reuse, through every door.

Two `vllm serve` (the CPU build of the engine tests, a tiny hybrid model) stand behind one router. OpenAI's and
Anthropic's own clients hold conversations with `/v1/responses` and `/v1/messages`: with tools, streamed and not, stored
and whole, in the background, cancelled, and with bodies in zstd, gzip and plain. They come through the proxy, and
through a real Envoy with the router as its endpoint picker, with FULL_DUPLEX_STREAMED and with BUFFERED bodies. Each
request is counted.

A turn with `previous_response_id` has no prediction, because only the engine knows its prompt. Any other request without
one, and each that differs from the engine's report, is listed, and the exit status is 1.

    make agents-proof ARGS="--requests 200 --json FILE"
    make agents-proof ARGS="--door proxy --no-render"
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.engine_venv import ENVIRONMENT, engine_python
from benchmarks.report import machine, markdown, parser_of, progress, scratch
from tests.engine.agents import FLAGS, RENDER, STORE, Door, Line, Tally, converse, door_at, own_tokenizer, warm_up
from tests.engine.chat_fleet import Fleet, chat_fleet
from tests.engine.chat_model import write_chat_model
from tests.support.envoy_process import BUFFERED, FULL_DUPLEX, ORIGINAL_DST, OVERRIDE_HOST, EnvoyProcess
from tests.support.ports import free_port

PROXY = "proxy"
# How each Envoy passes bodies to the picker, and how it finds the engine.
ENVOYS: dict[str, dict[str, Any]] = {
    "envoy": {"processing": FULL_DUPLEX, "how": ORIGINAL_DST},
    "envoy-buffered": {"processing": BUFFERED, "how": OVERRIDE_HOST},
}
# The router has this long to verify the tokens of messages and responses before requests are counted.
WARM_UP_S = 30.0
PROGRESS_REQUESTS = 20


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__, result=True)
    parser.add_argument("--requests", type=int, default=200, help="through each door")
    parser.add_argument("--door", action="append", choices=(PROXY, *ENVOYS), help="default: all")
    parser.add_argument(
        "--no-render",
        action="store_true",
        help="without the engines' render endpoints, but with the router's own tokenizer",
    )
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


@contextmanager
def opened(folder: Path, name: str, fleet: Fleet, picker_port: int) -> Iterator[Door]:
    """Yield one of the doors to the fleet."""
    with ExitStack() as stack:
        port = fleet.router.port
        if name != PROXY:
            urls = [engine.url for engine in fleet.engines.values()]
            port = stack.enter_context(EnvoyProcess(folder / name, urls, picker_port=picker_port, **ENVOYS[name])).port
        yield stack.enter_context(door_at(name, port))


def prove(folder: Path, arguments: argparse.Namespace, tallies: list[Tally]) -> None:
    """Hold the conversations through each door, and append the tally of each door before they begin."""
    picker_port = free_port()
    model = write_chat_model(folder / "model")
    with chat_fleet(
        folder,
        model,
        (*FLAGS, *(() if arguments.no_render else RENDER)),
        environment=ENVIRONMENT | STORE | {"OMP_NUM_THREADS": "1"},
        router_flags=["--gateway-port", str(picker_port), *(own_tokenizer(model) if arguments.no_render else ())],
        python=str(engine_python()),
    ) as fleet:
        for name in arguments.door or (PROXY, *ENVOYS):
            with opened(folder, name, fleet, picker_port) as door:
                warm_up(fleet, door, WARM_UP_S)
                tally = Tally(name)
                tallies.append(tally)

                def shown(number: int, tally: Tally = tally) -> None:
                    if number % PROGRESS_REQUESTS == 0 or number == arguments.requests:
                        progress(f"{tally.door}: {number} of {arguments.requests}, {len(tally.problems)} problems")

                converse(fleet, door, arguments.requests, arguments.seed, tally, shown)


def table(lines: list[Line]) -> str:
    heads = ["door", "requests", "number", "equal", "wrong", "unknown", "cancelled", "predicted tokens", "delivered"]
    return markdown([heads, *([str(cell) for cell in line] for line in lines)])


def main() -> int:
    arguments = parse()
    # Ctrl-C ends the processes that were started, also where a shell has background jobs ignore it; SIGTERM does the
    # same.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    os.environ.update(ENVIRONMENT)
    begun_s, ended_by, about = time.monotonic(), "", machine()
    tallies: list[Tally] = []
    progress("starting two vLLM servers, half a minute or more")
    with scratch() as folder:
        try:
            prove(folder, arguments, tallies)
        except (AssertionError, KeyboardInterrupt) as error:
            ended_by = repr(error)[:2_000]
    lines = [line for tally in tallies for line in tally.lines()]
    problems = [problem for tally in tallies for problem in tally.problems]
    result = {
        "machine": about,
        "render": not arguments.no_render,
        "seed": arguments.seed,
        "seconds": round(time.monotonic() - begun_s),
        "lines": [line._asdict() for line in lines],
        "workers": {tally.door: dict(tally.workers) for tally in tallies},
        "problems": problems,
        "ended by": ended_by,
    }
    print(table(lines))
    for problem in [*problems[:10], *([f"ended by {ended_by}"] if ended_by else [])]:
        print(f"- {problem}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return bool(problems or ended_by)


if __name__ == "__main__":
    sys.exit(main())
