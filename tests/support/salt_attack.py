# SPDX-License-Identifier: Apache-2.0
"""An attack on the privacy of prompts: one tenant guesses which of two prompts another tenant has sent.

The router's API, guard, proxy, placer and matcher are real. Two simulated replicas answer the proxy, and their events go
into the mirror before the next request. The attacker sees every byte of each answer but not its
time; for `benchmarks/salt_timing.py`, it sees only the time.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import uvloop

from kvrouter.router.app.server.router_metrics import RouterMetrics
from kvrouter.router.base.common.ids import GPU, Place, WorkerKey
from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.follow.feed.watch_metrics import WatchMetrics
from kvrouter.router.index.matching.matcher import HashPlans, HitTable, Matcher, WorkerView
from kvrouter.router.index.matching.mirror import Mirror
from kvrouter.router.index.matching.question import Hit, Question
from kvrouter.router.model.config.live_settings import LiveSettings
from kvrouter.router.model.config.settings import Config
from kvrouter.router.model.kvcache.block_hash import HashScheme
from kvrouter.router.model.kvcache.catalog import Group, build_catalog
from kvrouter.router.model.kvcache.prompt_hasher import SegmentMemory
from kvrouter.router.model.upstream.pool import Pool
from kvrouter.router.model.workers.allow_list import AllowList
from kvrouter.router.model.workers.engine_key import EngineKey
from kvrouter.router.model.workers.registration import CatalogSpec, Registration
from kvrouter.router.model.workers.stream_state import StreamState
from kvrouter.router.observe.decisions.decision_log import DecisionLog
from kvrouter.router.observe.decisions.watch import Watch
from kvrouter.router.observe.history.history_keeper import HistoryKeeper
from kvrouter.router.observe.quality.request_watch import Quality
from kvrouter.router.route.owners.response_owners import EngineSign, ResponseOwners
from kvrouter.router.route.placement.placer import Placer
from kvrouter.router.route.tokens.client_body import ClientBody
from kvrouter.router.route.tokens.prompt_tokens import Prompt
from kvrouter.router.serve.access.access import Access
from kvrouter.router.serve.api.http.fastapi_app import build_api
from kvrouter.router.serve.api.scopes import SCOPES
from kvrouter.router.serve.proxy.admission import Admission
from kvrouter.router.serve.proxy.proxy import Proxy
from kvrouter.simulator.cache.pool import Removed, Stored
from kvrouter.simulator.cache.shapes import llama
from kvrouter.simulator.engine.replica import Replica
from tests.contract.api_support import Answer, TinyCore, ask_app
from tests.support.bare_services import bare_feed
from tests.support.scripted_engine import Asked, ScriptedEngine, Wire, plain

MODEL = "m"
BLOCK_TOKENS = 16
PROMPT_TOKENS = 5 * BLOCK_TOKENS
# Blocks of each replica: it evicts, so that a long attack does not grow.
POOL_BLOCKS = 2_000
MIRROR_BYTES = 64 * 1024**2
VICTIM, ATTACKER = "victim", "attacker"
SECRET = "a-secret-that-is-long-enough-for-HMAC-SHA256"
# The paths by which a prompt reaches an engine.
PROXIED = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate")
ASKING = ("/query", "/query_by_hash", "/select", "/select_and_reserve", "/reservations")
RESERVING = ("/select_and_reserve", "/reservations")
# Other paths that a key may send prompts to; no engine here has them, or ignores salts there.
OTHERS = ("/generate", "/v1/embeddings", "/pooling", "/tokenize", "/v1/audio/speech")
READABLE = tuple(
    path for (method, path) in SCOPES if method == "GET" and "{" not in path and not path.startswith("/v1/responses")
)
# How many of 100 trials are about a path with a prompt. The answers of the others hardly change.
SHARE_WITH_PROMPT = 88


def words_of(body: Mapping[str, Any]) -> list[int]:
    """Return the token ids of a body on any of the paths."""
    for name in ("token_ids", "prompt", "input_ids"):
        if isinstance(body.get(name), list):
            return [int(token) for token in body[name]]
    text = body.get("input") or body["messages"][0]["content"]
    return [int(word) for word in text.split()]


def body_of(path: str, ids: list[int]) -> dict[str, Any]:
    """Return a body with this prompt for a path."""
    text = " ".join(map(str, ids))
    if path == "/query_by_hash":
        return {"model": MODEL, "block_hashes": [hash(tuple(ids)) & (2**63 - 1)]}
    if path in ("/v1/chat/completions", "/v1/messages"):
        return {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": text}]}
    if path in ("/v1/responses", "/v1/embeddings", "/pooling", "/v1/audio/speech"):
        return {"model": MODEL, "input": text}
    if path in ("/inference/v1/generate", *ASKING):
        return {"model": MODEL, "token_ids": ids} | ({"worker_id": "w0"} if path == "/reservations" else {})
    return {"model": MODEL, "prompt": ids, "max_tokens": 1}


class Words:
    """Tokens of texts whose words are numbers."""

    async def prompt(self, path: str, model: str, body: ClientBody, **more: Any) -> Prompt:
        ids = words_of(json.loads(body.raw))
        return Prompt(len(ids), np.array(ids, np.int64), "given")

    def status(self, model: str, url: str | None) -> Any:
        raise NotImplementedError

    def health(self) -> list[str]:
        return []


class SimulatedWorker:
    """A simulated replica behind HTTP, with its part of the mirror."""

    def __init__(self, key: WorkerKey, mirror: Mirror, token_s: float = 0.0) -> None:
        """Begin with an empty cache. `token_s` is the time to compute a token that is not cached."""
        self.key = key
        self._token_s = token_s
        self._mirror = mirror
        self._events: list[Any] = []
        self._replica = Replica(llama(BLOCK_TOKENS), POOL_BLOCKS, on_step=self._events.extend)
        self.server = ScriptedEngine(self.answer)
        mirror.begin_epoch(key, "e")

    def compute(self, ids: list[int], cache_salt: str | None) -> int:
        """Compute a prompt, and return how many of its tokens were reused."""
        return self._replica.run(ids, cache_salt=cache_salt).reused_tokens

    def publish(self) -> None:
        """Apply the events since the last call to the mirror."""
        place = Place(0, GPU)
        for event in self._events:
            if isinstance(event, Stored):
                self._mirror.add(self.key, place, shorts(list(event.hashes)))
            elif isinstance(event, Removed):
                self._mirror.discard(self.key, place, shorts([event.key.block_hash]))
        self._events.clear()

    async def answer(self, asked: Asked, wire: Wire) -> None:
        """Answer as an engine that honours `cache_salt`."""
        body = json.loads(asked.body)
        if asked.target not in PROXIED:
            await plain(b'{"ok": true}')(asked, wire)
            return
        ids = words_of(body)
        cached = self.compute(ids, body.get("cache_salt"))
        if self._token_s:
            await asyncio.sleep((len(ids) - cached) * self._token_s)
        counts = {"prompt_tokens": len(ids), "input_tokens": len(ids), "completion_tokens": 1, "output_tokens": 1}
        details = {"prompt_tokens_details": {"cached_tokens": cached}, "cache_read_input_tokens": cached}
        await plain(json.dumps({"object": "answer", "usage": counts | details}).encode())(asked, wire)


def shorts(hashes: list[bytes]) -> Any:
    """Return the short forms of block hashes, as events have them."""
    return np.array([int.from_bytes(block_hash[-8:], "big") for block_hash in hashes], np.uint64)


class MirroredCore(TinyCore):
    """A core whose hits come from the real matcher over a mirror."""

    def __init__(self, workers: list[SimulatedWorker], mirror: Mirror) -> None:
        super().__init__()
        self._matcher = Matcher(mirror, SegmentMemory(1 << 20))
        self._mirror = mirror
        self._plans: tuple[int, HashPlans] | None = None
        self.registered = {worker.key: Registration(worker.key, url=worker.server.url) for worker in workers}
        catalog = build_catalog((Group(0, "full_attention", BLOCK_TOKENS),), "learned", CatalogSpec())
        scheme = HashScheme.default()
        self._views = [
            WorkerView(worker.key, worker.server.url, StreamState.LIVE, True, "", "e", catalog, scheme, {})
            for worker in workers
        ]

    def plans(self) -> HashPlans:
        if self._plans is None or self._plans[0] != self._mirror.version:
            self._plans = self._mirror.version, HashPlans.build(self._mirror, self._views)
        return self._plans[1]

    def ask(self, question: Question) -> list[Hit]:
        return self._matcher.match(question, self.plans())

    def hit_table(self, question: Question) -> HitTable | None:  # type: ignore[override]
        return self._matcher.table(question, self.plans())

    def url(self, worker: WorkerKey) -> str | None:
        return self.registered[worker].url


class Reply(NamedTuple):
    """The parts of an answer that an attacker compares, by name."""

    features: dict[str, str | float]

    @classmethod
    def of(cls, answer: Answer) -> Reply:
        features: dict[str, str | float] = {"status": float(answer.status)}
        features |= {f"header {name}": value for name, value in answer.headers.items() if name != "date"}
        try:
            features |= dict(_leaves("body", json.loads(answer.body)))
        except ValueError:
            features["body"] = answer.body.decode("latin-1")
        return cls(features)


def _leaves(path: str, value: Any) -> Iterator[tuple[str, str | float]]:
    """Yield the numbers and texts of a JSON value with their paths."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _leaves(f"{path}.{name}", part)
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from _leaves(f"{path}[{number}]", part)
    elif isinstance(value, int | float):
        yield path, float(value)
    elif value is not None:
        yield path, str(value)


