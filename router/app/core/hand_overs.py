# SPDX-License-Identifier: Apache-2.0
"""Hand-overs: which workers take over the cache of another, and what their engines answer.

The router keeps nothing about a hand-over: the engines copy, bound it in bytes and time, and know its state by its number.
So every process can query it, and the end of a router ends none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from kvrouter.contract.hand_overs import HandOverPart
from kvrouter.events.patch.messages import PeerAddress
from kvrouter.events.peer.hand_over import HandOverReply, HandOverRequest, Refused, Warm, Warmed, WarmQuery, WarmStop
from kvrouter.events.peer.hand_over_client import HandOverMessage, ask_engines
from kvrouter.router.base.common.errors import Conflict, UnknownWorker
from kvrouter.router.base.common.escaping import printable
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.follow.fleet.worker_registry import WorkerRegistry
from kvrouter.router.follow.streams.follower import Follower
from kvrouter.router.model.kvcache.registered_peer import is_vllms
from kvrouter.router.model.workers.stream_state import StreamState

# Engines answer from a thread of their own, so two seconds are long even for one that is busy.
ANSWER_TIMEOUT_S = 2.0
UNREACHABLE = "unreachable"
# Reasons that one error names.
MAX_REASONS = 5
NO_PEER = "lends no blocks: its engine needs this project's offload tier, with peer_port"


class _Receiver(NamedTuple):
    """A worker to which messages of hand-overs are sent, and where its engine takes them."""

    worker: WorkerKey
    address: PeerAddress


class HandOvers:
    """The hand-overs of a fleet."""

    def __init__(self, registry: WorkerRegistry, secret: bytes | None, new_number: Callable[[], int]) -> None:
        """Start without doing anything.

        Args:
            registry: The workers.
            secret: The CURVE key by which engines that list their clients know this router; None without one.
            new_number: Returns a random number that a double-precision number can hold.
        """
        self._registry = registry
        self._secret = secret
        self._new_number = new_number

    async def begin(
        self,
        worker_id: str,
        dp_rank: int | None,
        model: str | None,
        to: Collection[str] | None,
        max_bytes: int,
        within_s: float,
    ) -> tuple[int, list[HandOverPart]]:
        """Have other workers take over what is worth most in a worker's cache, and return number and parts.

        Args:
            worker_id: The worker that hands over.
            dp_rank: Its rank; None: all.
            model: Its model; None: all.
            to: The workers that take over; None: all that can.
            max_bytes: Bytes to copy, divided among the receivers.
            within_s: Seconds after which it ends.

        Raises:
            UnknownWorker: There is no such worker.
            Conflict: No worker can take over; the text says why.
        """
        followers = self._registry.followers
        sources = [
            worker
            for worker in followers
            if worker.worker_id == worker_id and dp_rank in (None, worker.dp_rank) and model in (None, worker.model)
        ]
        if not sources:
            raise UnknownWorker(
                f"no worker {worker_id!r} of this rank and model is registered; GET /workers lists those that are"
            )
        number = self._new_number()
        parts: list[HandOverPart] = []
        warms: list[tuple[_Receiver, Warm]] = []
        reasons: list[str] = []
        candidates = {source: self._receivers(source, to, reasons) for source in sources}
        # The share of an engine that does not answer would be lost.
        receivers = [receiver for group in candidates.values() for receiver in group]
        answers = await self._ask([(receiver, WarmQuery(number)) for receiver in receivers])
        silent = {receiver.worker for receiver, answer in zip(receivers, answers, strict=True) if answer is None}
        for receiver in receivers:
            if receiver.worker in silent:
                parts.append(self._part(receiver.worker, None, receiver.address))
                reasons.append(f"{receiver.worker.route_name} {parts[-1].problem}")
        reachable = {
            source: [receiver for receiver in group if receiver.worker not in silent]
            for source, group in candidates.items()
        }
        num_receivers = sum(map(len, reachable.values()))
        if not num_receivers:
            raise Conflict(f"no worker can take over the cache of {printable(worker_id)}: {_joined(reasons)}")
        for source, group in reachable.items():
            address = _lending(followers[source]) if source in followers else None
            for share, receiver in enumerate(group if address is not None else ()):
                assert address is not None
                warm = Warm(
                    number, address.host, address.port, share, len(group), max(1, max_bytes // num_receivers), within_s
                )
                warms.append((receiver, warm))
        answers = await self._ask(warms)
        for (receiver, _), answer in zip(warms, answers, strict=True):
            parts.append(self._part(receiver.worker, answer, receiver.address))
        return number, parts

    async def progress(self, number: int) -> list[HandOverPart]:
        """Return the parts of a hand-over, of all workers that know it."""
        return await self._of_all(WarmQuery(number))

    async def stop(self, number: int) -> list[HandOverPart]:
        """End a hand-over at all workers that know it, and return its parts."""
        return await self._of_all(WarmStop(number))

    async def _of_all(self, request: WarmQuery | WarmStop) -> list[HandOverPart]:
        receivers = [
            _Receiver(worker, address)
            for worker, follower in self._registry.followers.items()
            if (address := _lending(follower)) is not None
        ]
        answers = await self._ask([(receiver, request) for receiver in receivers])
        return [
            self._part(receiver.worker, answer, receiver.address)
            for receiver, answer in zip(receivers, answers, strict=True)
            if isinstance(answer, Warmed)
        ]

    async def _ask(self, requests: Sequence[tuple[_Receiver, HandOverRequest]]) -> list[HandOverReply | None]:
        messages = [
            HandOverMessage(receiver.address.host, receiver.address.port, receiver.address.key, request)
            for receiver, request in requests
        ]
        return await asyncio.to_thread(ask_engines, messages, ANSWER_TIMEOUT_S, self._secret) if messages else []

    def _receivers(self, source: WorkerKey, to: Collection[str] | None, reasons: list[str]) -> list[_Receiver]:
        """Return the workers that can take over from one worker, and add to `reasons` why others cannot."""
        address = _lending(self._registry.followers[source])
        if address is None:
            reasons.append(f"{source.route_name} {NO_PEER}")
            return []
        receivers: list[_Receiver] = []
        for worker, follower in self._registry.followers.items():
            if worker.model != source.model or worker.worker_id == source.worker_id:
                continue
            if to is not None and worker.worker_id not in to:
                continue
            problem, own_address = self._problem(worker, address), _lending(follower)
            if problem is not None or own_address is None:
                reasons.append(f"{worker.route_name} {problem}")
            else:
                receivers.append(_Receiver(worker, own_address))
        for name in () if to is None else sorted(set(to) - {worker.worker_id for worker in self._registry.followers}):
            reasons.append(f"{printable(name)} is not registered")
        if not receivers and not reasons:
            reasons.append(f"{source.route_name} is the only worker of its model")
        return receivers

    def _problem(self, worker: WorkerKey, source: PeerAddress) -> str | None:
        """Return why a worker cannot take over from the engine at `source`, or None if it can."""
        follower = self._registry.followers[worker]
        view, address = follower.state.view, _lending(follower)
        if self._registry.drains(worker):
            return "drains"
        if view.state is not StreamState.LIVE:
            return f"is {view.state.value}"
        if address is None:
            return NO_PEER
        if address.exchange != source.exchange:
            return "has another cache layout, other model files or another hash seed, or is on another machine without keys"
        if address.resets != source.resets:
            return f"was reset {address.resets} times, but the worker that hands over {source.resets} times"
        return None

    def _part(self, worker: WorkerKey, answer: HandOverReply | None, address: PeerAddress) -> HandOverPart:
        name = self._registry.given_id(worker)
        if isinstance(answer, Warmed):
            return HandOverPart(
                worker_id=name,
                dp_rank=worker.dp_rank,
                model=worker.model,
                end=answer.end,
                offered=answer.offered,
                fetched=answer.fetched,
                fetched_bytes=answer.fetched_bytes,
                present=answer.present,
                missed=answer.missed,
                evicted=answer.evicted,
            )
        end = UNREACHABLE
        problem = (
            f"does not answer at {address.host}:{address.port}: let the router reach peer_port, and with keys list the "
            "router's public key (curve_client_key) in peer_list_file"
        )
        if isinstance(answer, Refused):
            end, problem = printable(answer.reason), f"refuses: {printable(answer.detail)}"
        return HandOverPart(worker_id=name, dp_rank=worker.dp_rank, model=worker.model, end=end, problem=problem)


def _lending(follower: Follower) -> PeerAddress | None:
    """Return where a worker's engine takes the messages of hand-overs, or None if it takes none."""
    address = follower.state.view.peer
    return None if address is None or is_vllms(address) else address


def _joined(reasons: Sequence[str]) -> str:
    left = len(reasons) - MAX_REASONS
    return "; ".join(reasons[:MAX_REASONS]) + (f"; and {left} more" if left > 0 else "")
