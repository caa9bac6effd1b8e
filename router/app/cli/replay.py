# SPDX-License-Identifier: Apache-2.0
"""The command `kvrouter replay`: its flags, and the options made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

import typer

from kvrouter.router.base.common.errors import SettingError

Number = TypeVar("Number", int, float)

EACH = "one for all replicas, or one for each"


def replay(
    trace: Annotated[
        Path, typer.Option(metavar="FILE", help="the traffic: a trace, bodies of requests, or a vLLM log")
    ],
    format_: Annotated[
        str, typer.Option("--format", metavar="NAME", help="auto, access, mooncake, openai or vllm")
    ] = "auto",
    shape: Annotated[
        str,
        typer.Option(metavar="NAME", help="KV cache groups: llama, gemma3, gpt-oss, qwen3-next, llama4 or deepseek-v4"),
    ] = "gemma3",
    workers: Annotated[int, typer.Option(metavar="N", help="number of simulated replicas")] = 8,
    cache_tokens: Annotated[
        str,
        typer.Option(help=f"what a replica's GPU cache holds, in tokens of all layers; {EACH}", metavar="N[,N...]"),
    ] = "400000",
    cpu_tokens: Annotated[
        str, typer.Option(help=f"what its CPU tier holds; 0: no tier; {EACH}", metavar="N[,N...]")
    ] = "0",
    block_tokens: Annotated[
        int, typer.Option(metavar="N", help="tokens in a block; 0: as many as a piece of the trace")
    ] = 0,
    prefill_rate: Annotated[
        str, typer.Option(help=f"prefill of a replica, tokens/s; {EACH}", metavar="N[,N...]")
    ] = "10000",
    step_ms: Annotated[float, typer.Option(metavar="N", help="time of a step without tokens, ms")] = 15,
    decode_ms: Annotated[
        float, typer.Option(metavar="N", help="time of each further decoding request in a step, ms")
    ] = 0.4,
    load_rate: Annotated[float, typer.Option(metavar="N", help="loads from the CPU tier, tokens/s")] = 380_000,
    peer_gbytes_per_s: Annotated[
        float,
        typer.Option(
            metavar="N", help="speed at which a replica lends chunks of its CPU tier to others, GB/s; 0: none lends"
        ),
    ] = 0.0,
    peer_latency_ms: Annotated[
        float, typer.Option(metavar="N", help="way of a question to a lending replica and back, ms")
    ] = 1.0,
    restart: Annotated[
        list[str] | None,
        typer.Option(
            help="seconds into the run at which this replica, from 0, loses its caches; may be repeated",
            metavar="TIME_S:WORKER",
        ),
    ] = None,
    speedup: Annotated[
        float, typer.Option(metavar="FACTOR", help="factor by which requests arrive faster than in the trace")
    ] = 1.0,
    policy: Annotated[
        list[str] | None, typer.Option(help="may be repeated; round_robin, kv and others unless given", metavar="NAME")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="seed of choices between equals")] = 1,
    requests: Annotated[int, typer.Option(metavar="N", help="only the first N; 0: all")] = 0,
    piece_tokens: Annotated[
        int,
        typer.Option(metavar="N", help="tokens that one id of the trace stands for; 0: 512 for mooncake, 16 for text"),
    ] = 0,
    bytes_per_token: Annotated[float, typer.Option(metavar="N", help="of text that is not tokenized")] = 4.0,
    output_tokens: Annotated[
        int, typer.Option(metavar="N", help="of an answer whose length the trace does not say")
    ] = 256,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="the model's tokenizer.json and chat template")
    ] = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="write the table as CSV")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print everything as JSON")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FOLDER", help="write PNG plots there (extra: plots)")] = None,
) -> None:
    """Replay your traffic through a virtual fleet, faster than real time, and compare policies. Sends nothing."""
    # These modules import the whole router and the simulator, which no other command of a client needs.
    from kvrouter.replay.command import ReplayOptions, run_replay
    from kvrouter.replay.fleet.fleet_shape import PeerSpeed, Restart
    from kvrouter.replay.policies.names import COMPARED
    from kvrouter.replay.policies.this_router import PULLING
    from kvrouter.simulator.engine.timing import Timing

    try:
        rates = _numbers("--prefill-rate", prefill_rate, float)
        timings = [Timing(rate, step_ms / 1e3, decode_ms / 1e3, load_rate) for rate in rates]
    except ValueError as error:
        raise SettingError(f"--prefill-rate, --step-ms, --decode-ms, --load-rate: {error}") from None
    peer = None
    if peer_gbytes_per_s:
        try:
            peer = PeerSpeed(peer_gbytes_per_s * 1e9, peer_latency_ms / 1e3)
        except ValueError as error:
            raise SettingError(f"--peer-gbytes-per-s, --peer-latency-ms: {error}") from None
    compared = (*COMPARED, PULLING) if peer is not None else COMPARED
    options = ReplayOptions(
        trace,
        format_,
        piece_tokens,
        bytes_per_token,
        output_tokens,
        tokenizer,
        requests,
        shape,
        workers,
        block_tokens,
        _numbers("--cache-tokens", cache_tokens, int),
        _numbers("--cpu-tokens", cpu_tokens, int),
        timings,
        [Restart(*_time_and_worker(text)) for text in restart or ()],
        speedup,
        tuple(dict.fromkeys(policy)) if policy else compared,
        seed,
        csv,
        as_json,
        plot,
        peer,
    )
    raise typer.Exit(run_replay(options))


def _numbers(flag: str, text: str, kind: type[Number]) -> list[Number]:
    """Read numbers between commas. Raises SettingError."""
    try:
        return [kind(number) for number in text.split(",")]
    except ValueError:
        raise SettingError(
            f"{flag} {text}: give one number, or one for each replica with commas between them"
        ) from None


def _time_and_worker(text: str) -> tuple[float, int]:
    """Read the value of `--restart`: the time in seconds and the replica's number. Raises SettingError."""
    time_s, _, worker = text.partition(":")
    try:
        return float(time_s), int(worker.removeprefix("w"))
    except ValueError:
        raise SettingError(f"--restart {text}: give seconds and a replica's number from 0, such as 600:2") from None