def differences(first: Reply, second: Reply) -> dict[str, int]:
    """Return for each feature whether it is greater in the first reply (1) or in the second (-1)."""
    signs = {}
    for name in first.features.keys() | second.features.keys():
        one, other = first.features.get(name, ""), second.features.get(name, "")
        if type(one) is not type(other):
            one, other = str(one), str(other)
        if one != other:
            signs[name] = 1 if one > other else -1  # type: ignore[operator]
    return signs


class Guesser:
    """The attacker's knowledge of one endpoint: how strongly each feature speaks for the first prompt."""

    def __init__(self) -> None:
        self._scores: dict[str, int] = defaultdict(int)

    def learn(self, signs: Mapping[str, int], sent: int) -> None:
        for name, sign in signs.items():
            self._scores[name] += sign if sent == 0 else -sign

    def guess(self, signs: Mapping[str, int], rng: random.Random) -> int:
        """Return which prompt the victim has sent, by the feature that has been the best guide so far."""
        known = [name for name in signs if self._scores.get(name)]
        if not known:
            return rng.randrange(2)
        best = max(known, key=lambda name: abs(self._scores[name]))
        return 0 if signs[best] * self._scores[best] > 0 else 1


class Outcome(NamedTuple):
    """The trials of an attack after its training, and the right guesses, by endpoint."""

    trials: dict[str, int]
    right: dict[str, int]
    statuses: dict[str, set[int]]

    @property
    def total(self) -> tuple[int, int]:
        return sum(self.trials.values()), sum(self.right.values())


