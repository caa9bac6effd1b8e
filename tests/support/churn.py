# SPDX-License-Identifier: Apache-2.0
"""Engines in their own process that store and evict blocks at a given rate and know exactly which blocks they hold.

Each engine has two KV cache groups: full attention, and a sliding window whose blocks are evicted sooner. A block
sometimes gets a second copy. The only code shared with the router is the wire format.

Commands are read from stdin, one a line; each is answered by one line of JSON:

    go      start to publish; answers {}
    pause   stop to publish; answers the last seq of each engine
    drop    lose the next two batches of one engine, so that only a replay has them; answers {}
    seqs    answer the last seq that each engine has published
    sent    answer the last seq of each engine that has left its socket
    dump    while paused: answer the resident blocks of each engine, and the tokens of each prompt that it would reuse
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, Self

import zmq

from kvrouter.events.vllm.codec import encode_batch
from kvrouter.events.vllm.publisher import EventPublisher
from kvrouter.events.vllm.wire import END_SEQ, SEQ_BYTES, WireEvent, WireRemoved, WireStored

BLOCK = 16
WINDOW = 64
WINDOW_BLOCKS = 4
CHAIN_BLOCKS = 24
CHAINS = 160
BLOCKS_A_BATCH = 64
# Blocks of each group that an engine holds before it evicts.
CAPACITY = (1_800, 500)
KINDS: tuple[dict[str, Any], ...] = (
    {"kv_cache_spec_kind": "full_attention"},
    {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": WINDOW},
)
MASK = (1 << 64) - 1


def block_hash(chain: int, index: int) -> int:
    """Return a hash with random-looking bits: splitmix64 of the block's number."""
    value = (chain * CHAIN_BLOCKS + index + 1) * 0x9E3779B97F4A7C15 & MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31


HASHES = [[block_hash(chain, index) for index in range(CHAIN_BLOCKS)] for chain in range(CHAINS)]


class SlowReplayPublisher(EventPublisher):
    """A publisher that waits before each batch of a replay, like one whose machine or network is busy."""

    replay_pause_s = 0.0
    # The last batch that left the socket. A replay delays the batches behind it, and no router can know them yet.
    sent_seq = -1

    def _send(self, seq: int, payload: bytes, sent: bool) -> None:
        super()._send(seq, payload, sent)
        self.sent_seq = seq

    def _answer_replay(self, replay: zmq.Socket[bytes]) -> None:
        if not self.replay_pause_s:
            super()._answer_replay(replay)
            return
        client, _, start = replay.recv_multipart()
        for seq, payload in list(self._ring):
            if seq >= int.from_bytes(start, "big"):
                replay.send_multipart((client, b"", self._topic, seq.to_bytes(SEQ_BYTES, "big"), payload))
                time.sleep(self.replay_pause_s)
        replay.send_multipart((client, b"", b"", END_SEQ, b""))


