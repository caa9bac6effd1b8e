# SPDX-License-Identifier: Apache-2.0
"""A simulated replica that listens: HTTP, event stream and replay, started and stopped as one."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypedDict

import uvicorn
import zmq

from kvrouter.events.publisher import EventPublisher
from kvrouter.simulator.api import build_app
from kvrouter.simulator.replica import DEFAULT_CHUNK_TOKENS, Replica
from kvrouter.simulator.shapes import SHAPES, Geometry, UnsupportedGeometry, make_geometry
from kvrouter.simulator.stream import EventStream

# Longer than any simulated request takes; a connection that still hangs then is cut.
SHUTDOWN_S = 5.0

ANY_PORT = "tcp://127.0.0.1:0"


class Endpoints(TypedDict):
    """Where a started replica listens, with the ports that were free."""

    model: str
    url: str
    events: str
    replay: str | None


class ReplicaServer:
    """One replica behind HTTP and ZMQ. Binds when made, serves in a thread of its own from `start` to `stop`."""

    def __init__(
        self,
        geometry: Geometry,
        num_blocks: int,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        model: str,
        host: str = "127.0.0.1",
        port: int = 0,
        events: str = ANY_PORT,
        replay: str | None = ANY_PORT,
        chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """port 0 takes a free one. Raises OSError or zmq.ZMQError when an address is taken, ValueError for a size."""
        with contextlib.ExitStack() as undo:
            self._socket = socket.create_server((host, port))
            undo.callback(self._socket.close)
            self.publisher = EventPublisher(events, replay, context=context)
            undo.callback(self.publisher.close)
            stream = EventStream(geometry, self.publisher, clock=clock)
            self.replica = Replica(geometry, num_blocks, on_step=stream.send, chunk_tokens=chunk_tokens)
            undo.pop_all()
        self.endpoints: Endpoints = {
            "model": model,
            "url": f"http://{host}:{self._socket.getsockname()[1]}",
            "events": self.publisher.endpoint,
            "replay": self.publisher.replay_endpoint,
        }
        config = uvicorn.Config(
            build_app(self.replica, model=model, clock=clock),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=int(SHUTDOWN_S),
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), daemon=True, name=f"kvrouter-sim-{self.endpoints['url']}"
        )

    def start(self) -> None:
        """Begin to answer. The socket listens already, so a client may connect at once."""
        self._thread.start()

    def stop(self) -> None:
        """Finish the running requests, send the last events, free the ports. Safe to call twice, and before `start`."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(2 * SHUTDOWN_S)
        self._socket.close()
        self.publisher.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvrouter sim",
        description="One simulated engine replica: vLLM's cache and event stream without a model. "
        "Prints one JSON line with its endpoints, then serves until Ctrl-C.",
    )
    parser.add_argument("--shape", default="gemma3", choices=list(SHAPES), help="the KV cache groups (default: gemma3)")
    parser.add_argument("--blocks", type=int, default=4096, help="blocks of the GPU pool, all groups together")
    parser.add_argument("--block-size", type=int, help="tokens a block (default: the shape's)")
    parser.add_argument("--window", type=int, help="tokens of the sliding window (default: the shape's)")
    parser.add_argument(
        "--retention", default="0", help="tokens between kept checkpoints; 0: resume points only; dense: all"
    )
    parser.add_argument("--chunk-tokens", type=int, default=DEFAULT_CHUNK_TOKENS, help="tokens computed in one step")
    parser.add_argument("--model", help="the served model's name (default: sim-SHAPE)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="HTTP port (default: a free one)")
    parser.add_argument("--events", default=ANY_PORT, help="ZMQ endpoint of the event stream; port 0 takes a free one")
    parser.add_argument("--replay", default=ANY_PORT, help="ZMQ endpoint of the replay; `none` for no replay")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one replica until SIGINT or SIGTERM. Returns the exit code: 0 stopped, 2 wrong settings or address."""
    options = _parser().parse_args(argv)
    asked_to_stop = threading.Event()
    with zmq.Context[zmq.Socket[bytes]]() as context:
        try:
            dense = options.retention == "dense"
            geometry = make_geometry(
                options.shape,
                block_size=options.block_size,
                window=options.window,
                retention_interval=None if dense else int(options.retention),
            )
            server = ReplicaServer(
                geometry,
                options.blocks,
                context=context,
                model=options.model or f"sim-{options.shape}",
                host=options.host,
                port=options.port,
                events=options.events,
                replay=None if options.replay == "none" else options.replay,
                chunk_tokens=options.chunk_tokens,
            )
        except (UnsupportedGeometry, ValueError, OSError, zmq.ZMQError) as error:
            print(f"kvrouter sim: {error}", file=sys.stderr)
            return 2
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: asked_to_stop.set())
        server.start()
        print(json.dumps({**server.endpoints, "shape": options.shape, "blocks": options.blocks}), flush=True)
        try:
            asked_to_stop.wait()
        finally:
            server.stop()
    return 0