def sigmas(trials: int, right: int) -> float:
    """Return by how many standard deviations the guesses are better than those of a coin."""
    return float((right - trials / 2) / (trials**0.5 / 2))


async def attack(
    folder: Path, trials: int, seed: int, *, makes_salts: bool, timed: Sequence[str] = (), token_s: float = 0.0
) -> Outcome:
    """Attack a new router, and return the outcome of the second half of the trials; the first half is for learning.

    Args:
        folder: Where the router's files are written.
        trials: The number of trials.
        seed: Decides about prompts and paths.
        makes_salts: Whether the router makes salts.
        timed: Paths whose answers are timed instead of read.
        token_s: As in `SimulatedWorker`.
    """
    rng = random.Random(seed)
    lines = [f"- {{name: {name}, scopes: [ask], key: the-key-of-the-{name}}}" for name in (VICTIM, ATTACKER)]
    (folder / "keys.yaml").write_text("\n".join(["keys:", *lines]))
    (folder / "secret").write_text(SECRET)
    settings: dict[str, Any] = {"api_keys_file": str(folder / "keys.yaml"), "decisions_kept": 100}
    if makes_salts:
        settings["cache_salt_secret_file"] = str(folder / "secret")
    with ExitStack() as stack:
        mirror = Mirror(MIRROR_BYTES)
        workers = [SimulatedWorker(WorkerKey(MODEL, f"w{number}"), mirror, token_s) for number in range(2)]
        for worker in workers:
            stack.enter_context(worker.server)
        app, close = _router(MirroredCore(workers, mirror), Config(**settings))
        stack.callback(close)

        async def send(name: str, path: str, body: Any = None, **headers: str) -> Answer:
            headers = {"authorization": f"Bearer the-key-of-the-{name}", **headers}
            raw = b"" if body is None else json.dumps(body).encode()
            answer = await ask_app(app, "GET" if body is None else "POST", path, raw, headers=headers)
            if path in RESERVING and answer.status < 300:
                # The load of a long attack would fill the queue.
                ended = f"/reservations/{answer.json()['selection_id']}"
                assert (await ask_app(app, "DELETE", ended, headers=headers)).status == 200
            for worker in workers:
                worker.publish()
            return answer

        guessers: dict[str, Guesser] = defaultdict(Guesser)
        outcome = Outcome(defaultdict(int), defaultdict(int), defaultdict(set))
        for trial in range(trials):
            prompts = [[rng.randrange(1, 30_000) for _ in range(PROMPT_TOKENS)] for _ in range(2)]
            sent = rng.randrange(2)
            with_prompt = rng.randrange(100) < SHARE_WITH_PROMPT
            path = rng.choice(timed or ((*PROXIED, *ASKING) if with_prompt else (*OTHERS, *READABLE)))
            before = None if path not in READABLE else Reply.of(await send(ATTACKER, path))
            way = rng.choice(PROXIED)
            assert (await send(VICTIM, way, body_of(way, prompts[sent]), **{"x-session-id": "s"})).status == 200
            if before is not None:
                answer = await send(ATTACKER, path)
                outcome.statuses[path].add(answer.status)
                signs = differences(before, Reply.of(answer))
            else:
                # The attacker tries the victim's session, a fixed worker, and salts that it can think of.
                headers = rng.choice(({}, {"x-session-id": "s"}, {"x-kvrouter-worker": "w0"}))
                more = rng.choice(({}, {"explain": True}, {"cache_salt": VICTIM}, {"held": True, "session_id": "s"}))
                if not makes_salts:
                    more.pop("cache_salt", None)
                replies, times_s = [], []
                for prompt in prompts:
                    began_s = time.perf_counter()
                    answer = await send(ATTACKER, path, body_of(path, prompt) | more, **headers)
                    times_s.append(time.perf_counter() - began_s)
                    outcome.statuses[path].add(answer.status)
                    replies.append(Reply.of(answer))
                signs = {"time": 1 if times_s[0] > times_s[1] else -1} if timed else differences(*replies)
            guess = guessers[path].guess(signs, rng)
            guessers[path].learn(signs, sent)
            if trial >= trials // 2:
                outcome.trials[path] += 1
                outcome.right[path] += guess == sent
    return outcome


