# SPDX-License-Identifier: Apache-2.0
"""The messages of the engine patch's sockets in both directions: `docs/reference/protocol.md` as structs.

The side that writes (`kvrouter.engine_patch`) and the side that reads (`kvrouter.router`, tests) share these
definitions. Every payload is one MessagePack map with a `type`. Fields at their default are left out, unknown ones are
skipped, and new ones are only added with a default. A block hash is 64 bits (the last 8 bytes of the engine's hash);
many travel as one big-endian binary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import msgspec
import numpy as np

from kvrouter.events.vllm.messages import HashArray

# The topic on the PUB socket. A change that old readers cannot follow gets another topic.
REPORT_TOPIC = b"kvrouter.v1"
PROTOCOL = 1

# The offset from the port of the engine's own KV events to ours, so that a router finds our port knowing only the
# engine's. It is far above vLLM's usual ports and their data-parallel offsets. If the sum is no port, the offset is
# subtracted.
REQUESTS_PORT_OFFSET = 10_000
REPORTS_PORT_OFFSET = 11_000
MAX_PORT = 65_535

# Hashes in one part of a snapshot: 64 KiB, so that live messages wait no longer than for one part.
SNAPSHOT_PART_BLOCKS = 8_192

# The digest of a set is the sum of its hashes modulo 2**64. Hashes are uniform, so two sets that differ agree with a
# probability of 2**-64.
DIGEST_MASK = (1 << 64) - 1


class ReportStored(msgspec.Struct, frozen=True, tag="stored", omit_defaults=True, gc=False, eq=False):
    """Blocks of one place that became resident, one physical copy each."""

    hashes: bytes
    group_idx: int | None
    medium: str
    # Tokens in a block; for a partial entry, the hash block size.
    block_size: int = 0
    # [[end, count], ...]: the next `count` hashes stand for the first end, end + block_size, ... tokens of their
    # prompt. Empty if that is not known.
    runs: list[tuple[int, int]] = []
    # Hash of the block before the first run; None at the start of a prompt or if it is not known.
    parent_hash: int | None = None
    kind: str | None = None
    sliding_window: int | None = None
    ownership: str | None = None
    locality: str | None = None
    lora_name: str | None = None


class ReportRemoved(msgspec.Struct, frozen=True, tag="removed", omit_defaults=True, gc=False, eq=False):
    """Blocks of one place that lost one physical copy each."""

    hashes: bytes
    group_idx: int | None
    medium: str
    ownership: str | None = None
    locality: str | None = None


class ReportCleared(msgspec.Struct, frozen=True, tag="cleared", omit_defaults=True, gc=False):
    """The loss of every block on one medium: of the given owner, or of every owner if `ownership` is None."""

    medium: str
    reason: str = ""
    ownership: str | None = None


ReportEvent: TypeAlias = ReportStored | ReportRemoved | ReportCleared


class Events(msgspec.Struct, frozen=True, tag="events", omit_defaults=True, eq=False):
    """A change of residency. No other message uses up a seq."""

    # The id of one life of the publisher: 16 hex digits, random.
    epoch: str
    # When this life of the publisher began, in seconds since 1970.
    started_s: float
    ts: float
    events: list[ReportEvent]
    dp_rank: int = 0
    # The engine's own seq of the batch that this message repeats; None if the engine's topic has not sent it yet.
    batch_seq: int | None = None
    # How many messages just before this one the publisher dropped because its queue was full; their seqs are used up.
    dropped: int = 0


class PlaceSummary(msgspec.Struct, frozen=True, omit_defaults=True):
    """The sums over all blocks in one place, for comparison with an index."""

    group_idx: int | None
    medium: str
    # Distinct hashes, physical copies, sum of the distinct hashes modulo 2**64.
    blocks: int
    copies: int
    digest: int
    ownership: str | None = None
    locality: str | None = None


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat", omit_defaults=True):
    """A sign of life, with the sums of the blocks that are resident after every message with a lower seq."""

    epoch: str
    started_s: float
    ts: float
    interval_s: float
    # Every place with at least one block.
    places: list[PlaceSummary]
    # A number that grows with every change of the catalog; 0 if no catalog could be read.
    catalog_version: int = 0
    # Messages dropped in this life because the queue was full.
    dropped: int = 0
    # Media with more blocks than the ledger may hold, which are no longer reported.
    untracked: list[str] = []
    # Why nothing is reported from now on, and why no medium except the GPU is; empty while they are reported.
    withheld: str = ""
    tiers_withheld: str = ""


class DeclaredGroup(msgspec.Struct, frozen=True, omit_defaults=True):
    """One KV cache group as the engine's coordinator has it. Sizes are in tokens, with context parallelism applied."""

    group_idx: int
    kind: str
    block_size: int
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    eagle: bool = False
    prefix_cacheable: bool = True
    # Groups with the same number are looked up jointly; None for groups that no lookup uses.
    spec_class: int | None = None


