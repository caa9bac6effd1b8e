# SPDX-License-Identifier: Apache-2.0
"""The metrics of the tiers, under the names that vLLM's /metrics shows."""

from __future__ import annotations

from dataclasses import dataclass, field

PREFIX = "vllm:kvrouter_offload_"

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
    f"{PREFIX}promotions": "Chunks read from disk into CPU memory for a request.",
    f"{PREFIX}promotions_refused": "Chunks on disk that a request wanted and for which no slot in CPU memory could be freed.",
    f"{PREFIX}promotions_failed": "Chunks that could not be read from disk, or were not what had been written.",
    f"{PREFIX}writes_skipped": "Chunks not written to disk because it did not keep up or is off.",
    f"{PREFIX}disk_written_bytes": "Bytes written to disk.",
    f"{PREFIX}disk_read_bytes": "Bytes read from disk.",
    f"{PREFIX}disk_errors": "Reads and writes of the disk that failed.",
    f"{PREFIX}disk_corrupt": "Records on disk that were dropped because they are not what had been written.",
    f"{PREFIX}disk_evicted": "Chunks evicted from disk to stay within its bytes.",
    f"{PREFIX}resets": "Resets of the tiers.",
}


@dataclass
class Sample:
    """The values of the metrics at one moment, by name; counters count since the start."""

    gauges: dict[str, float] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
