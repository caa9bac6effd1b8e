# SPDX-License-Identifier: Apache-2.0
"""One worker's stream, from typed items to net changes of its residency. Pure: no sockets, no Redis, no clock of its
own.

Invariant: what `take` returned so far, applied in order, is what the stream said, and nothing is credited that a
removal might have been lost for: a gap, a restart or an unreadable removal begins a new epoch, empty. Where another
life of the engine may have begun, what was learned of its catalog and hash scheme is void too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrouter.events.vllm.codec import BatchDecoder, CodecError
from kvrouter.events.vllm.messages import AllBlocksCleared, BlockStored, EventBatch
from kvrouter.events.vllm.stream_items import (
    Batch,
    Connected,
    Disconnected,
    GapClosed,
    GapLost,
    GapOpened,
    Incomplete,
    Malformed,
    Proven,
    ReadAnew,
    ReplayFailed,
    ReplayFinished,
    Restarted,
    ResumePoint,
    StreamItem,
)
from kvrouter.router.common.ids import Place
from kvrouter.router.ingest.counters import IngestCounters
from kvrouter.router.ingest.engine_liveness import (
    EngineAbsent,
    EngineBack,
    EngineLost,
    EnginePresent,
    EngineRestarted,
    EngineSame,
    VitalSign,
)
from kvrouter.router.ingest.pending_commit import PendingCommit
from kvrouter.router.ingest.residency import MAX_BLOCKS, MAX_PLACES, Residency, Runs
from kvrouter.router.kvcache.block_hash import HashScheme
from kvrouter.router.kvcache.catalog import Catalog
from kvrouter.router.kvcache.catalog_learner import CatalogLearner
from kvrouter.router.kvcache.offload_connectors import TierRule
from kvrouter.router.kvcache.scheme_verification import HashIdentity, SchemeState
from kvrouter.router.workers.provenance import rank_problem, ranks_allowed
from kvrouter.router.workers.registration import NO_PATCH, CatalogSpec, Registration
from kvrouter.router.workers.stream_state import StreamState

# Tags of events that can take blocks away: one that cannot be read may leave ghosts behind, so the epoch is voided.
REMOVING_TAGS = frozenset({None, "BlockRemoved", "AllBlocksCleared"})

SILENT = "it was registered without an event endpoint, so what it holds is not known"

# Combinations of group, medium, size, kind and window that the learner need not see again; an engine has some ten.
MAX_SHAPES = 1_024

# How long the engine's HTTP may take to say that its process is the same, where the next seq is the only other proof:
# several times the interval at which it is asked.
SAME_PROCESS_WAIT_S = 10.0

UINT64_MAX = (1 << 64) - 1

# Meta fields of ours in Redis, beside those of the store.
META_LEARNED = "learned"
META_SCHEME = "scheme"
META_FINGERPRINT = "fingerprint"
META_GAPS = "gaps"
META_INCOMPLETE = "incomplete"
META_PROCESS_START = "process_start"
META_RANK = "rank"


class StoredScheme(msgspec.Struct, frozen=True):
    """A verified hash scheme as kept in Redis."""

    algo: str
    none_hash: str
    standing: str
    hash_block_size: int | None


class StockIngest:
    """The state machine of one worker. Single-threaded; call `apply` with items in order and `take` to flush."""

    def __init__(
        self, registration: Registration, *, seed: str | None, decoder: BatchDecoder, new_epoch: Callable[[], str]
    ) -> None:
        # What is stated of the catalog: by the user, or by the engine.
        spec = self.spec = registration.catalog or CatalogSpec()
        self.registration = registration
        self._seed = seed
        self._decoder = decoder
        self._new_epoch = new_epoch
        self._learner = CatalogLearner(spec)
        self.identity = HashIdentity(spec, seed)
        self.tally = IngestCounters()
        self.epoch = new_epoch()
        self._opens_epoch = True
        self.seq: int | None = None
        self._first_seq: int | None = None
        self._fingerprint = 0
        self._state = StreamState.CONNECTING
        self._incident = f"no connection to {registration.events} yet"
        self._is_silent = registration.events is None and registration.patch in (None, NO_PATCH)
        if self._is_silent:
            self._incident = SILENT
        self._unproven = False
        # The rank that the last batch to name one named; those that it may name (None: any), and why it may not have.
        self._published_rank: int | None = None
        self._allowed_ranks = ranks_allowed(registration.worker.dp_rank, True, ())
        self._rank_problem = ""
        # Batches of another rank were left out: what is held is void, and what was in them is missing.
        self._skips = False
        # Why the engine is down by what its HTTP says; empty while it is not.
        self._down = ""
        # Why its URL has never answered; a stream that is connected says more than its URL.
        self._absent = ""
        self._linked = False
        # When the next seq came after a new connection, while only the engine's HTTP can tell that it is the same life.
        self._next_seq_s: float | None = None
        # When the process started that said what is held, as its HTTP told; and what it told since the last batch.
        self._process_start_s: float | None = None
        self._told_start_s: float | None = None
        # The engine's replay endpoint may have more than is known.
        self._incomplete = False
        # The engine's process is another, and the stream has not begun anew yet: its batches may be the old one's.
        self._expired = False
        # Counted, and neither filled nor lost yet.
        self._gap_open = False
        self.last_event_s: float | None = None
        self.blocks = Residency()
        self._known_shapes: set[tuple[object, ...]] = set()
        self._meta_version: tuple[int, SchemeState] | None = None
        self._catalog: Catalog | None = None
        self._catalog_version: tuple[int, int | None] = (-1, None)

    @property
    def state(self) -> StreamState:
        if self._down or self._is_absent:
            return StreamState.DOWN
        if self._rank_problem:
            return StreamState.MISMATCHED
        if self._state is StreamState.LIVE and not self.identity.explained:
            return StreamState.UNHASHABLE
        return self._state

    @property
    def _is_absent(self) -> bool:
        return bool(self._absent) and self._state is StreamState.CONNECTING

    @property
    def reason(self) -> str:
        """Why the state is what it is, and what happened last; empty when there is nothing to say."""
        if self._down:
            return self._down
        if self._is_absent:
            return f"the engine is not up: {self._absent}"
        if self._rank_problem:
            return self._rank_problem
        if self.state is StreamState.UNHASHABLE:
            return (
                "no known hash scheme explains this worker's first dense root blocks: set its hash_algo and none_hash, or the seed "
                "that its PYTHONHASHSEED has (none_hash_seed)"
            )
        if withheld := self._withheld():
            return f"{self._incident}; {withheld}" if self._incident else withheld
        if not self._incident and self.tally.refused:
            return (
                f"{self.tally.refused} blocks found no room: more than {MAX_BLOCKS:,} blocks, or more than {MAX_PLACES:,} places "
                "(group, medium, owner); they earn no credit"
            )
        return self._incident

    def forget_incident(self) -> None:
        """What happened is over, and no reason for what is now."""
        if self._state is StreamState.LIVE:
            self._incident = ""

    def _withheld(self) -> str:
        """Why what is held beside the GPU earns less than its blocks could."""
        offload = self.catalog.offload
        if withheld := offload.withheld(self.blocks.places):
            return withheld
        if (
            offload.rule is TierRule.CHUNKS
            and self.catalog.blocks_per_chunk is None
            and offload.earning(self.blocks.places)
        ):
            return (
                "the chunk size of the offload tier is not on the wire: its blocks earn credit only where they show that a chunk "
                "is one block; register a catalog with offload_blocks_per_chunk"
            )
        return ""

    @property
    def catalog(self) -> Catalog:
        version = (self._learner.version, self.identity.hash_block_size)
        if self._catalog is None or version != self._catalog_version:
            self._catalog = self._learner.catalog(self.identity.hash_block_size)
            self._catalog_version = version
        return self._catalog

    @property
    def has_news(self) -> bool:
        """Whether a flush would change anything in Redis."""
        return self._first_seq is not None or self._opens_epoch

    def restore(
        self,
        epoch: str,
        seq: int,
        places: dict[Place, NDArray[np.uint64]],
        copies: dict[tuple[Place, int], int],
        meta: dict[str, bytes],
    ) -> None:
        """Go on from what Redis holds. Credited as it stands, but suspect until the stream proves that nothing was
        missed.

        Raises ValueError or msgspec's errors on what no router writes; begin with a new object then."""
        self.epoch, self.seq, self._opens_epoch = epoch, seq, False
        self._fingerprint = _stored_number(META_FINGERPRINT, meta)
        self.tally.gaps = _stored_number(META_GAPS, meta)
        self._incomplete = META_INCOMPLETE in meta
        if META_PROCESS_START in meta:
            self._process_start_s = float(meta[META_PROCESS_START])
        copied: dict[Place, dict[int, int]] = {}
        for (place, block_hash), count in copies.items():
            if count < 2:
                raise ValueError(f"{count} copies of a block of {place.text}")
            copied.setdefault(place, {})[block_hash] = count
        for place, hashes in places.items():
            several = copied.get(place, {})
            # Copies are read after the blocks: one that has come in between is not here yet.
            there = np.isin(np.fromiter(several, np.uint64), hashes).tolist()
            self.blocks.load(place, hashes, dict(itertools.compress(several.items(), there)))
        if META_RANK in meta:
            self._skips = not self._is_own(int(meta[META_RANK]))
        if META_LEARNED in meta:
            self._learner.load(meta[META_LEARNED])
        if META_SCHEME in meta:
            stored = msgspec.json.decode(meta[META_SCHEME], type=StoredScheme)
            scheme = HashScheme.from_bytes(stored.algo, bytes.fromhex(stored.none_hash))
            self.identity.restore(scheme, SchemeState(stored.standing), stored.hash_block_size)
        self._state = StreamState.SUSPECT
        self._unproven = True
        self._incident = f"restored from Redis at seq {seq}; the stream has not shown yet that nothing was missed since"

    @property
    def resume_point(self) -> ResumePoint | None:
        """The last batch applied, None when there is none."""
        return None if self.seq is None else ResumePoint(self.seq, self._fingerprint, self._incomplete)

    def continues(self, epoch: str | None, seq: int | None) -> bool:
        """Whether the next flush, if there is one, follows what (epoch, seq) in Redis stands for."""
        flushed = self.seq if self._first_seq is None else self._first_seq - 1
        return not self._opens_epoch and (self.epoch, flushed) == (epoch, seq)

    def pause(self, incident: str) -> None:
        """Nobody reads the stream for now: what is held stays, until the stream shows whether something was missed."""
        if self.seq is None:
            self._unproven = False
            self._set(StreamState.CONNECTING, incident)
        elif self._state is not StreamState.RESYNCING:
            self._unproven = True
            self._set(StreamState.SUSPECT, incident)
        self._gap_open = self._expired = False
        self._linked, self._next_seq_s, self._told_start_s = False, None, None

    def begin_unreadable(self, problem: str) -> None:
        """Redis holds something of this worker that cannot be read; nothing of it is used."""
        self._incident = f"what Redis holds of it cannot be read ({problem}): it is learned anew"

    def rewrite_epoch(self) -> None:
        """Let the next flush bring all that is held, as a new epoch: what Redis has of it is lost, or too old to go on
        from."""
        self.epoch = self._new_epoch()
        self._opens_epoch = True
        self._first_seq = self.seq
        self._meta_version = None
        self.blocks.mark_all_pending()

    def apply(self, item: StreamItem, now: float) -> None:
        """Take the next item of the stream. now: seconds, monotonic."""
        if isinstance(item, Batch):
            self._batch(item, now)
        elif isinstance(item, Connected):
            self._linked = True
            self._connected(item)
        elif isinstance(item, Disconnected):
            self._linked = False
            self._set(
                StreamState.SUSPECT, f"connection to {self.registration.events} lost; the last known residency is shown"
            )
            # With no batch there is nothing to prove.
            self._unproven = self.seq is not None
            self._next_seq_s = self._told_start_s = None
        elif isinstance(item, GapOpened):
            self._count_gap(item.first_seq, item.next_seq)
            self._set(
                StreamState.RESYNCING,
                f"batches {item.first_seq} to {item.next_seq - 1} are missing; asking the replay endpoint, no credit meanwhile",
            )
        elif isinstance(item, GapClosed):
            self._gap_open = False
            self.tally.replays += 1
            self._set(StreamState.LIVE, "")
        elif isinstance(item, GapLost):
            if not self._gap_open:
                self._count_gap(item.first_seq, item.next_seq)
            self._gap_open = False
            self.tally.relearned += 1
            lost = f"batches {item.first_seq} to {item.next_seq - 1} are lost"
            if item.first_seq == item.next_seq:
                lost = f"it cannot be proven that nothing was missed before seq {item.next_seq}"
            self._void_life(
                f"{lost} ({item.reason}); residency before seq {item.next_seq} was dropped and is learned anew"
            )
        elif isinstance(item, Incomplete):
            self._incomplete = True
        elif isinstance(item, ReadAnew):
            self._void_life(
                "the replay endpoint answers again: all that it still has is read anew, with what was given up"
            )
            self._state = StreamState.CATCHING_UP
        elif isinstance(item, Restarted):
            self._gap_open = self._expired = False
            self.tally.restarts += 1
            self._void_life(f"the engine restarted ({item.reason}); what it held before is void")
            # This life has not named its rank yet.
            self._published_rank, self._rank_problem, self._skips = None, "", False
            if item.replaying:
                self._state = StreamState.CATCHING_UP
        elif isinstance(item, Proven):
            if item.how == "next_seq":
                self._follow_next_seq(item.seq + 1, now)
            else:
                self._unproven = False
                self._set(StreamState.LIVE, "")
        elif isinstance(item, ReplayFinished):
            if self._state is StreamState.CATCHING_UP:
                self._state = StreamState.LIVE
                if not self.tally.restarts:
                    self._incident = ""
        elif isinstance(item, ReplayFailed):
            self._replay_failed(item)
        elif isinstance(item, Malformed):
            self.tally.malformed += 1

    def on_liveness(self, sign: VitalSign) -> None:
        """What the engine's HTTP says of its life. The caller has the stream read anew where another life may have
        begun."""
        if isinstance(sign, EngineAbsent):
            self._absent = sign.reason
        elif isinstance(sign, EnginePresent):
            self._absent = ""
        elif isinstance(sign, EngineLost):
            self.tally.losses += 1
            self._down = f"the engine is gone ({sign.reason}); what it held is void"
            self._void_life(self._down)
        elif isinstance(sign, EngineBack | EngineRestarted):
            self._down = ""
            if self._is_silent:
                self._set(StreamState.CONNECTING, SILENT)
                return
            what = "answers again" if isinstance(sign, EngineBack) else f"is another process ({sign.reason})"
            self._void_life(f"the engine {what}; its stream is read anew")
            self._state, self._expired = StreamState.CONNECTING, True
        elif isinstance(sign, EngineSame):
            self._compare_process(sign)

    def _compare_process(self, sign: EngineSame) -> None:
        if not self._unproven:
            self._told_start_s = sign.start_s if self._linked else None
        elif self._next_seq_s is not None and sign.asked_s >= self._next_seq_s:
            if sign.start_s == self._process_start_s:
                self._unproven, self._next_seq_s = False, None
                self._set(StreamState.LIVE, "")
            else:
                self._void_unproven(self.seq or 0, "the engine's process is another, or was not known before")

    def _follow_next_seq(self, seq: int, now: float) -> None:
        """Batch `seq` follows after a new connection, and there is no replay to ask: another life may have come to it
        by chance."""
        if self.registration.url is None:
            self._void_unproven(seq, "there is neither a replay endpoint nor a url to ask")
        else:
            self._next_seq_s = now
            self._incident = f"seq {seq} follows; waiting for the engine's HTTP to say that its process is the same"

    def _void_unproven(self, seq: int, reason: str) -> None:
        self.tally.relearned += 1
        self._void_life(
            f"it cannot be proven that nothing was missed before seq {seq} ({reason}); residency before it was dropped and is "
            "learned anew"
        )

    def _count_gap(self, first_seq: int, next_seq: int) -> None:
        self._gap_open = True
        self.tally.gaps += 1
        self.tally.missed_batches += next_seq - first_seq

    def _set(self, state: StreamState, incident: str) -> None:
        self._state, self._incident = state, incident

    def _connected(self, item: Connected) -> None:
        if self._expired or self._state is StreamState.RESYNCING:
            return
        if self._unproven:
            self._incident = f"connected to {self.registration.events}; waiting for proof that nothing was missed"
        elif item.replaying:
            self._set(StreamState.CATCHING_UP, "replaying what the engine still remembers")
        elif self.registration.replay:
            # Batches came before this news, and the replay that they began is over.
            self._set(StreamState.LIVE, self._incident if self._state is StreamState.LIVE else "")
        else:
            self._set(StreamState.LIVE, "no replay endpoint: what was cached before is learned as it is used")

    def _replay_failed(self, item: ReplayFailed) -> None:
        if self._state is StreamState.CATCHING_UP:
            self._set(
                StreamState.LIVE, f"replay failed ({item.reason}): what was cached before is learned as it is used"
            )
        elif self._unproven:
            self._incident = (
                f"replay failed ({item.reason}); suspect until it answers, or the next batch comes and voids"
            )

    def _void(self, incident: str) -> None:
        """Begin a new epoch: nothing that was known counts any more."""
        self.epoch = self._new_epoch()
        self._opens_epoch = True
        self.blocks.forget()
        self.seq = self._first_seq = None
        self._meta_version = None
        self._unproven, self._next_seq_s = False, None
        self._incomplete = False
        self._set(StreamState.LIVE if self._linked else StreamState.CONNECTING, incident)

    def _void_life(self, incident: str) -> None:
        """The same, where another life of the engine may have begun: what was learned of the old one is void with
        it."""
        self._void(incident)
        self._process_start_s = self._told_start_s = None
        self._forget_learned()

    def _forget_learned(self) -> None:
        """What is stated stays."""
        self._learner = CatalogLearner(self.spec)
        self.identity = HashIdentity(self.spec, self._seed)
        self._known_shapes.clear()
        self._meta_version = self._catalog = None

    def _batch(self, item: Batch, now: float) -> None:
        if self._expired:
            return
        if self._told_start_s is not None:
            # It still says batches over the same connection, so it is the process that its HTTP told of.
            self._process_start_s, self._told_start_s = self._told_start_s, None
        if self._next_seq_s is not None and now - self._next_seq_s > SAME_PROCESS_WAIT_S:
            self._void_unproven(item.seq, "the engine's HTTP did not say that its process is the same")
        self.last_event_s = now
        self.tally.batches += 1
        try:
            batch = self._decoder.decode(item.payload, with_tokens=self.identity.wants_tokens)
        except CodecError as error:
            self.tally.broken += 1
            self._learner.miss_event()
            self._void(f"batch {item.seq} could not be decoded ({error}); residency before it was dropped")
        else:
            if self._is_own(batch.dp_rank):
                self._skips = False
                if item.seq == 0:
                    self._learner.begin_life()
                self._events(batch)
            else:
                self._skip()
        if self._state in (StreamState.CONNECTING, StreamState.SUSPECT) and not self._unproven:
            self._set(StreamState.LIVE, "")
        self._fingerprint = item.fingerprint
        self._advance(item.seq)

    def allow_ranks(self, allowed: frozenset[int] | None) -> bool:
        """What more is known of the ranks that its events may name. True: batches were left out that are its own, so
        that the caller has the stream read anew."""
        self._allowed_ranks = allowed
        return self._is_own(None) and self._skips

    def _is_own(self, published: int | None) -> bool:
        """Whether events of this rank are the worker's; a batch without a rank is of the one before."""
        if published is not None:
            self._published_rank = published
        self._rank_problem = rank_problem(self._published_rank, self.registration.worker.dp_rank, self._allowed_ranks)
        return not self._rank_problem

    def _skip(self) -> None:
        """Leave out a batch of another rank; what came before it cannot be trusted either."""
        self.tally.foreign += 1
        self._learner.miss_event()
        if not self._skips:
            self._void("")
            self._skips = True

    def _advance(self, seq: int) -> None:
        """Everything up to `seq` is in."""
        self.tally.refused = self.blocks.refused_blocks
        self.seq = seq
        if self._first_seq is None:
            self._first_seq = seq

    def _events(self, batch: EventBatch) -> None:
        runs = Runs(self.blocks)
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                runs.end()
                self._clear(event)
                continue
            if isinstance(event, BlockStored):
                self._learn(event)
            elif event.group_idx is None and (places := self._places_of_stray(event.medium, runs)):
                for place in places:
                    runs.add(place, False, event.block_hashes)
                continue
            else:
                self._learner.removed(event)
            if len(event.block_hashes):
                self.tally.blocks += len(event.block_hashes)
                place = Place(event.group_idx, event.medium, event.ownership)
                runs.add(place, isinstance(event, BlockStored), event.block_hashes)
        runs.end()
        self._learner.elapse(len(batch.events))
        self.tally.events += len(batch.events)
        self.tally.unknown += batch.unknown
        self.tally.broken += len(batch.broken)
        if batch.unknown or batch.broken:
            self._learner.miss_event()
        unreadable = [event for event in batch.broken if event.tag in REMOVING_TAGS]
        if unreadable:
            self._void(
                f"{len(unreadable)} event(s) that may have removed blocks could not be decoded ({unreadable[0].error}); "
                "residency before them was dropped"
            )

    def _places_of_stray(self, medium: str, runs: Runs) -> list[Place]:
        """Where a removal without a group may take blocks from, on a medium that has named groups alone: anywhere
        there."""
        runs.end()
        places = [place for place in self.blocks.places if place.medium == medium]
        return [] if any(place.group_idx is None for place in places) else places

    def _learn(self, event: BlockStored) -> None:
        shape = (event.group_idx, event.medium, event.block_size, event.kind, event.sliding_window)
        if len(self._known_shapes) >= MAX_SHAPES:
            # Only spares looking at events that say nothing new.
            self._known_shapes.clear()
        if shape not in self._known_shapes or event.medium != "GPU" or self._learner.in_doubt:
            self._learner.stored(event)
            self._known_shapes.add(shape)
        if event.medium == "GPU" and self._learner.wants_parents:
            self._learner.parent(event)
        if event.parent_block_hash is None and self._learner.wants_roots:
            self._learner.root(event)
        if event.token_ids is not None:
            self.identity.judge(event)

    def _clear(self, event: AllBlocksCleared) -> None:
        """Everything, or what the event names, is gone.

        Stock vLLM names nothing, so every medium is dropped: less credit, not more.
        """
        for place in list(self.blocks.places):
            if event.medium in (None, place.medium) and event.group_idx in (None, place.group_idx):
                self.blocks.clear(place)

    def take(self) -> PendingCommit | None:
        """The net changes since the last call, None when the stream brought nothing."""
        if not self.has_news:
            return None
        seqs = None if self._first_seq is None or self.seq is None else (self._first_seq, self.seq)
        flush = PendingCommit(
            epoch=self.epoch,
            opens_epoch=self._opens_epoch,
            seqs=seqs,
            changes=self.blocks.take_changes(),
            copies=self.blocks.take_copies(),
            meta=self._meta(),
        )
        self._opens_epoch = False
        self._first_seq = None
        return flush

    def _meta(self) -> dict[str, bytes]:
        meta = {META_FINGERPRINT: str(self._fingerprint).encode(), META_GAPS: str(self.tally.gaps).encode()}
        if self._incomplete:
            meta[META_INCOMPLETE] = b"1"
        if self._process_start_s is not None:
            meta[META_PROCESS_START] = repr(self._process_start_s).encode()
        if self._published_rank is not None:
            meta[META_RANK] = str(self._published_rank).encode()
        version = (self._learner.version, self.identity.standing)
        if version != self._meta_version:
            scheme = self.identity.scheme
            meta[META_LEARNED] = self._learner.dump()
            meta[META_SCHEME] = msgspec.json.encode(
                StoredScheme(
                    scheme.algo, scheme.none_hash.hex(), self.identity.standing.value, self.identity.hash_block_size
                )
            )
            self._meta_version = version
        return meta


def _stored_number(field: str, meta: dict[str, bytes]) -> int:
    number = int(meta.get(field, b"0"))
    if not 0 <= number <= UINT64_MAX:
        raise ValueError(f"{field} is {number}")
    return number
