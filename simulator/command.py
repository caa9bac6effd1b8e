# SPDX-License-Identifier: Apache-2.0
"""`kvrouter sim`: simulated engine replicas in one process, until Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Annotated, Any

import msgspec
import typer
import zmq

from kvrouter.simulator.cache.hashing import DEFAULT_SEED
from kvrouter.simulator.cache.peer import Lender
from kvrouter.simulator.cache.shapes import SHAPES, UnsupportedGeometry, make_geometry
from kvrouter.simulator.engine.replica import DEFAULT_CHUNK_TOKENS, DEFAULT_MAX_RUNNING, DEFAULT_MAX_TEXT_TOKENS
from kvrouter.simulator.engine.timing import INSTANT, Timing
from kvrouter.simulator.http.engine_flags import EngineFlags
from kvrouter.simulator.http.faults import Faults
from kvrouter.simulator.http.server import ANY_PORT, ReplicaServer, ServerThread

DEFAULT = Timing()
MAX_PORT = 65_535
# The help text is as wide as the terminal, up to this number of columns; by default it is never wider than 80.
HELP_MAX_WIDTH = 160


def _check_ports(host: str, port: int, replicas: int) -> None:
    """Raise ValueError if a replica could not listen on its port, before any replica starts. Port 0 is always free."""
    last = port + replicas - 1
    wanted = f"ports {port} to {last} are needed; " if replicas > 1 else ""
    if port and last > MAX_PORT:
        raise ValueError(f"--port {port}: {wanted}the highest port is {MAX_PORT}; --port 0 takes free ones")
    for number in range(port, last + 1) if port else ():
        try:
            socket.create_server((host, number)).close()
        except OSError as error:
            # The library appends the address to the system's text.
            reason = str(error.strerror or error).partition(" (")[0]
            raise ValueError(
                f"cannot listen on {host} port {number} ({reason}); stop what listens there, or pass another --host or "
                f"--port; {wanted}--port 0 takes free ones"
            ) from None


def _servers(
    options: SimpleNamespace, context: zmq.Context[zmq.Socket[bytes]], undo: contextlib.ExitStack
) -> list[ReplicaServer]:
    if options.replicas < 1:
        raise ValueError(f"--replicas {options.replicas}: start 1 or more")
    if options.replicas > 1 and (options.events, options.replay) != (ANY_PORT, ANY_PORT):
        raise ValueError("--events and --replay name one replica's endpoints; leave them out with more than one")
    _check_ports(options.host, options.port, options.replicas)
    interval = None if options.retention == "dense" else int(options.retention)
    geometry = make_geometry(
        options.shape, block_size=options.block_size, window=options.window, retention_interval=interval
    )
    timing = INSTANT
    if not options.instant:
        timing = Timing(options.prefill_rate, options.step_ms / 1e3, options.decode_ms / 1e3, options.load_rate)
    lends = options.peer_gbytes_per_s > 0
    if lends:
        timing = timing.lending(geometry, options.peer_gbytes_per_s * 1e9, options.peer_latency_ms / 1e3)
    lenders: dict[int, Callable[[], Lender | None]] = {}
    flags = EngineFlags(
        kv_events=not options.no_kv_events,
        prefix_caching=not options.no_prefix_caching,
        prompt_tokens_details=not options.no_prompt_tokens_details,
        rust_front_end=options.rust_front_end,
        hash_seed=options.hash_seed,
    )
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
            flags=flags,
            lenders=lenders if lends else None,
        )
        undo.callback(server.release)
        servers.append(server)
    return servers


def _serve(options: SimpleNamespace) -> int:
    stop_requested = threading.Event()
    with zmq.Context[zmq.Socket[bytes]]() as context, contextlib.ExitStack() as undo:
        try:
            servers = _servers(options, context, undo)
            names = ("drop_events", "lose_events", "stall_s", "slow", "fail", "api_keys")
            fault_values = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
            faults = msgspec.convert(fault_values, Faults)
            thread = ServerThread(servers, faults=faults)
        except (UnsupportedGeometry, msgspec.ValidationError, ValueError, OSError, zmq.ZMQError) as error:
            print(f"kvrouter sim: {error}", file=sys.stderr)
            return 2
        undo.callback(thread.stop)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop_requested.set())
        thread.start()
        for server in servers:
            print(json.dumps({**server.endpoints, "shape": options.shape, "blocks": options.blocks}), flush=True)
        stop_requested.wait()
    return 0


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
# Some versions of typer wrap click, others carry a copy; this is the base of usage errors in both.
UsageProblem: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def _help(text: str, *flags: str, metavar: str = "N") -> Any:
    return typer.Option(*flags, help=text, metavar=metavar)


def _switch(text: str, flag: str) -> Any:
    return typer.Option(flag, help=text)


@app.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": HELP_MAX_WIDTH})
def sim(
    replicas: Annotated[int, _help("number of replicas; with several, a given --port counts up")] = 1,
    shape: Annotated[str, _help("KV cache groups: " + ", ".join(SHAPES), metavar="NAME")] = "gemma3",
    blocks: Annotated[int, _help("blocks of the GPU pool, all groups together")] = 4096,
    cpu_chunks: Annotated[int, _help("blocks of the CPU tier; 0: no tier")] = 0,
    block_size: Annotated[int | None, _help("tokens in a block; default: the shape's")] = None,
    window: Annotated[int | None, _help("tokens of the sliding window; default: the shape's")] = None,
    retention: Annotated[str, _help("tokens between kept checkpoints; 0: resume points only; dense: all")] = "0",
    chunk_tokens: Annotated[int, _help("most tokens that a step computes")] = DEFAULT_CHUNK_TOKENS,
    max_running: Annotated[int, _help("most requests that run at a time")] = DEFAULT_MAX_RUNNING,
    max_text_tokens: Annotated[int, _help("context length: prompt and answer together")] = DEFAULT_MAX_TEXT_TOKENS,
    model: Annotated[str | None, _help("served model name; default: sim-SHAPE", metavar="NAME")] = None,
    host: Annotated[str, _help("HTTP address", metavar="HOST")] = "127.0.0.1",
    port: Annotated[int, _help("HTTP port; 0 takes free ones", metavar="PORT")] = 0,
    events: Annotated[
        str, _help("ZMQ endpoint of the event stream; port 0 takes a free one", metavar="URL")
    ] = ANY_PORT,
    replay: Annotated[str, _help("ZMQ endpoint of the replay; `none` for no replay", metavar="URL")] = ANY_PORT,
    dp_rank: Annotated[int, _help("data-parallel rank in events and metrics")] = 0,
    no_event_sources: Annotated[
        bool, _switch("do not serve /kv_event_sources, as vLLM before 0.31", "--no-event-sources")
    ] = False,
    no_kv_events: Annotated[bool, _switch("publish no events", "--no-kv-events")] = False,
    no_prefix_caching: Annotated[bool, _switch("keep no block for later prompts", "--no-prefix-caching")] = False,
    no_prompt_tokens_details: Annotated[
        bool, _switch("do not report cached tokens in usage", "--no-prompt-tokens-details")
    ] = False,
    rust_front_end: Annotated[bool, _switch("answer as behind vLLM's front end in Rust", "--rust-front-end")] = False,
    hash_seed: Annotated[str, _help("seed of the block hashes, as PYTHONHASHSEED", metavar="SEED")] = DEFAULT_SEED,
    instant: Annotated[bool, _switch("steps take no time", "--instant")] = False,
    prefill_rate: Annotated[float, _help("prefill rate, tokens/s")] = DEFAULT.prefill_tokens_per_s,
    step_ms: Annotated[float, _help("time of a step without tokens, ms")] = DEFAULT.step_base_s * 1e3,
    decode_ms: Annotated[float, _help("time of each decoding request in a step, ms")] = DEFAULT.decode_sequence_s * 1e3,
    load_rate: Annotated[float, _help("load rate from the CPU tier, tokens/s")] = DEFAULT.load_tokens_per_s,
    peer_gbytes_per_s: Annotated[
        float, _help("speed at which a replica lends its CPU tier to the others of this process, GB/s; 0: it does not")
    ] = 0.0,
    peer_latency_ms: Annotated[float, _help("way of a question to a lending replica and back, ms")] = 1.0,
    drop_events: Annotated[int | None, _help("fault: the next N batches are not sent, but can be replayed")] = None,
    lose_events: Annotated[int | None, _help("fault: the next N batches are lost")] = None,
    stall_s: Annotated[float | None, _help("fault: no step ends for S seconds", "--stall", metavar="S")] = None,
    slow: Annotated[float | None, _help("fault: steps take FACTOR times as long", metavar="FACTOR")] = None,
    fail: Annotated[int | None, _help("fault: the next N generation requests get an error")] = None,
    api_keys: Annotated[
        list[str] | None,
        _help("key that requests below /v1 need, as with vLLM; repeatable", "--api-key", metavar="KEY"),
    ] = None,
) -> None:
    """Run simulated engine replicas: vLLM's scheduler, cache and event stream without a model.

    Prints one JSON line a replica with its endpoints, then serves until Ctrl-C.
    """
    raise typer.Exit(_serve(SimpleNamespace(**locals())))


def main(argv: Sequence[str] | None = None) -> int:
    """Run replicas until SIGINT or SIGTERM. Returns the exit code: 0 stopped, 2 wrong settings or address."""
    try:
        code = app(sys.argv[1:] if argv is None else list(argv), prog_name="kvrouter sim", standalone_mode=False)
    except UsageProblem as problem:
        message = str(problem.format_message()) if hasattr(problem, "format_message") else str(problem)
        print(f"kvrouter sim: {message}", file=sys.stderr)
        return 2
    return code if isinstance(code, int) else 0
