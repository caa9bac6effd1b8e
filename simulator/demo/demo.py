# SPDX-License-Identifier: Apache-2.0
"""`kvrouter demo`: a real router in front of simulated replicas, with every prediction checked.

The demo starts `kvrouter serve` and a few replicas whose GPU pools are far too small, and sends conversations through
the router. For every prompt and every replica it compares the reuse that the router predicts with the reuse of the
engine. With --stay, traffic then continues for people who want to look around. The demo cleans up however it ends.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from kvrouter.simulator.demo.router import DemoFailed, RouterProcess, call, serve_command
from kvrouter.simulator.demo.signals import INTERRUPTED, StopSignals
from kvrouter.simulator.demo.summary import Row, Summary
from kvrouter.simulator.demo.trace import (
    SCENES,
    DemoScene,
    Prompt,
    Rivals,
    full_attention_choice,
    full_attention_hit,
    make_prompts,
    roomy,
    working_set_blocks,
)
from kvrouter.simulator.demo.view import View
from kvrouter.simulator.engine.timing import INSTANT, Timing
from kvrouter.simulator.http.server import ReplicaServer, ServerThread

# One prompt in this many goes round robin before the router takes over, as traffic without a router does. So prefixes
# lie on several replicas, which is when a choice matters.
WARMUP_SHARE = 4

# With --stay: a few requests a second, as many as a person can watch.
STAY_PAUSE_S = 0.15
STAY_REPORT_S = 10.0
STAY_PROMPTS = 200


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Options of one run."""

    replicas: int = 4
    shape: str = "gemma3"
    requests: int = 48
    seed: int = 7
    # The policy by which the router chooses workers (its flag `--policy`).
    policy: str = "kv"
    # Prompts of a trace, instead of those made from `seed`.
    prompts: Sequence[Prompt] = ()
    # The trace's name.
    name: str = ""
    json_output: bool = False
    # Whether a row for each prompt is printed.
    verbose: bool = False
    # Whether traffic continues until Ctrl-C.
    stays: bool = False
    # Monotonic, in seconds.
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    # Returns the command that starts a router on a port with a data folder; None for `serve_command`.
    command: Callable[[int, Path], list[str]] | None = field(default=None)

    @property
    def problem(self) -> str | None:
        """Why the demo cannot run with these options; None if it can."""
        if self.shape not in SCENES or self.replicas < 1 or self.requests < 1:
            return f"shapes are {', '.join(SCENES)}; take 1 or more replicas and requests"
        if self.stays and self.json_output:
            return "--json ends with the result, and --stay does not end: leave one of them out"
        return None


class Demo:
    """The replicas and the router in front of them. Serves one prompt after another."""

    def __init__(self, fleet: list[ReplicaServer], router: RouterProcess, warmup: int) -> None:
        self._fleet = fleet
        self._router = router
        self._warmup = warmup
        self._model = fleet[0].endpoints["model"]
        self._ids = [f"w{i}" for i in range(len(fleet))]
        self._served = [0] * len(fleet)

    def register(self) -> None:
        """Register every replica with the router by its addresses only: the router learns the groups from events."""
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
        """Query the router, choose a replica, send the prompt, and wait until the router has the replica's events."""
        tokens = list(prompt.tokens)
        question = {"model": self._model, "token_ids": tokens}
        instances = self._router.call("/query", {**question, "explain": True})["instances"]
        answers = [instances[worker_id] for worker_id in self._ids]
        real = [server.replica.find(tokens).tokens for server in self._fleet]
        seen = [full_attention_hit(server.replica, tokens) for server in self._fleet]
        if number < self._warmup:
            chosen = number % len(self._fleet)
            promised, by, reason = answers[chosen]["gpu"], "round robin", "before the router takes over"
            url = self._fleet[chosen].endpoints["url"]
        else:
            selected = self._router.call("/select", {**question, "max_tokens": prompt.max_tokens})
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
        """Send a prompt and return the reused tokens. The answer is streamed, so that its first token can be timed."""
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"model": self._model, "prompt": tokens, "max_tokens": max_tokens, **stream}
        answer = call(f"{url}/v1/completions", body)
        if answer.get("usage") is None:
            raise DemoFailed(f"{url} ended a stream without its usage: {answer}")
        reused: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return reused

    @property
    def url(self) -> str:
        """URL of the router."""
        return self._router.url

    def proxied(self, prompt: Prompt) -> int:
        """Send a prompt through the router, as any client would, and return the reused tokens."""
        return self._complete(self._router.url, list(prompt.tokens), prompt.max_tokens)

    def _wait(self) -> None:
        self._router.wait_until_shown(self._ids, [server.publisher.next_seq - 1 for server in self._fleet])


