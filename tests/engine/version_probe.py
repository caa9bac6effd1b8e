# SPDX-License-Identifier: Apache-2.0
"""The engine patch's reports under the vLLM version of this process, compared with the objects that they describe.

This is a script: `version_probe.py MODEL OUT` writes one JSON object. Each layout runs twice with the same load, first
without the patch and then with it. The stages of a run are a load, a reset of the device's cache, a load, a reset of
the connector's cache, and a load.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import vllm
import zmq
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched import scheduler as scheduler_module

from kvrouter.engine_patch import plugin
from kvrouter.events.patch.messages import REPORTS_PORT_OFFSET, REQUESTS_PORT_OFFSET, requests_endpoint
from kvrouter.events.vllm.codec import BatchDecoder
from kvrouter.events.vllm.messages import BlockRemoved, BlockStored
from tests.engine.version_engine import Engine
from tests.engine.version_footprint import changes, places
from tests.engine.version_layouts import Layout, layouts
from tests.engine.version_reports import (
    PATIENCE_S,
    VERSION,
    Listener,
    declared,
    expected_catalog,
    held,
    resident_copies,
    text_of,
)
from tests.support.report_peer import Peer, copies_of, summed

SEED = 7
# Enough for every layout to evict from all of its groups.
STEPS = 40
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
# The layout that listens on TCP, as engines do by default; the others need no free ports.
ON_TCP = "full"
# Below the ports that systems assign by themselves, also with our offsets.
PORTS = range(12_000, 20_000)


class Ticks:
    """A stand-in for the scheduler's `time` module that gives each batch the same time in both runs."""

    def __init__(self) -> None:
        self._now = 1_700_000_000.0

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def time(self) -> float:
        self._now += 0.25
        return self._now


def free_port() -> int:
    """Return a port that is free together with the two other ports that the patch will use."""
    # Probes that run at the same time begin their search at different ports.
    for i in range(len(PORTS)):
        port = PORTS[(os.getpid() + i) % len(PORTS)]
        try:
            for wanted in (port, port + REQUESTS_PORT_OFFSET, port + REPORTS_PORT_OFFSET):
                with socket.socket() as probe:
                    probe.bind(("", wanted))
        except OSError:
            continue
        return port
    raise AssertionError("no free ports")


def started(layout: Layout, model: Path, folder: str) -> Engine:
    scheduler_module.time = Ticks()
    # NONE_HASH is not drawn yet when an engine core builds its scheduler.
    vars(kv_cache_utils).pop("NONE_HASH", None)
    endpoint = f"tcp://*:{free_port()}" if layout.name == ON_TCP else f"ipc://{folder}/events"
    return Engine(layout, model, endpoint, f"ipc://{folder}/replay", SEED)


def stage(engine: Engine, number: int) -> None:
    if number == 1:
        assert engine.scheduler.reset_prefix_cache()
    elif number == 3:
        engine.scheduler.reset_prefix_cache(reset_connector=True)
    else:
        engine.work(STEPS)


STAGES = range(5)


def replayed(engine: Engine, batches: int) -> list[list[bytes]]:
    """Return (seq, payload) of every batch on vLLM's own topic, from its replay socket."""
    give_up_s = time.monotonic() + PATIENCE_S
    while True:
        frames: list[list[bytes]] = []
        dealer: zmq.Socket[bytes]
        with zmq.Context.instance().socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(engine.replay_endpoint)
            dealer.send_multipart([b"", bytes(8)])
            # Up to 0.25 the frames have no topic.
            last: list[bytes] = dealer.recv_multipart()[-2:]
            while last[0] != END_OF_REPLAY:
                frames.append(last)
                last = dealer.recv_multipart()[-2:]
        if len(frames) >= batches:
            return frames
        assert time.monotonic() < give_up_s, f"{len(frames)} of {batches} batches"
        time.sleep(0.01)