class Engine:
    """One engine: the copies that it holds in each group, and its publisher."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], rng: random.Random, replay_pause_s: float = 0.0
    ) -> None:
        self._rng = rng
        self.held: tuple[Counter[int], ...] = tuple(Counter() for _ in KINDS)
        # One entry for each copy, oldest first.
        self._order: tuple[list[int], ...] = tuple([] for _ in KINDS)
        self.publisher = SlowReplayPublisher("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", context=context)
        self.publisher.replay_pause_s = replay_pause_s

    def step(self) -> int:
        """Publish one batch, and return the number of blocks in it."""
        events: list[WireEvent] = []
        blocks = 0
        while blocks < BLOCKS_A_BATCH:
            chain = HASHES[min(int(self._rng.expovariate(0.02)), CHAINS - 1)]
            end = self._rng.randint(1, CHAIN_BLOCKS)
            for group, kind in enumerate(KINDS):
                blocks += self._store(events, group, chain, end, kind)
                blocks += self._evict(events, group)
        self.publisher.publish(encode_batch(time.time(), events, 0))
        return blocks

    def _store(self, events: list[WireEvent], group: int, chain: list[int], end: int, kind: dict[str, Any]) -> int:
        held = self.held[group]
        # Mostly store the missing blocks, rarely second copies of resident ones.
        again = self._rng.random() < 0.05
        start = 0 if again else next((i for i in range(end) if chain[i] not in held), end)
        new = chain[start:end]
        if not new:
            return 0
        events.append(
            WireStored(
                block_hashes=list(new),
                parent_block_hash=chain[start - 1] if start else None,
                token_ids=[],
                block_size=BLOCK,
                lora_id=None,
                medium="GPU",
                lora_name=None,
                group_idx=group,
                **kind,
            )
        )
        held.update(new)
        self._order[group].extend(new)
        return len(new)

    def _evict(self, events: list[WireEvent], group: int) -> int:
        order, held = self._order[group], self.held[group]
        excess = max(0, len(order) - CAPACITY[group])
        for _ in range(excess):
            # Not always the oldest is evicted, so that holes appear in the middle of prompts.
            gone = order.pop(self._rng.randrange(min(len(order), 64)))
            events.append(WireRemoved(block_hashes=[gone], medium="GPU", group_idx=group))
            held[gone] -= 1
            if not held[gone]:
                del held[gone]
        return excess

    def reuse(self, chain: list[int]) -> int:
        """Return how many tokens of a prompt this engine would reuse.

        The prompt has one token more than the blocks of `chain`, so all of them can be reused.
        """
        full, sliding = self.held
        best = 0
        for end in range(1, len(chain) + 1):
            if chain[end - 1] not in full:
                break
            window = chain[max(0, end - WINDOW_BLOCKS) : end]
            if all(block in sliding for block in window):
                best = end
        return best * BLOCK


def publish(engines: list[Engine], rate: float, go: threading.Event, step: threading.Lock) -> None:
    """Step the engines in turn, at `rate` blocks/s in all, while `go` is set.

    The lock `step` is held during each step, so that `stop` can wait for its end.
    """
    sent, started_s, turn = 0, time.monotonic(), 0
    while True:
        if not go.is_set():
            go.wait()
            sent, started_s = 0, time.monotonic()
        ahead_s = sent / rate - (time.monotonic() - started_s)
        if ahead_s > 0:
            time.sleep(ahead_s)
        with step:
            # `stop` may have cleared `go` and then held the lock; nothing may be published after it has returned.
            if go.is_set():
                sent += engines[turn % len(engines)].step()
                turn += 1


def stop(go: threading.Event, step: threading.Lock) -> None:
    """Clear `go` and wait for the current step, so that nothing is published until `go` is set again."""
    go.clear()
    with step:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, required=True)
    parser.add_argument("--rate", type=float, required=True, help="blocks/s in all, stored and removed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replay-pause-s", type=float, default=0.0, help="before each batch of a replay")
    arguments = parser.parse_args()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    rng = random.Random(arguments.seed)
    engines = [Engine(context, random.Random(rng.random()), arguments.replay_pause_s) for _ in range(arguments.engines)]
    go, step = threading.Event(), threading.Lock()
    threading.Thread(target=publish, args=(engines, arguments.rate, go, step), daemon=True).start()

    def tell(answer: Any) -> None:
        print(json.dumps(answer), flush=True)

    tell([[engine.publisher.endpoint, engine.publisher.replay_endpoint] for engine in engines])
    for line in sys.stdin:
        match line.strip():
            case "go":
                go.set()
                tell({})
            case "pause":
                stop(go, step)
                for engine in engines:
                    engine.publisher.flush(10.0)
                tell([engine.publisher.next_seq - 1 for engine in engines])
            case "drop":
                rng.choice(engines).publisher.drop_next(2)
                tell({})
            case "seqs":
                tell([engine.publisher.next_seq - 1 for engine in engines])
            case "sent":
                tell([engine.publisher.sent_seq for engine in engines])
            case "dump":
                tell(
                    {
                        "held": [[sorted(group) for group in engine.held] for engine in engines],
                        "reuse": [[engine.reuse(chain) for engine in engines] for chain in HASHES],
                    }
                )
            case _:
                break
    stop(go, step)
    for engine in engines:
        engine.publisher.close()
    context.destroy(linger=0)


class Churn:
    """The process of engines, driven by a test through its commands; engine i is worker `w{i}`."""

    def __init__(self, engines: int, rate: float, seed: int = 1, *, replay_pause_s: float = 0.0) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "--engines", str(engines)]
        command += ["--rate", str(rate), "--seed", str(seed), "--replay-pause-s", str(replay_pause_s)]
        self.workers = [f"w{number}" for number in range(engines)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.endpoints: list[tuple[str, str]] = [(events, replay) for events, replay in self._answer()]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def ask(self, word: str) -> Any:
        """Send one command and return its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(word.encode() + b"\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise AssertionError("the engines' process ended")
        return json.loads(line)


if __name__ == "__main__":
    main()