def _limit(answer: dict[str, Any]) -> str | None:
    limit = answer.get("limited_by")
    return None if limit is None else f"g{limit['group_idx']} {limit['kind']}"


def run_demo(options: DemoOptions) -> int:
    """Run the demo to its end.

    Returns the exit code: 0 if every prediction was right, 1 if one was wrong or the demo failed, 2 for wrong options,
    130 after Ctrl-C.
    """
    if options.problem is not None:
        print(f"kvrouter demo: {options.problem}", file=sys.stderr)
        return 2
    signals = StopSignals()
    try:
        with signals:
            return _run(options, signals)
    except (DemoFailed, KeyboardInterrupt) as error:
        if isinstance(error, DemoFailed) and not signals.is_interrupted:
            print(f"kvrouter demo: {error}", file=sys.stderr)
            return 1
        # Ctrl-C ends the router, too, if all are in one group of processes.
        print("\nkvrouter demo: stopped", file=sys.stderr)
        return INTERRUPTED


def _run(options: DemoOptions, signals: StopSignals) -> int:
    scene, replicas, clock = SCENES[options.shape], options.replicas, options.clock
    prompts = options.prompts or make_prompts(random.Random(options.seed), options.requests)
    working_set = working_set_blocks(scene, prompts)
    if options.prompts:
        scene = roomy(scene, prompts, working_set)
    warmup = len(prompts) // WARMUP_SHARE
    view = View(replicas, max(len(prompt.tokens) for prompt in prompts), quiet=options.json_output)
    view.opening(options.shape, replicas, len(prompts), options.name)
    started = clock()
    rows: list[Row] = []
    summary = Summary()
    rivals = Rivals(scene, replicas, warmup)
    with contextlib.ExitStack() as stack:
        try:
            demo = _start(stack, options, scene, warmup)
            view.started(clock() - started, warmup, options.policy)
            for number, prompt in enumerate(prompts):
                row = demo.serve(number, prompt)
                rivals.serve(prompt)
                rows.append(row)
                summary.add(row)
            summary.round_robin_reused_tokens = rivals.round_robin_reused
            summary.full_attention_reused_tokens = rivals.full_attention_reused
            summary.seconds = round(clock() - started, 2)
            if options.json_output:
                shown = [asdict(row) for row in rows]
                result = {"shape": options.shape, "seed": options.seed, "rows": shown, "summary": asdict(summary)}
                print(json.dumps(result))
            else:
                view.verdict(summary)
                if options.verbose:
                    view.table(scene, working_set, rows, summary)
                view.next_steps(options.shape, verbose=options.verbose)
            if options.stays:
                _stay(demo, options, view)
        finally:
            signals.ignore()
    return 0 if summary.exact_prompts == summary.prompts else 1


def _stay(demo: Demo, options: DemoOptions, view: View) -> None:
    """Send requests through the router until Ctrl-C."""
    view.staying(demo.url)
    sent = prompt_tokens = reused_tokens = 0
    reported_s = options.clock()
    with contextlib.suppress(KeyboardInterrupt):
        for turn in itertools.count(1):
            rng = random.Random(options.seed + turn)
            for prompt in options.prompts or make_prompts(rng, STAY_PROMPTS):
                sent += 1
                prompt_tokens += len(prompt.tokens)
                reused_tokens += demo.proxied(prompt)
                if options.clock() >= reported_s + STAY_REPORT_S:
                    reported_s = options.clock()
                    view.still(sent, reused_tokens, prompt_tokens)
                options.sleep(STAY_PAUSE_S)
    view.stayed(sent)


def _start(stack: contextlib.ExitStack, options: DemoOptions, scene: DemoScene, warmup: int) -> Demo:
    """Start and register router and replicas. Everything started is stopped when `stack` closes."""
    folder = tempfile.TemporaryDirectory(prefix="kvrouter-demo-", ignore_cleanup_errors=True)
    command = options.command or partial(serve_command, policy=options.policy)
    router = RouterProcess(Path(stack.enter_context(folder)), command=command)
    stack.callback(router.stop)
    router.start()
    context = stack.enter_context(zmq.Context[zmq.Socket[bytes]]())
    fleet: list[ReplicaServer] = []
    for _ in range(options.replicas):
        server = ReplicaServer(
            scene.geometry,
            scene.num_blocks,
            context=context,
            model=f"sim-{options.shape}",
            chunk_tokens=scene.chunk_tokens,
            # With --stay, people look at load and latency too.
            timing=Timing() if options.stays else INSTANT,
        )
        stack.callback(server.release)
        fleet.append(server)
    thread = ServerThread(fleet)
    stack.callback(thread.stop)
    thread.start()
    demo = Demo(fleet, router, warmup)
    demo.register()
    return demo