def run_attack(folder: Path, trials: int, seed: int, *, makes_salts: bool, **options: Any) -> Outcome:
    """Run `attack` in a loop of its own, on the event loop that the router has."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(attack(folder, trials, seed, makes_salts=makes_salts, **options))


def _router(core: MirroredCore, config: Config) -> tuple[Any, Any]:
    """Return the router's HTTP API with its proxy, and the function that closes both."""
    registry = MetricRegistry()
    metrics, tokens = RouterMetrics(registry), Words()
    feed = bare_feed(lambda: 0.0)
    decisions = DecisionLog(config.decisions_kept, feed, time.time, WatchMetrics(MetricRegistry()))
    ids = (f"s{number}" for number in itertools.count())
    allowed = AllowList(config.allow_hosts)
    admission = Admission(core.is_draining, time.monotonic, metrics.proxy)
    placer = Placer(
        core,
        record=decisions.record,
        config=config,
        metrics=metrics.placement,
        clock=time.monotonic,
        rng=random.Random(0),
        new_id=lambda: next(ids),
    )
    pool = Pool(asyncio.get_running_loop(), allowed)
    proxy = Proxy(
        placer=placer,
        tokens=tokens,
        resolve=core.resolve,
        registrations=_same(core.registrations()),
        ranks=_same({}),
        admission=admission,
        pool=pool,
        metrics=metrics.proxy,
        quality=Quality(metrics.quality, time.monotonic),
        owners=ResponseOwners(metrics.owners, time.monotonic, engine=lambda worker: EngineSign(False, None)),
        allowed=allowed,
        silence_s=30.0,
        engine_key=EngineKey(None, allowed, core.registrations),
        has_own_key=True,
    )
    access = Access(LiveSettings(config), metrics.http.access, clock=time.monotonic, wall_clock=time.time)
    history = HistoryKeeper(placer.traffic, writer="test", clock=time.monotonic, wall_clock=time.time)
    app = build_api(
        core,
        placer,
        config,
        metrics.http,
        time.perf_counter,
        tokens,
        proxy,
        watch=Watch(feed, decisions),
        access=access,
        history=history,
    )
    return app, proxy.close


def _same(value: Any) -> Any:
    return lambda: value
