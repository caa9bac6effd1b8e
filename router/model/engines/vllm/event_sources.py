# SPDX-License-Identifier: Apache-2.0
"""The event streams in the answer of vLLM's `GET /kv_event_sources`. Pure.

The answer has one KVEventsConfig (config/kv_events.py) for each data-parallel rank, in which the ports already include
the rank. vLLM has this path from 0.31 on. Source: vLLM 0.32.0 entrypoints/serve/instrumentator/basic.py:59.
"""

from __future__ import annotations

import msgspec

from kvrouter.router.model.workers.engine_answers import EngineAnswers, EventsConfig, streams_of

SOURCES_PATH = "/kv_event_sources"
START_WITH = (
    'start it with --kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", '
    '"replay_endpoint": "tcp://*:5558"}\''
)

_sources = msgspec.json.Decoder(dict[int, EventsConfig], strict=False)


def streams_in(answer: bytes, url: str) -> EngineAnswers:
    """Read the answer of the engine at `url`. The `streams` of the result are never None.

    Raises ValueError if the answer cannot be read.
    """
    try:
        configs = _sources.decode(answer)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"its {SOURCES_PATH} cannot be read: {error}") from None
    return streams_of(configs, url, START_WITH)
