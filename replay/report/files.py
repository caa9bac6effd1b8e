# SPDX-License-Identifier: Apache-2.0
"""A comparison as CSV."""

from __future__ import annotations

import csv
from pathlib import Path

import msgspec

from kvrouter.replay.report.comparison import POOLED, Comparison
from kvrouter.replay.runs.policy_run import Summary
from kvrouter.router.base.common.errors import SettingError


def write_csv(path: Path, found: Comparison) -> None:
    """Write one row for each policy and one for the bound, every number in full. Raises SettingError."""
    names = [field.name for field in msgspec.structs.fields(Summary)]
    try:
        with path.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(names)
            rows.writerows([getattr(row, name) for name in names] for row in found.rows)
            if found.pooled is not None:
                bound = {"policy": POOLED, **msgspec.structs.asdict(found.pooled)}
                rows.writerow([bound.get(name, "") for name in names])
    except OSError as error:
        raise SettingError(f"cannot write --csv {path}: {error.strerror}") from None
