# SPDX-License-Identifier: Apache-2.0
"""Everything known of one worker besides its blocks: catalog, hash scheme, state and reason. Pure.

A feed (`stock_feed.py`, `patch_feed.py`) changes the profile, or it is loaded from Redis. Where another life of the
engine may have begun, all that was learned is void, and the user's statements stay.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from kvrouter.events.patch.items import Greeted
from kvrouter.events.patch.messages import DeclaredCatalog, PeerAddress
from kvrouter.events.vllm.messages import MAX_ERROR_CHARS
from kvrouter.events.vllm.stream_items import Flooded
from kvrouter.router.base.common.checksum import seal, unseal
from kvrouter.router.base.common.escaping import printable
from kvrouter.router.base.common.ids import Place
from kvrouter.router.index.ingest.counters import IngestCounters
from kvrouter.router.index.ingest.declared_catalog import contradictions, declared_problem, declared_spec
from kvrouter.router.index.ingest.residency import MAX_BLOCKS, MAX_PLACES, Residency
from kvrouter.router.model.engines.known import engine_named
from kvrouter.router.model.kvcache.block_hash import HashScheme
from kvrouter.router.model.kvcache.catalog import Catalog
from kvrouter.router.model.kvcache.catalog_learner import CatalogLearner
from kvrouter.router.model.kvcache.offload_connectors import TierRule
from kvrouter.router.model.kvcache.scheme_verification import HashIdentity, SchemeState
from kvrouter.router.model.workers.provenance import rank_problem, ranks_allowed
from kvrouter.router.model.workers.registration import NO_PATCH, CatalogSpec, Registration
from kvrouter.router.model.workers.stream_state import StreamState

SILENT = "it was registered without an event endpoint, so what it holds is not known"

UINT64_MAX = (1 << 64) - 1

# The fields of `meta` in Redis that the profile writes, besides those of the store.
META_LEARNED = "learned"
META_SCHEME = "scheme"
META_DECLARED = "declared"
META_FINGERPRINT = "fingerprint"
META_GAPS = "gaps"
META_CLEARS = "clears"
META_RESYNCS = "resyncs"
META_INCOMPLETE = "incomplete"
META_PROCESS_START = "process_start"
META_RANK = "rank"
META_REPORT_EPOCH = "report_epoch"


class StoredScheme(msgspec.Struct, frozen=True):
    """A verified hash scheme as kept in Redis."""

    algo: str
    # In hexadecimal.
    none_hash: str
    # The value of a `SchemeState`.
    standing: str
    hash_block_size: int | None
    lookahead: int = 0


class Contact(msgspec.Struct):
    """The connection to an engine, and the proof that nothing of its stream was missed.

    Times are seconds of a monotonic clock, except the starts of processes, which are as in `engine_liveness.Pulse`.
    """

    # Whether the stream's socket has a peer.
    linked: bool = False
    # Whether more was sent than was applied: a replay or a snapshot is under way, or messages are held behind one.
    behind: bool = False
    # Whether nothing proves that the blocks held are still the engine's: they were restored, or the connection was
    # lost.
    unproven: bool = False
    # Whether the replay under way has shown that the engine is the same as before; the batches that it sent since are
    # still to come.
    same_life: bool = False
    # Whether batches are known to be missing from the blocks held; it stays until the stream has caught up.
    missing: bool = False
    # Whether the engine's process has been replaced and the stream has not started again yet, so that batches may still
    # be from the old process.
    expired: bool = False
    # Why the engine is down, as its HTTP shows; empty: it is not.
    down: str = ""
    # Why the engine's URL has never answered; empty: it has. It is ignored while the event stream is connected, because
    # a connected stream shows that the engine runs.
    absent: str = ""
    # Whether a gap was counted that is neither filled nor lost yet.
    gap_open: bool = False
    # Whether the replay endpoint may have more batches than are known.
    incomplete: bool = False
    # The fingerprint of the last batch.
    fingerprint: int = 0
    # The start of the process that sent the blocks held, as reported over its HTTP.
    process_start_s: float | None = None
    # The start of the engine's process, as reported over its HTTP since the last batch.
    reported_start_s: float | None = None
    # When the next expected batch came over a new connection, if only the engine's HTTP can prove that the engine did
    # not restart meanwhile. None: no such proof is awaited.
    next_seq_s: float | None = None
    # Why a connection was closed that brought more than it may; empty once there is another connection.
    flood: str = ""
    # When the last batch of this life came, None if none came yet.
    last_event_s: float | None = None


class Ranks(msgspec.Struct):
    """The data-parallel ranks that a worker's events name and may name."""

    # The ranks that the events may name, None for any.
    allowed: frozenset[int] | None
    # The rank that events named last, None if none was named yet.
    published: int | None = None
    # Why events of the rank `published` are not the worker's; empty if nothing contradicts them.
    problem: str = ""
    # Whether batches of another rank were left out, so that their changes are missing.
    skips: bool = False


