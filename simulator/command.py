# SPDX-License-Identifier: Apache-2.0
"""`kvrouter sim`: simulated engine replicas in one process, until Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import threading
from collections.abc import Sequence

import msgspec
import zmq

from kvrouter.simulator.cache.shapes import SHAPES, Geometry, UnsupportedGeometry, make_geometry
from kvrouter.simulator.engine.replica import DEFAULT_CHUNK_TOKENS, DEFAULT_MAX_RUNNING, DEFAULT_MAX_TEXT_TOKENS
from kvrouter.simulator.engine.timing import INSTANT, Timing
from kvrouter.simulator.http.faults import Faults
from kvrouter.simulator.http.server import ANY_PORT, ReplicaServer, ServerThread

DEFAULT = Timing()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvrouter sim",
        description="Simulated engine replicas: vLLM's scheduler, cache and event stream without a model. "
        "Prints one JSON line a replica with its endpoints, then serves until Ctrl-C.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--replicas", type=int, default=1, help="so many of them; a given --port counts up from one to the next")
    add("--shape", default="gemma3", choices=list(SHAPES), help="the KV cache groups")
    add("--blocks", type=int, default=4096, help="blocks of the GPU pool, all groups together")
    add("--cpu-chunks", type=int, default=0, help="blocks that the CPU tier has room for; 0: there is none")
    add("--block-size", type=int, help="tokens a block; the shape's where it is not given")
    add("--window", type=int, help="tokens of the sliding window; the shape's where it is not given")
    add("--retention", default="0", help="tokens between kept checkpoints; 0: resume points only; dense: all")
    add("--chunk-tokens", type=int, default=DEFAULT_CHUNK_TOKENS, help="tokens that a step computes at most")
    add("--max-running", type=int, default=DEFAULT_MAX_RUNNING, help="requests that run at a time")
    add("--max-text-tokens", type=int, default=DEFAULT_MAX_TEXT_TOKENS, help="the context: prompt and answer together")
    add("--model", help="the served model's name; sim-SHAPE where it is not given")
    add("--host", default="127.0.0.1", help="where HTTP listens")
    add("--port", type=int, default=0, help="HTTP port; 0: a free one")
    add("--events", default=ANY_PORT, help="ZMQ endpoint of the event stream; port 0 takes a free one")
    add("--replay", default=ANY_PORT, help="ZMQ endpoint of the replay; `none` for no replay")
    add("--dp-rank", type=int, default=0, help="data-parallel rank that its events and metrics name")
    add("--no-event-sources", action="store_true", help="without /kv_event_sources, as vLLM before 0.31")
    time = parser.add_argument_group("time")
    time.add_argument("--instant", action="store_true", help="steps take no time")
    time.add_argument("--prefill-rate", type=float, default=DEFAULT.prefill_tokens_per_s, help="tokens a second")
    time.add_argument("--step-ms", type=float, default=DEFAULT.step_base_s * 1e3, help="a step without tokens")
    time.add_argument(
        "--decode-ms", type=float, default=DEFAULT.decode_sequence_s * 1e3, help="more a decoding request"
    )
    time.add_argument("--load-rate", type=float, default=DEFAULT.load_tokens_per_s, help="tokens a second from the CPU")
    faults = parser.add_argument_group("faults from the start, each as in POST /sim/faults")
    faults.add_argument("--drop-events", type=int, metavar="N", help="the next batches are not sent, but replayed")
    faults.add_argument("--lose-events", type=int, metavar="N", help="the next batches are nowhere")
    faults.add_argument("--stall", type=float, metavar="S", dest="stall_s", help="no step ends for so many seconds")
    faults.add_argument("--slow", type=float, metavar="FACTOR", help="steps take so many times as long")
    faults.add_argument("--fail", type=int, metavar="N", help="the next generation requests are answered with an error")
    return parser


def _timing(options: argparse.Namespace) -> Timing:
    if options.instant:
        return INSTANT
    return Timing(
        prefill_tokens_per_s=options.prefill_rate,
        step_base_s=options.step_ms / 1e3,
        decode_sequence_s=options.decode_ms / 1e3,
        load_tokens_per_s=options.load_rate,
    )


def _geometry(options: argparse.Namespace) -> Geometry:
    interval = None if options.retention == "dense" else int(options.retention)
    return make_geometry(
        options.shape, block_size=options.block_size, window=options.window, retention_interval=interval
    )


def _servers(
    options: argparse.Namespace, context: zmq.Context[zmq.Socket[bytes]], undo: contextlib.ExitStack
) -> list[ReplicaServer]:
    if options.replicas < 1:
        raise ValueError(f"--replicas {options.replicas}: start 1 or more")
    if options.replicas > 1 and (options.events, options.replay) != (ANY_PORT, ANY_PORT):
        raise ValueError("--events and --replay name one replica's endpoints; leave them out with more than one")
    geometry, timing = _geometry(options), _timing(options)
    servers = []
    for n in range(options.replicas):
        server = ReplicaServer(
            geometry,
            options.blocks,
            context=context,
            model=options.model or f"sim-{options.shape}",
            host=options.host,
            port=options.port + n if options.port else 0,
            events=options.events,
            replay=None if options.replay == "none" else options.replay,
            timing=timing,
            cpu_chunks=options.cpu_chunks,
            chunk_tokens=options.chunk_tokens,
            max_running=options.max_running,
            max_text_tokens=options.max_text_tokens,
            dp_rank=options.dp_rank,
            event_sources=not options.no_event_sources,
        )
        undo.callback(server.release)
        servers.append(server)
    return servers


def main(argv: Sequence[str] | None = None) -> int:
    """Run replicas until SIGINT or SIGTERM. Returns the exit code: 0 stopped, 2 wrong settings or address."""
    options = _parser().parse_args(argv)
    asked_to_stop = threading.Event()
    with zmq.Context[zmq.Socket[bytes]]() as context, contextlib.ExitStack() as undo:
        try:
            servers = _servers(options, context, undo)
            names = ("drop_events", "lose_events", "stall_s", "slow", "fail")
            given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
            faults = msgspec.convert(given, Faults)
            thread = ServerThread(servers, faults=faults)
        except (UnsupportedGeometry, msgspec.ValidationError, ValueError, OSError, zmq.ZMQError) as error:
            print(f"kvrouter sim: {error}", file=sys.stderr)
            return 2
        undo.callback(thread.stop)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: asked_to_stop.set())
        thread.start()
        for server in servers:
            print(json.dumps({**server.endpoints, "shape": options.shape, "blocks": options.blocks}), flush=True)
        asked_to_stop.wait()
    return 0
