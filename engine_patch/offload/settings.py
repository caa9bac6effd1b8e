# SPDX-License-Identifier: Apache-2.0
"""The user's settings of the tiers, from `kv_connector_extra_config`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvrouter.engine_patch.offload.peer.peer_source import MAX_PORT, MAX_TIMEOUT_S, MIN_TIMEOUT_S

DEFAULT_POLICY = "lru"
DEFAULT_DISK_THREADS = 4
MAX_DISK_THREADS = 64
SHARED_MEMORY = "/dev/shm"
DEFAULT_PEER_HOST = "127.0.0.1"
# Chunks of 2,000 tokens of an 8 B model are 256 MB: 0.2 s at 10 Gbit/s.
DEFAULT_PEER_TIMEOUT_S = 1.0
PEER_OPTIONS = ("peer_host", "peer_timeout_s", "peer_lends_disk", "peer_key_file", "peer_list_file")

# Keys that vLLM's own connector reads (0.33 offloading/config.py, offloading/scheduler.py, v1/kv_offload/base.py).
OF_VLLM = frozenset(
    {
        "spec_name",
        "spec_module_path",
        "blocks_per_chunk",
        "block_size",
        "self_describing_kv_events",
        "offload_prompt_only",
        "canonical_layout",
        # From 0.33 on: the bytes up to which loads are waited for within their step.
        "sync_load_budget_bytes",
    }
)


class TierSettings(msgspec.Struct, frozen=True):
    """The settings of the tiers; bytes are those of all ranks of the node together."""

    cpu_bytes: int
    policy: str = DEFAULT_POLICY
    disk_folder: Path | None = None
    disk_bytes: int = 0
    disk_threads: int = DEFAULT_DISK_THREADS
    # Whether another engine writes the folder and this one only reads it.
    disk_read_only: bool = False
    shared_memory: Path = Path(SHARED_MEMORY)
    # Where this engine lends its chunks to others; None: it neither lends nor fetches any.
    peer_port: int | None = None
    peer_host: str = DEFAULT_PEER_HOST
    # How long a request waits for chunks of another engine, unless it names its own timeout.
    peer_timeout_s: float = DEFAULT_PEER_TIMEOUT_S
    # Whether chunks that only the disk holds are lent, too.
    peer_lends_disk: bool = False
    peer_key_file: str | None = None
    peer_list_file: str | None = None


def tier_settings(given: Mapping[str, Any]) -> TierSettings:
    """Return the settings in `kv_connector_extra_config`.

    Raises:
        ValueError: A setting is wrong; the text names the key and the values that it accepts.
    """
    known_names = {
        "cpu_bytes_to_use",
        "eviction_policy",
        "disk_path",
        "disk_bytes_to_use",
        "disk_read_only",
        "disk_threads",
        "shared_memory_path",
        "peer_port",
        *PEER_OPTIONS,
    }
    if unknown_names := sorted(given.keys() - known_names - OF_VLLM):
        raise ValueError(
            f"kv_connector_extra_config has {', '.join(unknown_names)}, which this offload tier does not know; "
            f"it knows {', '.join(sorted(known_names))}"
        )
    if given.get("canonical_layout"):
        raise ValueError("canonical_layout is not supported by this offload tier: leave it out")
    folder = given.get("disk_path")
    read_only, lends_disk = _flag(given, "disk_read_only"), _flag(given, "peer_lends_disk")
    if folder is None:
        for name in ("disk_bytes_to_use", "disk_read_only"):
            if name in given:
                raise ValueError(f"{name} is set without disk_path: name a folder, or leave both out")
    if read_only and "disk_bytes_to_use" in given:
        raise ValueError(
            "disk_bytes_to_use is set with disk_read_only: the budget is that of the engine that writes the folder"
        )
    has_peers = given.get("peer_port") is not None
    for name in PEER_OPTIONS:
        if name in given and not has_peers:
            raise ValueError(f"{name} is set without peer_port: set a port, or leave both out")
    if lends_disk and folder is None:
        raise ValueError("peer_lends_disk is set without disk_path: name a folder, or leave both out")
    return TierSettings(
        cpu_bytes=_number(given, "cpu_bytes_to_use", None),
        policy=str(given.get("eviction_policy", DEFAULT_POLICY)),
        disk_folder=None if folder is None else Path(str(folder)),
        disk_bytes=0 if folder is None or read_only else _number(given, "disk_bytes_to_use", None),
        disk_read_only=read_only,
        disk_threads=_number(given, "disk_threads", DEFAULT_DISK_THREADS, MAX_DISK_THREADS),
        shared_memory=Path(str(given.get("shared_memory_path", SHARED_MEMORY))),
        peer_port=_number(given, "peer_port", None, MAX_PORT) if has_peers else None,
        peer_host=str(given.get("peer_host", DEFAULT_PEER_HOST)),
        peer_timeout_s=_seconds(given, "peer_timeout_s", DEFAULT_PEER_TIMEOUT_S, MIN_TIMEOUT_S, MAX_TIMEOUT_S),
        peer_lends_disk=lends_disk,
        peer_key_file=_text(given, "peer_key_file"),
        peer_list_file=_text(given, "peer_list_file"),
    )


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be true or false")
    return value


def _text(given: Mapping[str, Any], name: str) -> str | None:
    value = given.get(name)
    return None if value is None else str(value)


def _seconds(given: Mapping[str, Any], name: str, default: float, least: float, most: float) -> float:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ValueError(f"{name} is {value!r}; it must be a number of seconds from {least:g} to {most:g}")
    return float(value)


def _number(given: Mapping[str, Any], name: str, default: int | None, most: int | None = None) -> int:
    value = given.get(name, default)
    if value is None:
        raise ValueError(f"kv_connector_extra_config lacks {name}: a number of at least 1")
    try:
        number = int(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {value!r}, which is no whole number") from None
    if number < 1 or (most is not None and number > most):
        raise ValueError(
            f"{name} is {number}; it must be at least 1" + ("" if most is None else f" and at most {most}")
        )
    return number
