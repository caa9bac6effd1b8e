# SPDX-License-Identifier: Apache-2.0
"""The check whether a worker refuses (4xx) more of its requests than its peers, the other workers of its model. Pure.

A 4xx is the client's fault only if every worker would give it. An engine that refuses more than its peers usually has
other flags or another version: a shorter context, no tools, fewer adapters, another key. But the router may also send
all wrong requests of one client to one worker, because they have one session or begin alike. Therefore refusals of one
client alone, or of clients that cannot be distinguished, are reported as a difference without a known cause.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable

import msgspec

from kvrouter.router.base.common.ids import WorkerKey

# How many answers of a worker count, and for how long: a fault that an operator has repaired should not be reported for
# much longer.
WINDOW = 128
WINDOW_S = 600.0
# A worker is judged only if it has at least this many answers, and its peers together have as many.
COUNTED_MIN = 32
# A worker differs if it refuses at least a tenth of its requests, and at least four times the share that its peers
# refuse. A smaller difference is not worth an operator's time.
SHARE_MIN = 0.1
RATIO = 4.0
# The worker's refusals must also be less probable than this under the assumption that all workers refuse alike. The
# check is repeated with new answers, so a usual level of significance would report healthy fleets within hours.
CHANCE_MAX = 1e-6

# Refusals are those of several clients if no client has more than this share of them.
CLIENT_SHARE_MAX = 0.5

# The first status that is the client's error, and the first that is the worker's.
FIRST_ERROR, FIRST_SERVER_ERROR = 400, 500


class AnswerCount(msgspec.Struct, frozen=True):
    """The answers of one worker, or of several together, within the window."""

    answers: int
    # The number of answers with a status of 400 to 499.
    refused: int

    def __add__(self, other: AnswerCount) -> AnswerCount:
        return AnswerCount(self.answers + other.answers, self.refused + other.refused)

    def __sub__(self, other: AnswerCount) -> AnswerCount:
        return AnswerCount(self.answers - other.answers, self.refused - other.refused)


NO_ANSWERS = AnswerCount(0, 0)


def differs(own: AnswerCount, peers: AnswerCount) -> bool:
    """Return whether a worker refuses so much more than its peers that neither chance nor their clients explain it."""
    if min(own.answers, peers.answers) < COUNTED_MIN:
        return False
    # The peers are assumed to have refused one request more, so that their share is never zero.
    usual_share = (peers.refused + 1) / (peers.answers + 1)
    own_share = own.refused / own.answers
    return own_share >= max(SHARE_MIN, RATIO * usual_share) and _chance(own, usual_share) < CHANCE_MAX


def _chance(own: AnswerCount, share: float) -> float:
    """Return the probability of this number of refusals or more if each request is refused with probability `share`."""
    n = own.answers
    return math.fsum(math.comb(n, k) * share**k * (1 - share) ** (n - k) for k in range(own.refused, n + 1))


class Difference(msgspec.Struct, frozen=True):
    """The difference between a worker that refuses more requests and its peers."""

    evidence: str
    # Whether the refused requests came from several clients, so that no single one of them explains the difference.
    is_spread: bool


class _Window:
    """The last answers of one worker: when each came, its status, and the client if it is a refusal."""

    def __init__(self) -> None:
        self._answers: deque[tuple[float, int, int]] = deque()
        self._refused: Counter[int] = Counter()

    def add(self, now_s: float, status: int, caller: Callable[[], int]) -> None:
        is_refusal = _is_refusal(status)
        self._answers.append((now_s, status, caller() if is_refusal else 0))
        if is_refusal:
            self._refused[status] += 1
        if len(self._answers) > WINDOW:
            self._drop()

    def count(self, now_s: float) -> AnswerCount:
        while self._answers and self._answers[0][0] < now_s - WINDOW_S:
            self._drop()
        return AnswerCount(len(self._answers), self._refused.total())

    def _drop(self) -> None:
        _, status, _ = self._answers.popleft()
        if _is_refusal(status):
            self._refused[status] -= 1

    def usual_status(self) -> int:
        """Return the most frequent status among the refusals, of which there must be one."""
        return self._refused.most_common(1)[0][0]

    def usual_client(self) -> tuple[int, int]:
        """Return the client with the most refusals, 0 if it is not known, and their number. There must be a refusal."""
        callers = Counter(caller for _, status, caller in self._answers if _is_refusal(status))
        # Any of the requests without a key and a session may be of the same client as the others.
        unknown = callers.pop(0, 0)
        caller, count = max(callers.items(), key=lambda item: item[1], default=(0, 0))
        return (0, unknown) if unknown > count else (caller, count + unknown)


def _is_refusal(status: int) -> bool:
    return FIRST_ERROR <= status < FIRST_SERVER_ERROR


class RefusedRequests:
    """The last answers of every worker."""

    def __init__(self, clock: Callable[[], float]) -> None:
        # Returns monotonic seconds.
        self._clock = clock
        self._windows: dict[WorkerKey, _Window] = {}

    def add(self, worker: WorkerKey, status: int, caller: Callable[[], int]) -> None:
        """Count a complete answer. `caller` returns a number for the client, 0 if it is not known."""
        window = self._windows.get(worker)
        if window is None:
            window = self._windows[worker] = _Window()
        window.add(self._clock(), status, caller)

    def forget(self, worker: WorkerKey) -> None:
        """Forget the answers of a worker that is gone, or whose engine may have been restarted."""
        self._windows.pop(worker, None)

    def problems(self) -> dict[WorkerKey, Difference]:
        """Return the difference of each worker that refuses more than its peers."""
        now_s = self._clock()
        counts = {worker: window.count(now_s) for worker, window in self._windows.items()}
        of_model: dict[str, AnswerCount] = {}
        for worker, count in counts.items():
            of_model[worker.model] = of_model.get(worker.model, NO_ANSWERS) + count
        problems = {}
        for worker, own in counts.items():
            peers = of_model[worker.model] - own
            if differs(own, peers):
                window = self._windows[worker]
                client, client_refused = window.usual_client()
                is_spread = client_refused <= CLIENT_SHARE_MAX * own.refused
                doubt = f"; up to {client_refused} of them came from one client, whose requests may be wrong rather than the worker"
                if not client:
                    doubt = (
                        "; whether they came from one client cannot be seen, as they have neither API key nor session"
                    )
                evidence = (
                    f"it refused {own.refused} of its last {own.answers} requests (mostly with {window.usual_status()}), "
                    f"and its peers {peers.refused} of {peers.answers}{'' if is_spread else doubt}"
                )
                problems[worker] = Difference(evidence, is_spread)
        return problems
