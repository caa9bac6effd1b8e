# SPDX-License-Identifier: Apache-2.0
"""Real engines with conversations that stay where they began, behind a router, one of which is drained."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from kvrouter.events.peer.hand_over import HandOverRequest, Warm, Warmed, WarmQuery
from kvrouter.events.peer.hand_over_client import HandOverMessage, ask_engines
from tests.engine.engine_process import VOCAB_SIZE
from tests.engine.offload_engine import OffloadEngine
from tests.engine.offload_workload import SHAPES
from tests.support.ports import free_port
from tests.support.router_process import RouterProcess

MODEL = "tiny"
HOST = "127.0.0.1"
WAIT_S = 60.0
CONVERSATIONS = 4
SYSTEM_TOKENS = 96
# Prompts that never come back, which fill the rest of each CPU tier before the conversations begin.
OLD_PROMPTS = 5
TURNS = 3
# Every conversation has a turn in this time, so that it stays short for a minute.
TURN_S = 7.5


class Reuse(NamedTuple):
    """The prompts of one round."""

    tokens: int
    reused: int
    # Prompts whose reuse was another than the router had predicted.
    wrong: list[str]

    @property
    def share(self) -> float:
        return self.reused / self.tokens


@dataclass
class Conversation:
    token_ids: tuple[int, ...]
    engine: int


class HandOverFleet:
    """Engines named w0, w1 and so on. The last blocks of each are announced after every call."""

    def __init__(
        self, stack: ExitStack, router: RouterProcess, folder: Path, model: Path, num_engines: int, seed: int
    ) -> None:
        self.router = router
        shape = SHAPES["windows"]
        self.ports = [free_port() for _ in range(num_engines)]
        self.engines: list[OffloadEngine] = []
        for number, port in enumerate(self.ports):
            slots = folder / f"slots{number}"
            slots.mkdir()
            settings: dict[str, Any] = {
                "shared_memory_path": str(slots),
                "cpu_bytes_to_use": 2 * shape.cpu_blocks * shape.block_bytes,
                "peer_port": port,
                "peer_timeout_s": 5.0,
            }
            engine = OffloadEngine(folder / f"engine{number}", model, shape.gpu_blocks, settings)
            self.engines.append(stack.enter_context(engine))
            router.register(f"w{number}", MODEL, engine.endpoint, engine.replay_endpoint)
            stack.callback(router.unregister, f"w{number}")
        self._rng = Random(f"{seed} hand-over")
        system = self._tokens(SYSTEM_TOKENS)
        self.conversations = [
            Conversation(system + self._tokens(self._rng.randint(150, 250)), number)
            for number in range(num_engines)
            for _ in range(CONVERSATIONS)
        ]

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(3, VOCAB_SIZE) for _ in range(count))

    def fill(self) -> None:
        """Run old prompts, and then some turns of each conversation."""
        for engine in self.engines:
            for _ in range(OLD_PROMPTS):
                engine.run(self._tokens(400), 1)
        for _ in range(TURNS):
            self.turn(range(len(self.engines)))

    def turn(self, live: Sequence[int]) -> Reuse:
        """Run the next turn of each conversation where the router predicts the most reuse among the live engines."""
        tokens = reused = 0
        wrong = []
        for number, conversation in enumerate(self.conversations):
            conversation.token_ids += self._tokens(self._rng.randint(20, 50))
            if conversation.engine not in live:
                hits = {engine: self.predicted(engine, conversation.token_ids) for engine in live}
                conversation.engine = max(live, key=lambda engine: hits[engine])
            predicted = self.predicted(conversation.engine, conversation.token_ids)
            answer = self.engines[conversation.engine].run(conversation.token_ids, 1)
            tokens += len(conversation.token_ids)
            reused += answer["cached"]
            if answer["cached"] != predicted:
                wrong.append(f"conversation {number}: {predicted} predicted, {answer['cached']} reused")
        return Reuse(tokens, reused, wrong)

    def turns(self, live: Sequence[int], seconds: float) -> Reuse:
        """Run a turn of each conversation every TURN_S for this long."""
        begun_s = time.monotonic()
        total = self.turn(live)
        for number in range(1, math.ceil(seconds / TURN_S)):
            time.sleep(max(0.0, begun_s + number * TURN_S - time.monotonic()))
            reuse = self.turn(live)
            total = Reuse(total.tokens + reuse.tokens, total.reused + reuse.reused, total.wrong + reuse.wrong)
        return total

    def predicted(self, engine: int, token_ids: tuple[int, ...]) -> int:
        """Return what the router predicts once it knows all of an engine's blocks."""
        child, worker = self.engines[engine], f"w{engine}"
        blocks = {place: count for place, (count, _) in child.do("ledger").items()}
        last_seq = child.do("last_seq")
        self.router.wait_proven(
            worker,
            lambda row: row["seq"] == last_seq and {place: n for place, n in row["residency"].items() if n} == blocks,
        )
        return int(self.router.query(MODEL, worker, token_ids, None)["cpu"])

    def begin(self, source: int, receivers: Sequence[int], max_bytes: int = 1 << 40) -> None:
        """Begin a hand-over by the wire."""
        for share, receiver in enumerate(receivers):
            warm = Warm(7, HOST, self.ports[source], share, len(receivers), max_bytes, WAIT_S)
            assert isinstance(self.ask(receiver, warm), Warmed)

    def ask(self, receiver: int, request: HandOverRequest) -> Warmed:
        reply = ask_engines([HandOverMessage(HOST, self.ports[receiver], "", request)], WAIT_S, None)[0]
        assert isinstance(reply, Warmed), reply
        return reply

    def finish(self, receivers: Sequence[int]) -> list[Warmed]:
        """Wait until a hand-over has ended, and let each engine step once, as the patch would by waking it."""
        results = [self._until_over(receiver) for receiver in receivers]
        for receiver in receivers:
            self.engines[receiver].do("rest")
        return results

    def _until_over(self, receiver: int) -> Warmed:
        end_s = time.monotonic() + WAIT_S
        while time.monotonic() < end_s:
            warmed = self.ask(receiver, WarmQuery(7))
            if warmed.end:
                return warmed
            time.sleep(0.01)
        raise AssertionError("a hand-over does not end")
