# SPDX-License-Identifier: Apache-2.0
"""The metrics of the tiers, under the names that vLLM's /metrics shows."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrouter.engine_patch.offload.peer.peer_miss import PeerMiss

PREFIX = "vllm:kvrouter_offload_"

# These texts say why a chunk did not come, by reason.
PEER_MISSES = {
    PeerMiss.ABSENT: "it does not hold",
    PeerMiss.EVICTED: "it evicted after it was queried for them",
    PeerMiss.DISK: "it could not read from its disk",
    PeerMiss.DEADLINE: "did not arrive in time",
    PeerMiss.GONE: "could not come because no engine answers there, or it ended during the transfer",
    PeerMiss.STALLED: "were not tried because an earlier transfer from there is overdue",
    PeerMiss.LAYOUT: "do not fit: it has another model, other weights, another block size or another division among ranks",
    PeerMiss.SEED: "it names differently, because its hash seed is another",
    PeerMiss.RESETS: "may be of other weights: one of the two engines was reset more often",
    PeerMiss.CHECKSUM: "arrived with other content, and were dropped",
    PeerMiss.BUSY: "were not tried because it lends as much as it may, has no slot for them, or too many sources are in use",
    PeerMiss.NO_ROOM: "found no room in CPU memory here",
    PeerMiss.FORBIDDEN: "may not be fetched from its address",
    PeerMiss.PROTOCOL: "did not come because its messages were not understood",
    PeerMiss.TRANSFER: "did not come because NIXL reported an error",
    PeerMiss.FAULT: "did not come because of an unexpected error, here or there, which that engine logged",
}

# The documentation of each metric by its name.
GAUGES = {
    f"{PREFIX}cpu_chunks": "Chunks in CPU memory, also those on their way there.",
    f"{PREFIX}cpu_usage_perc": "Fraction of the slots in CPU memory that hold a chunk (0.0 to 1.0).",
    f"{PREFIX}disk_chunks": "Chunks on disk.",
    f"{PREFIX}disk_bytes": "Bytes on disk.",
    f"{PREFIX}disk_pending": "Reads and writes of the disk that are queued or under way.",
    f"{PREFIX}disk_off": "1 while the disk is left alone after errors, or because its writer was not reset as often, else 0.",
}
COUNTERS = {
    f"{PREFIX}stores_refused": "Calls to store chunks for which no slot in CPU memory could be freed.",
    f"{PREFIX}promotions": "Chunks read from disk into CPU memory for a request, here or on another engine.",
    f"{PREFIX}promotions_refused": "Chunks on disk that a request wanted and for which no slot in CPU memory could be freed.",
    f"{PREFIX}promotions_failed": "Chunks that could not be read from disk, or were not what had been written.",
    f"{PREFIX}writes_skipped": "Chunks not written to disk because it did not keep up or is off.",
    f"{PREFIX}disk_written_bytes": "Bytes written to disk.",
    f"{PREFIX}disk_read_bytes": "Bytes read from disk.",
    f"{PREFIX}disk_errors": "Reads and writes of the disk that failed.",
    f"{PREFIX}disk_corrupt": "Records on disk that were dropped because they are not what had been written.",
    f"{PREFIX}disk_evicted": "Chunks evicted from disk to stay within its bytes.",
    f"{PREFIX}resets": "Resets of the tiers.",
    f"{PREFIX}handed_over": "Chunks fetched from another engine because it handed its cache over.",
    f"{PREFIX}peer_pulled": "Chunks fetched from another engine for a request.",
    f"{PREFIX}peer_lent": "Chunks lent to other engines.",
    f"{PREFIX}peer_lent_from_disk": "Lent chunks that were read from disk for that.",
    f"{PREFIX}peer_disk_failed": "Chunks that were not lent because they could not be read from disk.",
    f"{PREFIX}peer_disk_late": "Chunks that were not lent because they were not read from disk in time.",
    f"{PREFIX}peer_expired_loans": "Loans that another engine did not end itself.",
    f"{PREFIX}peer_refused_readers": "Engines that were refused: their model, layout or seed differs, or their key is not listed.",
    f"{PREFIX}peer_bad_messages": "Messages of other engines that were not understood.",
    **{
        f"{PREFIX}peer_miss_{miss.value}": f"Chunks that a request's source was to send and that {meaning}."
        for miss, meaning in PEER_MISSES.items()
    },
}


@dataclass
class Sample:
    """The values of the metrics at one moment, by name; counters count since the start."""

    gauges: dict[str, float] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
