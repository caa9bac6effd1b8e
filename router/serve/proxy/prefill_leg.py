# SPDX-License-Identifier: Apache-2.0
"""Has the chosen prefill worker compute a prompt, and turns its answer into the decode worker's request.

Whatever goes wrong there, the decode worker can compute the prompt itself: nothing is lost but time. So a failure here
is never the client's, as long as the client is there. A request that an engine may have started is not sent to a second
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
from kvrouter.router.serve.proxy.admission import FIRST_SERVER_ERROR
from kvrouter.router.serve.proxy.attempt import Attempt, named
from kvrouter.router.serve.proxy.attempts import GONE_STATUSES
from kvrouter.router.serve.proxy.kv_transfer_params import MAX_ANSWER_BYTES, decode_body, given_params, prefill_body
from kvrouter.router.serve.proxy.proxy_metrics import ProxyMetrics
from kvrouter.router.serve.proxy.request_reader import Request
from kvrouter.router.serve.proxy.worker_addresses import Addresses

OK = 200
# An outcome, as the metrics name it.
FAILED = "failed"
NOTHING_GIVEN = "its answers to prefills have no kv_transfer_params: start the engine with --kv-transfer-config"


class Given(NamedTuple):
    """What the decode worker is sent. headers: besides the client's."""

    body: bytes
    headers: h.Headers


class _Declined(Exception):
    """The prefill worker answered, and hands nothing over. outcome: as the metrics name it."""

    def __init__(self, outcome: str) -> None:
        super().__init__(outcome)
        self.outcome = outcome


class PrefillLeg:
    """The first of two requests. Belongs to one loop."""

    def __init__(self, sending: Attempt, metrics: ProxyMetrics) -> None:
        self._sending = sending
        self._metrics = metrics

    async def hand_over(
        self,
        request: Request,
        ask: PlacementRequest,
        placement: Placement,
        addresses: Addresses,
        failed: set[WorkerKey],
    ) -> Given:
        """For the placement's worker. failed: workers to leave out; those that fail are added. Raises Spent."""
        while (part := placement.prefill) is not None:
            if part.worker not in addresses.targets:
                failed.add(part.worker)
                placement.prefill_failed(excluding(ask, failed))
                continue
            if placement.worker in addresses.by_header:
                # Its sidecar calls the prefill worker; the load there ends with the first token.
                self._count("named")
                where = addresses.targets[part.worker].host_port
                return Given(request.body, [(h.PREFILLER, where)])
            try:
                params = await self._prefill(request, part)
            except Failure as failure:
                self._count(FAILED)
                failed |= addresses.sharing(part.worker)
                again = request.attempts.prefill_failed(named(part.worker), failure)
                placement.prefill_failed(excluding(ask, failed) if again else None)
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
        """The prefill worker's word of where the blocks are. Raises Failure, _Declined."""
        # Its answer is read here.
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
        params = given_params(bytes(answer)) if status == OK else None
        if params is None and status == OK:
            sent.exchange.spoiled(NOTHING_GIVEN)
        self._sending.give_back(sent)
        if status in GONE_STATUSES:
            gone = Failure(Kind.GONE, f"the engine answers {status}")
            self._sending.count(part.worker, gone)
            request.watch.failed(gone.kind.value, gone.text)
            raise gone
        if status != OK:
            # Most likely the client's error; the decode worker will report it.
            raise _Declined("refused" if status < FIRST_SERVER_ERROR else FAILED)
        if params is None:
            raise _Declined("declined")
        return params

    def _count(self, outcome: str) -> None:
        self._metrics.handovers[outcome].inc()


def excluding(ask: PlacementRequest, workers: Iterable[WorkerKey]) -> PlacementRequest:
    """The same, but for these workers."""
    excluded = ask.question.exclude_workers.union(workers)
    return msgspec.structs.replace(ask, question=msgspec.structs.replace(ask.question, exclude_workers=excluded))