class PatchContact(msgspec.Struct):
    """The engine's patch, as its reports and heartbeats show it."""

    # The life of the engine whose reports gave the blocks held, or None if they are from the engine's own topic.
    epoch: str | None = None
    # Whether its reports do not come, even if it answers requests.
    silent: bool = False
    greeting: Greeted | None = None
    last_heartbeat_s: float | None = None
    # Why the patch no longer reports anything, or "" if it does.
    withheld: str = ""
    # Why the patch no longer reports the media beside the GPU, or "" if it does.
    tiers_withheld: str = ""

    @property
    def problem(self) -> str:
        """Return the effect of a failure of the patch, as a sentence; empty if there is none."""
        withheld = self.withheld or self.tiers_withheld
        if not withheld:
            return ""
        what = "anything" if self.withheld else "what lies beside the GPU, which earns no credit"
        why = printable(withheld[:MAX_ERROR_CHARS])
        return f"the engine's patch no longer reports {what} ({why}); restart the engine to have it again"


class WorkerProfile:
    """Everything known of one worker except its blocks. Its state is derived from `contact` and never assigned.

    Invariant: while the stream is behind, unproven, not connected, or known to lack batches, the state is not `live`.
    """

    def __init__(self, registration: Registration, seed: str | None) -> None:
        """Create the profile of a worker of which nothing is known but its registration.

        Args:
            registration: The worker's registration.
            seed: The engines' PYTHONHASHSEED as configured for the whole router.
        """
        self.registration = registration
        self.engine = engine_named(registration.engine)
        self._seed = seed
        # The catalog as the user or the engine stated it.
        self.spec = self._stated
        self.declared: DeclaredCatalog | None = None
        self._note = ""
        self.learner = self._learner()
        self.identity = self._identity()
        self.tally = IngestCounters()
        self.contact = Contact()
        self.ranks = Ranks(ranks_allowed(registration.worker.dp_rank, True, ()))
        self.patch = PatchContact()
        # How often everything learned was discarded because another life of the engine may have begun.
        self.lives_ended = 0
        # The sentence that explains the state, or says what happened last.
        self.incident = SILENT if self.is_silent else f"no connection to {registration.events} yet"
        # Whether the incident describes something under way, which ends when the worker is live.
        self._is_passing = not self.is_silent
        self._catalog: tuple[tuple[int, int | None, str], Catalog] | None = None
        # The versions of catalog and scheme that are in Redis.
        self._written: tuple[int, SchemeState] | None = None
        # The counts of gaps, clears and resyncs that are in Redis.
        self._counts_written: tuple[int, int, int] | None = None

    @property
    def _stated(self) -> CatalogSpec:
        """Return the catalog as the user stated it, completed by the values that all engines of this kind share."""
        return self.engine.completed(self.registration.catalog or CatalogSpec())

    def _learner(self) -> CatalogLearner:
        # Only the stated catalog can show that the engine's own events suffice; the engine's declaration ends the
        # problem.
        return CatalogLearner(self.spec, self.engine.stock_problem(self.spec) or None)

    def _identity(self) -> HashIdentity:
        return HashIdentity(self.spec, self.engine.schemes(self.spec, self._seed))

    @property
    def is_silent(self) -> bool:
        """Whether the worker has no event stream."""
        return self.registration.events is None and self.registration.patch in (None, NO_PATCH)

    @property
    def catalog(self) -> Catalog:
        """The catalog as it is known now."""
        identity = self.identity
        version = (self.learner.version, identity.hash_block_size, identity.scheme.algo)
        if self._catalog is None or version != self._catalog[0]:
            self._catalog = version, self.learner.catalog(identity.hash_block_size, identity.scheme.algo)
        return self._catalog[1]

    @property
    def declared_peer(self) -> PeerAddress | None:
        """Where the engine declares that it lends chunks of its CPU tier, None if it does not."""
        return None if self.declared is None else self.declared.peer

    @property
    def stage(self) -> StreamState:
        """The state of the stream alone, without what the engine's HTTP and its ranks show.

        The order of the tests decides about credit: batches known to be missing end it before any other test.
        """
        contact = self.contact
        if contact.missing:
            return StreamState.RESYNCING
        if contact.expired:
            return StreamState.CONNECTING
        if contact.unproven:
            return StreamState.SUSPECT
        if not contact.linked:
            return StreamState.CONNECTING
        return StreamState.CATCHING_UP if contact.behind else StreamState.LIVE

    @property
    def state(self) -> StreamState:
        """The state of the worker: that of its stream, unless its HTTP, its ranks or its hashes show a worse one."""
        if self.contact.down or self._is_absent:
            return StreamState.DOWN
        if self.ranks.problem:
            return StreamState.MISMATCHED
        if self.stage is StreamState.LIVE and not self.identity.explained:
            return StreamState.UNHASHABLE
        return self.stage

    @property
    def _is_absent(self) -> bool:
        return bool(self.contact.absent) and self.stage is StreamState.CONNECTING

    def reason(self, blocks: Residency) -> str:
        """Return why the state is what it is, the last incident, and the patch's failure; empty if there is none.

        Args:
            blocks: The worker's own.
        """
        return "; ".join(filter(None, (self._reason(blocks), self.patch.problem)))

    def _reason(self, blocks: Residency) -> str:
        if self.contact.down:
            return self.contact.down
        if self._is_absent:
            return f"the engine is not up: {self.contact.absent}"
        if self.ranks.problem:
            return self.ranks.problem
        if self.state is StreamState.UNHASHABLE and self.identity.keys_problem:
            return f"{self.identity.keys_problem}: the engine is newer than this router, so install a newer router"
        if self.state is StreamState.UNHASHABLE:
            return f"no known way of hashing gives the hashes of its first blocks: {self.engine.flags.hashes}"
        if withheld := self.withheld(blocks.places):
            return f"{self.incident}; {withheld}" if self.incident else withheld
        if not self.incident and self.tally.refused:
            return (
                f"{self.tally.refused} blocks found no room: more than {MAX_BLOCKS:,} blocks, or more than {MAX_PLACES:,} places "
                "(group, medium, owner); they earn no credit"
            )
        return self.incident or self._note

    def withheld(self, places: Collection[Place]) -> str:
        """Return why the blocks beside the GPU earn less than they could; empty if they do not.

        Args:
            places: The worker's own.
        """
        offload = self.catalog.offload
        if withheld := offload.withheld(places):
            return withheld
        sized = offload.rule is not TierRule.CHUNKS or self.catalog.blocks_per_chunk is not None
        if sized or not offload.earning(places):
            return ""
        return (
            "the events do not have the chunk size of the offload tier: its blocks earn credit only where they show that a chunk "
            "is one block; register a catalog with offload_blocks_per_chunk"
        )

    def wait_for(self, incident: str) -> None:
        """Explain the state by something under way; the explanation is forgotten once the worker is live."""
        self.incident, self._is_passing = incident, True

    def report(self, incident: str) -> None:
        """Set the incident; a live worker shows it too, until `forget_incident`."""
        self.incident, self._is_passing = incident, False

    def catch_up(self) -> None:
        """Note that nothing is under way, and that everything sent so far was applied."""
        contact = self.contact
        if contact.same_life:
            contact.unproven = contact.same_life = False
        contact.behind = False
        if not contact.unproven:
            contact.missing = False
        self.settle()

    def prove(self) -> None:
        """Note that the blocks held are the ones that the engine held when it sent the last item."""
        self.contact.unproven = False
        self.settle()

    def settle(self) -> None:
        """Forget the recorded incident if it is of a kind that ends when the worker becomes live."""
        if self._is_passing:
            self.forget_incident()

    def flooded(self, item: Flooded) -> None:
        """Count and show a connection that was closed because it brought more than it may."""
        self.tally.floods += 1
        self.report(item.reason)
        if item.is_live:
            self.contact.flood = item.reason

    def forget_incident(self) -> None:
        """Forget the incident of a live worker."""
        if self.stage is StreamState.LIVE:
            self.incident = ""

    def is_own(self, published: int | None) -> bool:
        """Note the rank that a batch names, and return whether its events are the worker's.

        Args:
            published: The rank, None for a batch without one, which counts as of the rank named last.
        """
        ranks = self.ranks
        if published is not None:
            ranks.published = published
        ranks.problem = rank_problem(ranks.published, self.registration.worker.dp_rank, ranks.allowed)
        return not ranks.problem

    def forget_learned(self) -> None:
        """Begin another life of the engine, with nothing heard or learned yet. The user's statements stay."""
        self.lives_ended += 1
        self.contact.last_event_s = None
        self.engine = engine_named(self.registration.engine)
        self.declared, self._note, self.spec = None, "", self._stated
        self.learner = self._learner()
        self.identity = self._identity()
        self._written = self._catalog = None

    def declare(self, catalog: DeclaredCatalog) -> None:
        """Store the catalog of KV cache groups and the hash scheme that the engine itself declares."""
        self.is_own(catalog.dp_rank)
        if catalog == self.declared:
            return
        self.declared = catalog
        if self.registration.engine is None:
            self.engine = engine_named(catalog.engine)
        spec = self.spec = self.engine.completed(declared_spec(catalog, self._stated))
        problem = declared_problem(catalog)
        try:
            self.identity = self._identity()
        except ValueError as error:
            problem = problem or f"its hash scheme cannot be computed here: {error}"
        else:
            if catalog.hash_example is not None:
                self.identity.prove(catalog.hash_example.token_ids, catalog.hash_example.block_hash)
        self.learner.declare(spec, problem)
        names = ", ".join(contradictions(spec, self._stated))
        self._note = (
            f"the registered catalog differs from the engine's in {names}; the engine's is used" if names else ""
        )

    def rewrite(self) -> None:
        """Note that nothing of the profile is in Redis."""
        self._written = self._counts_written = None

    def dump(self) -> dict[str, bytes]:
        """Return the fields of `meta` to write to Redis; facts learned and counts only if they changed since."""
        contact = self.contact
        meta = {META_FINGERPRINT: str(contact.fingerprint).encode()}
        counts = (self.tally.gaps, self.tally.clears, self.tally.resyncs)
        if counts != self._counts_written:
            meta |= zip((META_GAPS, META_CLEARS, META_RESYNCS), (b"%d" % count for count in counts), strict=True)
            self._counts_written = counts
        if contact.incomplete:
            meta[META_INCOMPLETE] = b"1"
        if contact.process_start_s is not None:
            meta[META_PROCESS_START] = repr(contact.process_start_s).encode()
        if self.ranks.published is not None:
            meta[META_RANK] = str(self.ranks.published).encode()
        meta[META_REPORT_EPOCH] = (self.patch.epoch or "").encode()
        version = (self.learner.version, self.identity.standing)
        if version != self._written:
            scheme, standing = self.identity.scheme, self.identity.standing.value
            stored = StoredScheme(
                scheme.algo, scheme.none_hash.hex(), standing, self.identity.hash_block_size, scheme.lookahead
            )
            meta[META_LEARNED] = seal(META_LEARNED, self.learner.dump())
            meta[META_SCHEME] = seal(META_SCHEME, msgspec.json.encode(stored))
            if self.declared is not None:
                meta[META_DECLARED] = seal(META_DECLARED, msgspec.json.encode(self.declared))
            self._written = version
        return meta

    def load(self, meta: dict[str, bytes]) -> None:
        """Load the fields of `meta` that Redis keeps.

        Raises ValueError or an error of msgspec for values that no router writes; begin with a new object then.
        """
        contact = self.contact
        contact.fingerprint = _stored_number(META_FINGERPRINT, meta)
        self.tally.gaps = _stored_number(META_GAPS, meta)
        self.tally.clears = _stored_number(META_CLEARS, meta)
        self.tally.resyncs_before += _stored_number(META_RESYNCS, meta) - self.tally.resyncs
        contact.incomplete = META_INCOMPLETE in meta
        if META_PROCESS_START in meta:
            contact.process_start_s = float(meta[META_PROCESS_START])
        if META_RANK in meta:
            self.ranks.skips = not self.is_own(int(meta[META_RANK]))
        if META_LEARNED in meta:
            self.learner.load(unseal(META_LEARNED, meta[META_LEARNED]))
        if META_SCHEME in meta:
            stored = msgspec.json.decode(unseal(META_SCHEME, meta[META_SCHEME]), type=StoredScheme)
            scheme = HashScheme(stored.algo, bytes.fromhex(stored.none_hash), stored.lookahead)
            self.identity.restore(scheme, SchemeState(stored.standing), stored.hash_block_size)
        self.patch.epoch = meta.get(META_REPORT_EPOCH, b"").decode() or None
        if self.patch.epoch is not None and META_DECLARED in meta:
            self.declare(msgspec.json.decode(unseal(META_DECLARED, meta[META_DECLARED]), type=DeclaredCatalog))


def _stored_number(field: str, meta: dict[str, bytes]) -> int:
    number = int(meta.get(field, b"0"))
    if not 0 <= number <= UINT64_MAX:
        raise ValueError(f"{field} is {number}: expected 0 to {UINT64_MAX}")
    return number
