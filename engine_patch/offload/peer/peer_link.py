# SPDX-License-Identifier: Apache-2.0
"""The reader's side of one source: its questions, its loans and its transfers. No thread, no clock of its own.

Every pulled chunk has exactly one outcome, and not before NIXL has stopped writing to its slot. A probe has one outcome,
too. If a transfer is overdue, the link is stalled: it gets no new work until that transfer has ended, so that a source
that hangs can hold the slots of one batch at most.

A method may raise whatever NIXL or ZMQ raise. Then the caller calls `fail`, and no job is without its outcome.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from kvrouter.engine_patch.offload.key import OffloadKey
from kvrouter.engine_patch.offload.peer.data_plane import Copy, DataPlane, PlaneError
from kvrouter.engine_patch.offload.peer.lender import MISS_OF_NO_SLOT, PeerFacts
from kvrouter.engine_patch.offload.peer.peer_miss import PeerMiss, miss_of
from kvrouter.engine_patch.offload.peer.peer_wire import (
    MAX_KEYS,
    VERSION,
    Borrow,
    Hello,
    Lent,
    Offer,
    Offered,
    Present,
    Probe,
    Return,
    ToReader,
    ToSource,
    Unknown,
    Welcome,
)
from kvrouter.events.peer.hand_over import Refused

# Bytes that one call hands to NIXL. Within one machine NIXL copies in the call itself (10 GB/s measured); a call costs as
# much as 1 MB.
PIECE_BYTES = 16 << 20
# Pieces under way at once, so that the network is never idle between two of them, and pieces that wait for their check.
MAX_PIECES = 2
# Bytes of the first loan of a pull. Each further loan is twice as large, so that there are few messages and yet this engine
# begins early: the source computes the checksums of a loan while this engine copies the one before.
FIRST_LOAN_BYTES = 4 << 20
# The source serves nobody else while it computes the checksums of one loan (5 ms).
MAX_LOAN_BYTES = 64 << 20
# Loans of one pull, so that the messages of several pulls fit the queues of both sockets.
MAX_LOANS = 32
# The source keeps chunks this much longer than the reader wants them.
LOAN_MARGIN_S = 1.0
# The pause before a source that did not answer, or refused, is tried again.
RETRY_S = 5.0


class ProbeJob(NamedTuple):
    """A question which of some chunks the source holds."""

    number: int
    keys: Sequence[OffloadKey]
    num_resets: int
    deadline_s: float


class ShareJob(NamedTuple):
    """A question for the chunks of a share that are worth most; see `Offer`."""

    number: int
    share: int
    num_shares: int
    skip: int
    num_resets: int
    deadline_s: float


class PullJob(NamedTuple):
    """Chunks to be fetched, each with the slot that it is for."""

    number: int
    keys: Sequence[OffloadKey]
    slots: Sequence[int]
    num_resets: int
    deadline_s: float
    # Whether no request waits for the chunks.
    is_hand_over: bool = False


class Probed(NamedTuple):
    """The outcome of a `ProbeJob`."""

    number: int
    # For each key whether the source holds it.
    held: Sequence[bool]
    # Why none is held, or None if the source answered.
    miss: PeerMiss | None


class Shared(NamedTuple):
    """The outcome of a `ShareJob`."""

    number: int
    # All chunks of the share.
    total: int
    # The next chunks, and for each the short hash of the block before it, or 0.
    keys: Sequence[OffloadKey]
    before: Sequence[int]
    # Why there are none, or None if the source answered.
    miss: PeerMiss | None


class Pulled(NamedTuple):
    """The outcome of one chunk of a `PullJob`."""

    key: OffloadKey
    slot: int
    # Why the chunk did not arrive, or None if it did.
    miss: PeerMiss | None


Question: TypeAlias = ProbeJob | ShareJob
Outcome: TypeAlias = Probed | Shared | Pulled


class Memory(NamedTuple):
    """The slots of this engine, and how their content is checked."""

    base: int
    slot_bytes: int
    # Bytes of a chunk; the rest of its slot is padding.
    chunk_bytes: int
    checksum: Callable[[OffloadKey, int], int]


class _Chunk(NamedTuple):
    key: OffloadKey
    slot: int
    checksum: int
    copy: Copy


class _Piece(NamedTuple):
    pull: _Pull
    chunks: list[_Chunk]
    transfer: Any


class _Check(NamedTuple):
    chunks: list[_Chunk]
    # The checksums of what arrived.
    checksums: Future[list[int]]


@dataclass(slots=True, eq=False)
class _Pull:
    job: PullJob
    # Chunks that the source lent and that are not handed to NIXL yet.
    queue: deque[_Chunk] = field(default_factory=deque)
    # Whether the source has answered.
    is_lent: bool = False
    # Pieces under way.
    num_pieces: int = 0
    # Whether only the pieces under way are waited for.
    is_given_up: bool = False


class PeerLink:
    """The link to one source."""

    def __init__(
        self,
        plane: DataPlane,
        memory: Memory,
        facts: Callable[[], PeerFacts],
        send: Callable[[ToSource], None],
        done: Callable[[Outcome], None],
        checks: Executor,
    ) -> None:
        """Start without a connection; the first job opens it.

        Args:
            plane: Copies the data.
            memory: The slots of this engine.
            facts: Returns the facts of this engine.
            send: Sends a message to the source.
            done: Called with every outcome.
            checks: Computes the checksums of what arrived, while the next pieces are copied.
        """
        self._plane = plane
        self._memory = memory
        self._facts = facts
        self._send = send
        self._done = done
        self._checks = checks
        self._welcome: Welcome | None = None
        self._peer = ""
        self._has_said_hello = False
        # Whether the source has served this link since the last time that it did not know it.
        self._is_known = True
        # After a failure: the reason, and when the source may be tried again.
        self._failure: tuple[PeerMiss, float] | None = None
        self._questions: dict[int, Question] = {}
        # Pulls by the numbers of their loans.
        self._pulls: dict[int, _Pull] = {}
        self._last_loan = 0
        self._pieces: list[_Piece] = []
        # The pieces that arrived and wait for their check, the oldest first.
        self._arrived: deque[_Check] = deque()
        # The last sentence with which the source refused, for the log.
        self.refusal = ""

    @property
    def has_more(self) -> bool:
        """Whether a turn without a wait would begin a piece."""
        return len(self._pieces) < MAX_PIECES and self._has_queue

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not (self._questions or self._pulls or self._pieces or self._arrived)

    @property
    def is_copying(self) -> bool:
        """Whether a transfer or a check is under way, which has to be polled."""
        return bool(self._pieces or self._arrived)

    @property
    def _has_queue(self) -> bool:
        return any(pull.queue for pull in self._pulls.values())

    def next_deadline_s(self) -> float | None:
        """Return when the next job is overdue, or None if there is none."""
        deadlines = [job.deadline_s for job in self._questions.values()]
        deadlines += [pull.job.deadline_s for pull in self._pulls.values() if not pull.is_given_up]
        return min(deadlines, default=None)

    # Work

    def begin(self, job: Question | PullJob, now_s: float) -> None:
        """Begin a job."""
        if isinstance(job, PullJob):
            self.pull(job, now_s)
        else:
            self.question(job, now_s)

    def question(self, job: Question, now_s: float) -> None:
        """Ask which chunks the source holds."""
        problem = self._problem(now_s)
        if problem is not None:
            self._done(unanswered(job, problem))
            return
        self._questions[job.number] = job
        self._open()
        if self._welcome is not None:
            self._send(_message(job))

    def pull(self, job: PullJob, now_s: float) -> None:
        """Fetch chunks that the source was found to hold."""
        problem = self._problem(now_s)
        if problem is not None:
            self._fail_chunks(job.keys, job.slots, problem)
            return
        chunk_bytes, num_keys = self._memory.chunk_bytes, len(job.keys)
        most = max(1, min(MAX_LOAN_BYTES // chunk_bytes, MAX_KEYS), -(-num_keys // MAX_LOANS))
        size = max(1, FIRST_LOAN_BYTES // chunk_bytes)
        loans: list[PullJob] = []
        end = 0
        while end < num_keys:
            start, end = end, end + min(size, most)
            size *= 2
            self._last_loan += 1
            loan = job._replace(number=self._last_loan, keys=job.keys[start:end], slots=job.slots[start:end])
            self._pulls[loan.number] = _Pull(loan)
            loans.append(loan)
        self._open()
        if self._welcome is not None:
            for loan in loans:
                self._borrow(loan, now_s)

    def tick(self, now_s: float) -> None:
        """Collect transfers, begin others, and end what is overdue."""
        self._collect(now_s)
        has_overdue = False
        for number, job in list(self._questions.items()):
            if job.deadline_s <= now_s:
                has_overdue = True
                del self._questions[number]
                self._done(unanswered(job, PeerMiss.DEADLINE))
        for pull in list(self._pulls.values()):
            if pull.job.deadline_s <= now_s and not pull.is_given_up:
                has_overdue = True
                self._give_up(pull, PeerMiss.DEADLINE)
        if has_overdue and self._welcome is None:
            # No engine answers there, or it did not get the hello.
            self._failure = (PeerMiss.GONE, now_s + RETRY_S)
            self._has_said_hello = False
        self._begin_pieces(now_s)
        self._compare(MAX_PIECES if self._has_queue else 0)

    def fail(self, now_s: float) -> None:
        """End all jobs because of a fault in the program. Chunks that NIXL may still write end with their transfers."""
        self._lose(PeerMiss.FAULT, now_s, RETRY_S)

    def close(self) -> None:
        """Forget the source. Transfers under way have no outcome, because the engine ends."""
        self._welcome = None
        if self._peer and not self._pieces:
            self._plane.remove_peer(self._peer)
            self._peer = ""

    # Messages

    def received(self, message: ToReader | None, now_s: float) -> None:
        """Take a message of the source; None stands for one that was not understood."""
        if isinstance(message, Welcome):
            self._welcomed(message, now_s)
        elif isinstance(message, Present):
            self._is_known = True
            job = self._questions.pop(message.number, None)
            if isinstance(job, ProbeJob):
                is_whole = len(message.held) == len(job.keys)
                held = [bool(byte) for byte in message.held] if is_whole else [False] * len(job.keys)
                miss = miss_of(message.reason) if message.reason else None if is_whole else PeerMiss.PROTOCOL
                self._done(Probed(job.number, held, miss))
            elif job is not None:
                self._done(unanswered(job, PeerMiss.PROTOCOL))
        elif isinstance(message, Offered):
            self._offered(message)
        elif isinstance(message, Lent):
            self._lent(message, now_s)
        elif isinstance(message, Unknown):
            self._greet_again(now_s)
        elif isinstance(message, Refused):
            self.refusal = message.detail
            self._lose(miss_of(message.reason), now_s, RETRY_S)
        else:
            self._lose(PeerMiss.PROTOCOL, now_s, RETRY_S)

    def _open(self) -> None:
        if self._welcome is None and not self._has_said_hello:
            facts = self._facts()
            self._has_said_hello = True
            self._send(Hello(VERSION, facts.identity, facts.hash_root))

    def _greet_again(self, now_s: float) -> None:
        """Say hello to a source that restarted. Its former memory is gone, but it may hold what the questions are about."""
        if self._welcome is None:
            # Hello is under way already.
            return
        questions: dict[int, Question] = {}
        if self._is_known:
            questions, self._questions = self._questions, {}
        # A source that forgets its readers at once gets no second hello for the same questions.
        self._is_known = False
        self._lose(PeerMiss.GONE, now_s, retry_s=0.0)
        for job in questions.values():
            self.question(job, now_s)

    def _welcomed(self, welcome: Welcome, now_s: float) -> None:
        if self._welcome is not None or not self._has_said_hello:
            return
        if welcome.slot_bytes < self._memory.chunk_bytes:
            self._lose(PeerMiss.PROTOCOL, now_s, RETRY_S)
            return
        try:
            self._peer = self._plane.add_peer(welcome.metadata)
        except PlaneError:
            self._lose(PeerMiss.TRANSFER, now_s, RETRY_S)
            return
        self._welcome = welcome
        for job in self._questions.values():
            self._send(_message(job))
        for pull in self._pulls.values():
            self._borrow(pull.job, now_s)

    def _borrow(self, job: PullJob, now_s: float) -> None:
        loan_s = max(job.deadline_s - now_s, 0.0) + LOAN_MARGIN_S
        self._send(Borrow(job.number, job.num_resets, loan_s, list(job.keys), not job.is_hand_over))

    def _offered(self, offered: Offered) -> None:
        self._is_known = True
        job = self._questions.pop(offered.number, None)
        if job is None:
            return
        if not isinstance(job, ShareJob) or len(offered.keys) != len(offered.before):
            self._done(unanswered(job, PeerMiss.PROTOCOL))
            return
        keys = [OffloadKey(key) for key in offered.keys]
        miss = miss_of(offered.reason) if offered.reason else None
        self._done(Shared(job.number, offered.total, keys, offered.before, miss))

    def _lent(self, lent: Lent, now_s: float) -> None:
        self._is_known = True
        pull = self._pulls.get(lent.number)
        if pull is None or pull.is_given_up or self._welcome is None:
            # The job was given up meanwhile, before anything was read.
            self._send(Return(lent.number))
            return
        job = pull.job
        if pull.is_lent or not len(lent.slots) == len(lent.checksums) == len(job.keys):
            self._lose(PeerMiss.PROTOCOL, now_s, RETRY_S)
            return
        pull.is_lent = True
        memory, source = self._memory, self._welcome
        for key, slot, lent_slot, checksum in zip(job.keys, job.slots, lent.slots, lent.checksums, strict=True):
            if lent_slot < 0:
                self._done(Pulled(key, slot, MISS_OF_NO_SLOT.get(lent_slot, PeerMiss.PROTOCOL)))
                continue
            copy = Copy(
                source.base + lent_slot * source.slot_bytes, memory.base + slot * memory.slot_bytes, memory.chunk_bytes
            )
            pull.queue.append(_Chunk(key, slot, checksum, copy))
        self._begin_pieces(now_s)
        self._settle(pull)

    # Transfers

    def _begin_pieces(self, now_s: float) -> None:
        per_piece = max(1, PIECE_BYTES // self._memory.chunk_bytes)
        num_begun = 0
        # The sort is stable, so chunks that requests wait for come first, and then the older job.
        for pull in sorted(self._pulls.values(), key=lambda pull: pull.job.is_hand_over):
            while pull.queue and len(self._pieces) < MAX_PIECES and num_begun < MAX_PIECES:
                chunks = [pull.queue.popleft() for _ in range(min(per_piece, len(pull.queue)))]
                try:
                    transfer = self._plane.read(self._peer, [chunk.copy for chunk in chunks])
                except PlaneError:
                    self._miss(chunks, PeerMiss.TRANSFER)
                    self._lose(PeerMiss.TRANSFER, now_s, RETRY_S)
                    return
                except BaseException:
                    self._miss(chunks, PeerMiss.FAULT)
                    raise
                pull.num_pieces += 1
                piece = _Piece(pull, chunks, transfer)
                self._pieces.append(piece)
                # Within a machine the copy has ended already.
                self._collect_piece(piece, now_s)
                num_begun += 1

    def _collect(self, now_s: float) -> None:
        fault: Exception | None = None
        for piece in list(self._pieces):
            try:
                self._collect_piece(piece, now_s)
            except Exception as error:
                # The other pieces must end, too.
                fault = error
        if fault is not None:
            raise fault

    def _collect_piece(self, piece: _Piece, now_s: float) -> None:
        is_lost = False
        try:
            if not self._plane.is_done(piece.transfer):
                return
        except PlaneError:
            is_lost = True
        self._pieces.remove(piece)
        piece.pull.num_pieces -= 1
        try:
            if is_lost:
                self._miss(piece.chunks, PeerMiss.GONE)
            else:
                self._check(piece.chunks)
        finally:
            self._settle(piece.pull)
            self._plane.release(piece.transfer)
            if is_lost:
                self._lose(PeerMiss.GONE, now_s, RETRY_S)
            elif self._welcome is None:
                self.close()

    def _check(self, chunks: list[_Chunk]) -> None:
        """Begin to check what arrived."""
        try:
            self._arrived.append(_Check(chunks, self._checks.submit(self._checksums, chunks)))
        except BaseException:
            self._miss(chunks, PeerMiss.FAULT)
            raise
        self._compare(MAX_PIECES)

    def _checksums(self, chunks: Sequence[_Chunk]) -> list[int]:
        return [self._memory.checksum(chunk.key, chunk.slot) for chunk in chunks]

    def _compare(self, most: int) -> None:
        """Compare the content that arrived with its checksums, until at most `most` pieces wait for theirs."""
        while self._arrived and (len(self._arrived) > most or self._arrived[0].checksums.done()):
            chunks, future = self._arrived.popleft()
            try:
                # A check that has not begun, because its thread gets no core, is done here.
                checksums = self._checksums(chunks) if future.cancel() else future.result()
            except BaseException:
                self._miss(chunks, PeerMiss.FAULT)
                raise
            for chunk, checksum in zip(chunks, checksums, strict=True):
                self._done(Pulled(chunk.key, chunk.slot, None if checksum == chunk.checksum else PeerMiss.CHECKSUM))

    def _settle(self, pull: _Pull) -> None:
        """End a pull if nothing of it is left."""
        is_left = pull.queue or pull.num_pieces or not (pull.is_lent or pull.is_given_up)
        if not is_left and self._pulls.pop(pull.job.number, None) is not None and self._welcome is not None:
            self._send(Return(pull.job.number))

    # Failures

    def _problem(self, now_s: float) -> PeerMiss | None:
        """Return why the source gets no new work, or None."""
        if self._failure is not None:
            if now_s < self._failure[1]:
                return self._failure[0]
            self._failure = None
        if any(pull.is_given_up for pull in self._pulls.values()):
            return PeerMiss.STALLED
        return None

    def _give_up(self, pull: _Pull, miss: PeerMiss) -> None:
        """End a pull but for its pieces under way, each of which has its outcome when it ends."""
        if pull.is_given_up:
            return
        pull.is_given_up = True
        if pull.is_lent:
            queue, pull.queue = pull.queue, deque()
            self._miss(list(queue), miss)
        else:
            self._fail_chunks(pull.job.keys, pull.job.slots, miss)
        self._settle(pull)

    def _lose(self, miss: PeerMiss, now_s: float, retry_s: float) -> None:
        """End all jobs, and begin with a new connection at the next one."""
        self._welcome = None
        self._has_said_hello = False
        self._failure = (miss, now_s + retry_s)
        questions, self._questions = self._questions, {}
        for job in questions.values():
            self._done(unanswered(job, miss))
        for pull in list(self._pulls.values()):
            self._give_up(pull, miss)
        # Last, because NIXL may raise.
        self.close()

    def _miss(self, chunks: Sequence[_Chunk], miss: PeerMiss) -> None:
        for chunk in chunks:
            self._done(Pulled(chunk.key, chunk.slot, miss))

    def _fail_chunks(self, keys: Sequence[OffloadKey], slots: Sequence[int], miss: PeerMiss) -> None:
        for key, slot in zip(keys, slots, strict=True):
            self._done(Pulled(key, slot, miss))


def unanswered(job: Question, miss: PeerMiss) -> Outcome:
    """Return the outcome of a question that the source does not answer."""
    if isinstance(job, ShareJob):
        return Shared(job.number, 0, [], [], miss)
    return Probed(job.number, [False] * len(job.keys), miss)


def _message(job: Question) -> ToSource:
    if isinstance(job, ShareJob):
        return Offer(job.number, job.num_resets, job.share, job.num_shares, job.skip)
    return Probe(job.number, job.num_resets, list(job.keys))
