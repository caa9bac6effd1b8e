# SPDX-License-Identifier: Apache-2.0
"""The event streams in the answer of SGLang's `GET /server_info`. Pure.

The answer has a base port, to which each rank adds its number.

Source: SGLang 0.5.23 srt/runtime_context.py:2072 (describe_kv_events_publisher).
"""

from __future__ import annotations

import msgspec

from kvrouter.router.model.engines.engine import NotThisEngine
from kvrouter.router.model.workers.engine_answers import MAX_RANKS, WRITE_THEM, EngineAnswers, EventsConfig, streams_of

SERVER_INFO_PATH = "/server_info"
START_WITH = (
    'start it with --kv-events-config \'{"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": '
    '"tcp://*:5558"}\''
)


class _Publisher(msgspec.Struct):
    endpoint_port_base: int
    publisher: str = ""
    endpoint_host: str = "*"
    dp_size: int = 1
    replay_endpoint_port_base: int | None = None


class _ServerInfo(msgspec.Struct):
    kv_events: _Publisher | None = None
    # SGLang's server has this argument in every version. vLLM in development mode has a path of the same name, but not
    # this field.
    disable_radix_cache: bool | None = None


_info = msgspec.json.Decoder(_ServerInfo)


def streams_in(answer: bytes, url: str) -> EngineAnswers:
    """Read the answer of the engine at `url`. The `streams` of the result are never None.

    Raises NotThisEngine if the answer is not from SGLang, and ValueError if it cannot be read.
    """
    try:
        info = _info.decode(answer)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"its {SERVER_INFO_PATH} cannot be read: {error}") from None
    publisher = info.kv_events
    if info.disable_radix_cache is None and publisher is None:
        raise NotThisEngine(f"its {SERVER_INFO_PATH} is not SGLang's")
    if publisher is None:
        return EngineAnswers(streams={}, problem=f"its engine publishes no KV events: {START_WITH}, or {WRITE_THEM}")

    def at(base: int, rank: int) -> str:
        host = f"[{publisher.endpoint_host}]" if ":" in publisher.endpoint_host else publisher.endpoint_host
        return f"tcp://{host}:{base + rank}"

    replay = publisher.replay_endpoint_port_base
    configs = {
        rank: EventsConfig(
            True,
            publisher.publisher,
            at(publisher.endpoint_port_base, rank),
            None if replay is None else at(replay, rank),
        )
        for rank in range(min(publisher.dp_size, MAX_RANKS))
    }
    return streams_of(configs, url, START_WITH)
