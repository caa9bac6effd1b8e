# SPDX-License-Identifier: Apache-2.0
"""The first half of a split request: a prefill worker computes the prompt for the decode worker.

Whatever fails there, the decode worker can compute the prompt itself, and only time is lost. Therefore a failure here
never reaches the client while it is connected. A request that one engine may have started is not sent to a second
prefill worker; one that two engines may have started is not sent again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

import kvrouter.router.serve.proxy.headers as h
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.model.upstream.failure import Failure, Kind
from kvrouter.router.route.placement.placement_request import Placement, PlacementRequest, PrefillPart
from kvrouter.router.serve.proxy.attempt import Attempt, named
from kvrouter.router.serve.proxy.attempts import GONE_STATUSES
from kvrouter.router.serve.proxy.kv_transfer_params import (
    MAX_ANSWER_BYTES,
    NothingGiven,
    decode_body,
    given_params,
    prefill_body,
)
from kvrouter.router.serve.proxy.proxy_metrics import ProxyMetrics
from kvrouter.router.serve.proxy.refused_requests import FIRST_SERVER_ERROR
from kvrouter.router.serve.proxy.request_reader import Request
from kvrouter.router.serve.proxy.worker_addresses import Addresses

OK = 200
# Outcomes in `ProxyMetrics.handovers`.
FAILED = "failed"
DECLINED = "declined"
ABORTED = "aborted"
NOTHING_GIVEN = "its answers to prefills have no kv_transfer_params: start the engine with --kv-transfer-config"
GAVE_UP = 'it gives up prompts that it is to compute for others (finish_reason "abort"): the engine\'s log says why'


class Given(NamedTuple):
    """The request for the decode worker."""

    body: bytes
    # Headers to send besides the client's.
    headers: h.Headers


class _Declined(Exception):
    """The error that the prefill worker answered but handed nothing over.

    `outcome` is the outcome for the metrics.
    """

    def __init__(self, outcome: str) -> None:
        super().__init__(outcome)
        self.outcome = outcome


class PrefillLeg:
    """The sender of requests to prefill workers. Belongs to one event loop."""

    def __init__(self, sending: Attempt, metrics: ProxyMetrics) -> None:
        self._sending = sending
        self._metrics = metrics

    async def hand_over(
        self,
        request: Request,
        placement_request: PlacementRequest,
        placement: Placement,
        addresses: Addresses,
        failed: set[WorkerKey],
    ) -> Given:
        """Have the placement's prefill worker compute the prompt, and return the request for the decode worker.

        If a prefill worker fails, another one may take its place; if none is left, the decode worker gets the client's
        request unchanged. Raises AttemptsSpent if the request must not be sent again.

        Args:
            request: The request of the client.
            placement_request: The placed request, from which another prefill worker is chosen.
            placement: The placement whose prefill worker is used. It is notified of successes and failures.
            addresses: The addresses of the workers.
            failed: The workers to leave out; workers that fail are added.
        """
        while (part := placement.prefill) is not None:
            if part.worker not in addresses.targets:
                failed.add(part.worker)
                placement.prefill_failed(excluding(placement_request, failed))
                continue
            if placement.worker in addresses.by_header:
                # The decode worker's sidecar calls the prefill worker; the load there ends with the first token.
                self._count("named")
                host_port = addresses.targets[part.worker].host_port
                return Given(request.body, [(h.PREFILLER, host_port)])
            try:
                params = await self._prefill(request, part)
            except Failure as failure:
                self._count(FAILED)
                failed |= addresses.sharing(part.worker)
                may_try_another = request.attempts.prefill_failed(named(part.worker), failure)
                placement.prefill_failed(excluding(placement_request, failed) if may_try_another else None)
            except _Declined as declined:
                self._count(declined.outcome)
                failed.add(part.worker)
                if declined.outcome == FAILED:
                    # vLLM's server answers 500 when its engine's core died.
                    request.attempts.prefill_broke(Failure(Kind.GONE, "the prefill worker answers with an error"))
                placement.prefill_failed(None)
            else:
                self._count("done")
                placement.handed_over()
                return Given(decode_body(request.body, params), [])
        return Given(request.body, [])

    async def _prefill(self, request: Request, part: PrefillPart) -> msgspec.Raw:
        """Send the prompt to the prefill worker and return its `kv_transfer_params`.

        Raises Failure if the worker does not answer, and _Declined if it answers without them.
        """
        # The router reads this answer itself, so the worker must not compress it.
        headers = [(name, value) for name, value in request.headers if name != b"accept-encoding"]
        sent = await self._sending.send(request, part.worker, prefill_body(request.body), headers)
        connection, status = sent.connection, sent.head.status
        answer = bytearray()

        def take(parts: list[bytes]) -> None:
            for piece in parts:
                answer.extend(piece)
            if len(answer) > MAX_ANSWER_BYTES:
                connection.close()

        try:
            await connection.relay(take)
        except Failure as failure:
            self._sending.break_off(part.worker, sent, failure)
            request.watch.failed(failure.kind.value, failure.text)
            raise
        except BaseException:
            self._sending.give_up(sent)
            raise
        params: msgspec.Raw | None = None
        reason = DECLINED
        if status == OK:
            try:
                params = given_params(bytes(answer))
            except NothingGiven as nothing:
                reason = ABORTED if nothing.aborted else DECLINED
                sent.exchange.spoiled(GAVE_UP if nothing.aborted else NOTHING_GIVEN)
        self._sending.give_back(sent)
        if status in GONE_STATUSES:
            gone = Failure(Kind.GONE, f"the engine answers {status}")
            self._sending.count(part.worker, gone)
            request.watch.failed(gone.kind.value, gone.text)
            raise gone
        if status != OK:
            # The error is most likely the client's; the decode worker will report it.
            raise _Declined("refused" if status < FIRST_SERVER_ERROR else FAILED)
        if params is None:
            raise _Declined(reason)
        return params

    def _count(self, outcome: str) -> None:
        self._metrics.handovers[outcome].inc()


def excluding(request: PlacementRequest, workers: Iterable[WorkerKey]) -> PlacementRequest:
    """Return a copy of the request that also excludes these workers."""
    excluded = request.question.exclude_workers.union(workers)
    return msgspec.structs.replace(
        request, question=msgspec.structs.replace(request.question, exclude_workers=excluded)
    )