def run_stock(layout: Layout, model: Path) -> tuple[list[list[bytes]], list[str]]:
    """Return the frames of the unpatched engine, and the resident blocks at the end of each stage.

    The resident blocks show whether both runs are the same.
    """
    with tempfile.TemporaryDirectory() as folder:
        engine = started(layout, model, folder)
        try:
            residents = []
            for number in STAGES:
                stage(engine, number)
                residents.append(str(held(engine)))
            return replayed(engine, engine.batches), residents
        finally:
            engine.close()


def describe_stock(frames: list[list[bytes]]) -> dict[str, Any]:
    """Return the counts of batches and the places of vLLM's own events, as our decoder reads them."""
    decoder = BatchDecoder()
    stored: Counter[str] = Counter()
    removed: Counter[str] = Counter()
    broken = 0
    for _, payload in frames:
        batch = decoder.decode(payload)
        broken += len(batch.broken) + batch.unknown
        for event in batch.events:
            if isinstance(event, BlockStored):
                stored[f"{event.medium} {event.group_idx}"] += len(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                removed[f"{event.medium} {event.group_idx}"] += len(event.block_hashes)
    return {"batches": len(frames), "broken": broken, "stored": dict(stored), "removed": dict(removed)}


def run_patched(layout: Layout, model: Path) -> tuple[dict[str, Any], list[list[bytes]], list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        engine = started(layout, model, folder)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        address = (requests_endpoint(engine.endpoint) or "").replace("*", "127.0.0.1")
        endpoints: Any = SimpleNamespace(requests_endpoint=address, reports_endpoint=f"ipc://{folder}/none")
        with Peer(context, endpoints) as probe:
            hello = probe.hello()
        endpoints.reports_endpoint = hello.reports.replace("*", "127.0.0.1")
        with Peer(context, endpoints) as peer:
            # Once one heartbeat has arrived, no message is missed.
            peer.next_heartbeat()
            listener = Listener(engine, peer)
            stages, residents = [], []
            for number in STAGES:
                stage(engine, number)
                residents.append(str(held(engine)))
                heartbeat, agreed = listener.settle()
                parts = peer.snapshot()
                snapshot = copies_of(parts)
                stages.append(
                    {
                        "resident": text_of(held(engine)),
                        "heartbeat": {f"{p.medium} {p.group_idx}": [p.blocks, p.copies] for p in heartbeat.places},
                        "heartbeat_agrees": agreed,
                        "snapshot_agrees": summed(snapshot) == held(engine) and snapshot == resident_copies(engine),
                        "events_agree": summed(listener.copies) == held(engine),
                        "snapshot_at": parts[-1].next_seq - listener.next_seq,
                        "dropped": heartbeat.dropped,
                    }
                )
            catalog = peer.hello().catalog
        frames = replayed(engine, engine.batches)
        report = {
            "features": hello.features,
            "catalog": declared(catalog),
            "expected_catalog": expected_catalog(engine),
            "stages": stages,
            "stored": dict(listener.stored),
            "removed": dict(listener.removed),
            "placed": dict(listener.placed),
            "cleared": listener.cleared,
            "wrong": listener.wrong,
        }
        engine.close()
        return report, frames, residents


def main() -> None:
    model, out = map(Path, sys.argv[1:3])
    os.environ["KVROUTER_PATCH_HEARTBEAT_S"] = "0.05"
    stock = {layout.name: run_stock(layout, model) for layout in layouts(VERSION)}
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(plugin.LOGGER).addHandler(handler)
    before = places()
    plugin.register()
    changed = changes(before)
    reports = {}
    for layout in layouts(VERSION):
        frames, residents = stock[layout.name]
        report, patched_frames, patched_residents = run_patched(layout, model)
        report["stock"] = describe_stock(frames)
        report["same_run"] = residents == patched_residents
        report["same_bytes"] = frames == patched_frames
        report["log"] = sorted(set(warnings))
        warnings.clear()
        reports[layout.name] = report
    out.write_text(json.dumps({"version": vllm.__version__, "changed": changed, "layouts": reports}))


if __name__ == "__main__":
    main()
