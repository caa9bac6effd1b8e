# SPDX-License-Identifier: Apache-2.0
"""`kvrouter demo`: a real router in front of simulated replicas, and every prediction checked against what was reused.

It starts `kvrouter serve` and a few replicas whose GPU pools are far too small, sends conversations through the router,
and compares for every prompt and every replica what the router predicts with what the engine does. It cleans up
whatever way it ends.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import zmq

from kvrouter.simulator.demo.router import DemoFailed, Http, RouterProcess, serve_command
from kvrouter.simulator.demo.summary import Row, Summary
from kvrouter.simulator.demo.trace import (
    SCENES,
    DemoScene,
    Prompt,
    Rivals,
    full_attention_choice,
    full_attention_hit,
    make_prompts,
    working_set_blocks,
)
from kvrouter.simulator.demo.view import View
from kvrouter.simulator.http.server import ReplicaServer, ServerThread

# One prompt in this many goes round robin before the router takes over, as traffic without one does: so prefixes
# lie on several replicas, which is when a choice matters.
WARMUP_SHARE = 4

# Exit codes that shells expect of a program ended by SIGINT and SIGTERM.
INTERRUPTED, TERMINATED = 130, 143


class Demo:
    """The fleet, the router in front of it, and one prompt after another."""

    def __init__(self, fleet: list[ReplicaServer], router: RouterProcess, http: Http, warmup: int) -> None:
        self._fleet = fleet
        self._router = router
        self._http = http
        self._warmup = warmup
        self._model = fleet[0].endpoints["model"]
        self._ids = [f"w{i}" for i in range(len(fleet))]
        self._served = [0] * len(fleet)

    def register(self) -> None:
        """Tell the router where every replica listens, and nothing else: it learns the groups from the events."""
        for worker_id, server in zip(self._ids, self._fleet, strict=True):
            body = {
                "worker_id": worker_id,
                "model": self._model,
                "endpoint": server.endpoints["events"],
                "replay_endpoint": server.endpoints["replay"],
                "url": server.endpoints["url"],
            }
            self._router.call("/register", body)
        self._wait()

    def serve(self, number: int, prompt: Prompt) -> Row:
        """Ask, choose, send, and wait until the router knows what the replica did."""
        tokens = list(prompt.tokens)
        asked = {"model": self._model, "token_ids": tokens}
        instances = self._router.call("/query", {**asked, "explain": True})["instances"]
        answers = [instances[worker_id] for worker_id in self._ids]
        real = [server.replica.find(tokens).tokens for server in self._fleet]
        seen = [full_attention_hit(server.replica, tokens) for server in self._fleet]
        if number < self._warmup:
            chosen = number % len(self._fleet)
            promised, by, reason = answers[chosen]["gpu"], "round robin", "before the router takes over"
            url = self._fleet[chosen].endpoints["url"]
        else:
            selected = self._router.call("/select", {**asked, "max_tokens": prompt.max_tokens})
            chosen = self._ids.index(selected["worker_id"])
            promised, by, reason = selected["overlap"]["gpu"], "kvrouter", selected["reason"]
            url = selected["endpoint"]
        row = Row(
            number=number + 1,
            conversation=prompt.conversation,
            turn=prompt.turn,
            prompt_tokens=len(tokens),
            predicted=[answer["gpu"] for answer in answers],
            real=real,
            limited_by=[_limit(answer) for answer in answers],
            full_attention=seen,
            chosen=chosen,
            by=by,
            reason=reason,
            promised=promised,
            reused=self._complete(url, tokens, prompt.max_tokens),
            full_attention_choice=full_attention_choice(seen, self._served),
        )
        self._served[chosen] += 1
        self._wait()
        return row

    def _complete(self, url: str, tokens: list[int], max_tokens: int) -> int:
        body = {"model": self._model, "prompt": tokens, "max_tokens": max_tokens}
        usage = self._http.call(f"{url}/v1/completions", body)["usage"]
        reused: int = usage["prompt_tokens_details"]["cached_tokens"]
        return reused

    def _wait(self) -> None:
        self._router.wait_until_shown(self._ids, [server.publisher.next_seq - 1 for server in self._fleet])


def _limit(answer: dict[str, Any]) -> str | None:
    limit = answer.get("limited_by")
    return None if limit is None else f"g{limit['group_idx']} {limit['kind']}"


@contextlib.contextmanager
def _orderly_end() -> Iterator[Callable[[], None]]:
    """SIGTERM unwinds as Ctrl-C does. Yields what makes further signals wait, to be called when the clean-up begins.

    Elsewhere than in the main thread signals are left alone.
    """

    def unwind(*_: object) -> NoReturn:
        raise SystemExit(TERMINATED)

    def hold() -> None:
        for number in before:
            signal.signal(number, signal.SIG_IGN)

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before[signal.SIGINT] = signal.getsignal(signal.SIGINT)
        before[signal.SIGTERM] = signal.signal(signal.SIGTERM, unwind)
    try:
        yield hold
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_demo(
    *,
    replicas: int = 3,
    shape: str = "gemma3",
    requests: int = 48,
    seed: int = 7,
    json_output: bool = False,
    clock: Callable[[], float] = time.monotonic,
    command: Callable[[int, Path], list[str]] = serve_command,
) -> int:
    """Run it to its end. Returns the exit code: 0 when every prediction was right, 1 when one was wrong or it failed.

    clock: seconds, monotonic. command: how a router is started on a port with a data folder.
    """
    if shape not in SCENES or replicas < 1 or requests < 1:
        print(f"kvrouter demo: shapes are {', '.join(SCENES)}; take 1 or more replicas and requests", file=sys.stderr)
        return 2
    try:
        with _orderly_end() as hold_signals:
            return _run(shape, replicas, requests, seed, json_output, clock, command, hold_signals)
    except DemoFailed as error:
        print(f"kvrouter demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nkvrouter demo: stopped", file=sys.stderr)
        return INTERRUPTED


def _run(
    shape: str,
    replicas: int,
    requests: int,
    seed: int,
    json_output: bool,
    clock: Callable[[], float],
    command: Callable[[int, Path], list[str]],
    hold_signals: Callable[[], None],
) -> int:
    scene = SCENES[shape]
    prompts = make_prompts(random.Random(seed), requests)
    warmup = requests // WARMUP_SHARE
    view = View(replicas, quiet=json_output)
    view.opening(shape, scene, replicas, requests, warmup, working_set_blocks(scene, prompts))
    started = clock()
    rows: list[Row] = []
    summary = Summary()
    rivals = Rivals(scene, replicas, warmup)
    with contextlib.ExitStack() as stack:
        try:
            demo = _start(stack, shape, scene, replicas, warmup, command)
            view.header(clock() - started)
            for number, prompt in enumerate(prompts):
                row = demo.serve(number, prompt)
                rivals.serve(prompt)
                rows.append(row)
                summary.add(row)
                view.row(row)
        finally:
            hold_signals()
    summary.round_robin_reused_tokens = rivals.round_robin_reused
    summary.full_attention_reused_tokens = rivals.full_attention_reused
    summary.seconds = round(clock() - started, 2)
    if json_output:
        shown = [asdict(row) for row in rows]
        print(json.dumps({"shape": shape, "seed": seed, "rows": shown, "summary": asdict(summary)}))
    else:
        view.closing(shape, rows, summary)
    return 0 if summary.exact_prompts == summary.prompts else 1


def _start(
    stack: contextlib.ExitStack,
    shape: str,
    scene: DemoScene,
    replicas: int,
    warmup: int,
    command: Callable[[int, Path], list[str]],
) -> Demo:
    """Router and replicas, started and registered; whatever was started is stopped when `stack` ends."""
    http = Http()
    folder = tempfile.TemporaryDirectory(prefix="kvrouter-demo-", ignore_cleanup_errors=True)
    router = RouterProcess(Path(stack.enter_context(folder)), http=http, command=command)
    stack.callback(router.stop)
    router.start()
    context = stack.enter_context(zmq.Context[zmq.Socket[bytes]]())
    fleet: list[ReplicaServer] = []
    for _ in range(replicas):
        server = ReplicaServer(
            scene.geometry, scene.num_blocks, context=context, model=f"sim-{shape}", chunk_tokens=scene.chunk_tokens
        )
        stack.callback(server.release)
        fleet.append(server)
    thread = ServerThread(fleet)
    stack.callback(thread.stop)
    thread.start()
    demo = Demo(fleet, router, http, warmup)
    demo.register()
    return demo