class HashExample(msgspec.Struct, frozen=True):
    """A root block as the engine hashes it, so that a reader can prove its own hashing."""

    token_ids: list[int]
    block_hash: int


class PeerAddress(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where an engine lends its chunks to other engines."""

    # A wildcard stands for the host at which the reader reaches the engine.
    host: str
    port: int
    # Two engines exchange chunks if both values are equal: a digest of model, layout and hash seed, in hex, and how often
    # the engine's caches were reset.
    exchange: str
    resets: int = 0
    # Bytes of all groups' KV cache for one token; 0 if that is not known.
    token_bytes: int = 0
    # The public CURVE key of the socket at which it lends; empty without encryption.
    key: str = ""
    # Names the machine, or the container if it has a network of its own: loopback addresses lead to the same engine only
    # within it. Empty if that is not known.
    machine: str = ""
    # Whether it lends what only its disk holds, too, and not its CPU tier alone.
    lends_disk: bool = False


class DeclaredCatalog(msgspec.Struct, frozen=True, omit_defaults=True):
    """All facts that a reader needs to predict hits, read from the running engine. None: absent or not readable."""

    groups: list[DeclaredGroup]
    hash_block_size: int | None = None
    scheduler_block_size: int | None = None
    # Every hit is a multiple of this.
    align: int | None = None
    partial_hits: bool | None = None
    retention_interval: int | None = None
    # "sha256", "sha256_cbor", "xxhash", "xxhash_cbor", or another name that readers may not know.
    hash_algo: str | None = None
    # In hex.
    none_hash: str | None = None
    hash_example: HashExample | None = None
    # vLLM 0.33 with EAGLE and no connector: every hash also covers this many following tokens.
    hash_lookahead_tokens: int = 0
    # A hit of at most this many tokens becomes 0 (vLLM 0.32 scheduler.py, prefix_replay_tokens).
    replay_window_tokens: int = 0
    # "tagged": ("lora", name, path), ("cache_salt", salt) ...; "plain": the bare values of older versions.
    extra_keys_form: str = "tagged"
    # Blocks that the offload tier stores as one; None if there is no such tier.
    offload_blocks_per_chunk: int | None = None
    # The path of each LoRA adapter by its name, both as given when it was loaded, because block hashes cover both.
    lora_paths: dict[str, str] = {}
    model_name: str | None = None
    dp_rank: int = 0
    max_model_len: int | None = None
    num_gpu_blocks: int | None = None
    dcp_size: int = 1
    pcp_size: int = 1
    connector: str | None = None
    # For logs.
    engine_version: str | None = None
    # Every connector, with those inside a MultiConnector after it; a class from outside vLLM with its module.
    connectors: list[str] = []
    # Whether hits of a SimpleCPUOffloadConnector may end wherever those of the GPU may; None without that connector.
    offload_partial_hits: bool | None = None
    # The engine whose hash scheme and hit rule hold: "vllm", "sglang", or another name that readers may not know.
    engine: str = "vllm"
    # None if the engine lends no chunks.
    peer: PeerAddress | None = None


class CatalogMessage(msgspec.Struct, frozen=True, tag="catalog", omit_defaults=True):
    """The catalog, which is published at start and with every change."""

    epoch: str
    started_s: float
    version: int
    catalog: DeclaredCatalog


Report: TypeAlias = Events | Heartbeat | CatalogMessage


class HelloRequest(msgspec.Struct, frozen=True, tag="hello", omit_defaults=True):
    """A request for a description of the publisher: a `Hello` with the same id."""

    id: int = 0


class SnapshotRequest(msgspec.Struct, frozen=True, tag="snapshot", omit_defaults=True):
    """A request for all resident blocks: `SnapshotPart`s, the last of them marked, or a `Refused`."""

    id: int = 0


Request: TypeAlias = HelloRequest | SnapshotRequest


class Hello(msgspec.Struct, frozen=True, tag="hello", omit_defaults=True):
    """A description of the publisher.

    `reports` is the PUB endpoint as bound; a wildcard in it stands for the host of the request.
    """

    id: int
    epoch: str
    started_s: float
    # The seq of the next `events` message.
    next_seq: int
    reports: str
    heartbeat_s: float
    protocol: int = PROTOCOL
    patch_version: str = ""
    catalog_version: int = 0
    catalog: DeclaredCatalog | None = None
    # The patch's features by name, each with "on" or why it is off.
    features: dict[str, str] = {}
    # See `Heartbeat.withheld`.
    withheld: str = ""


class SnapshotPart(msgspec.Struct, frozen=True, tag="snapshot", omit_defaults=True, eq=False):
    """Some blocks of one place. All parts of a snapshot describe the state before `events` message `next_seq`."""

    id: int
    epoch: str
    started_s: float
    next_seq: int
    index: int
    hashes: bytes = b""
    group_idx: int | None = None
    medium: str = ""
    ownership: str | None = None
    locality: str | None = None
    # The hashes among them that have two copies or more, and the number of copies.
    copied: list[tuple[int, int]] = []
    last: bool = False
    # Only in the last part, which has no hashes: the sums that the parts must add up to.
    places: list[PlaceSummary] = []


class Refused(msgspec.Struct, frozen=True, tag="refused", omit_defaults=True):
    """A refusal of a request, for now or, without `retry_s`, for good."""

    id: int
    reason: str
    retry_s: float | None = None


Reply: TypeAlias = Hello | SnapshotPart | Refused


def pack_hashes(hashes: HashArray | Iterable[int]) -> bytes:
    """Return hashes as 8 bytes each, big-endian, from a uint64 array or Python numbers."""
    if not isinstance(hashes, np.ndarray):
        hashes = np.fromiter(hashes, np.uint64)
    return hashes.astype(">u8").tobytes()


def unpack_hashes(packed: bytes) -> HashArray:
    """Return a native uint64 array, shape (n,). Raises ValueError if the bytes are no whole number of hashes."""
    if len(packed) % 8:
        raise ValueError(f"{len(packed)} bytes are no whole number of 8-byte hashes")
    return np.frombuffer(packed, ">u8").astype(np.uint64)


def derived_endpoint(endpoint: str, offset: int, suffix: str) -> str | None:
    """Return where the patch listens next to the engine's own event endpoint, as bound or as registered.

    For tcp, that is the port plus `offset`, or minus it if the sum is no port. For ipc and inproc, `suffix` is
    appended. Returns None if the endpoint has no port.
    """
    scheme, _, rest = endpoint.partition("://")
    if scheme in ("ipc", "inproc"):
        return f"{endpoint}{suffix}"
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not port.isdecimal() or not 0 < int(port) <= MAX_PORT:
        return None
    number = int(port) + offset
    return f"tcp://{host}:{number if number <= MAX_PORT else int(port) - offset}"


def requests_endpoint(events_endpoint: str) -> str | None:
    """Return the endpoint of the ROUTER socket that belongs to an engine's event endpoint."""
    return derived_endpoint(events_endpoint, REQUESTS_PORT_OFFSET, ".kvrouter-requests")


def reports_endpoint(events_endpoint: str) -> str | None:
    """Return the endpoint of the PUB socket that belongs to an engine's event endpoint."""
    return derived_endpoint(events_endpoint, REPORTS_PORT_OFFSET, ".kvrouter-reports")
