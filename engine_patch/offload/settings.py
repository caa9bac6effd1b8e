# SPDX-License-Identifier: Apache-2.0
"""The user's settings of the tiers, from `kv_connector_extra_config`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

DEFAULT_POLICY = "lru"
DEFAULT_DISK_THREADS = 4
MAX_DISK_THREADS = 64
SHARED_MEMORY = "/dev/shm"

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
    }
    if unknown_names := sorted(given.keys() - known_names - OF_VLLM):
        raise ValueError(
            f"kv_connector_extra_config has {', '.join(unknown_names)}, which this offload tier does not know; "
            f"it knows {', '.join(sorted(known_names))}"
        )
    if given.get("canonical_layout"):
        raise ValueError("canonical_layout is not supported by this offload tier: leave it out")
    folder = given.get("disk_path")
    read_only = given.get("disk_read_only", False)
    if not isinstance(read_only, bool):
        raise ValueError(f"disk_read_only is {read_only!r}; it must be true or false")
    if folder is None:
        for name in ("disk_bytes_to_use", "disk_read_only"):
            if name in given:
                raise ValueError(f"{name} is set without disk_path: name a folder, or leave both out")
    if read_only and "disk_bytes_to_use" in given:
        raise ValueError(
            "disk_bytes_to_use is set with disk_read_only: the budget is that of the engine that writes the folder"
        )
    return TierSettings(
        cpu_bytes=_number(given, "cpu_bytes_to_use", None),
        policy=str(given.get("eviction_policy", DEFAULT_POLICY)),
        disk_folder=None if folder is None else Path(str(folder)),
        disk_bytes=0 if folder is None or read_only else _number(given, "disk_bytes_to_use", None),
        disk_read_only=read_only,
        disk_threads=_number(given, "disk_threads", DEFAULT_DISK_THREADS, MAX_DISK_THREADS),
        shared_memory=Path(str(given.get("shared_memory_path", SHARED_MEMORY))),
    )


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
