# SPDX-License-Identifier: Apache-2.0
"""What the hit rule reads: the catalogs of many workers as integers, and which blocks are resident. Compiled, see
`setup.py`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.int64]


class RuleTables:
    """geos, specs, members, exts: int64, columns as in `hit_tables.py`. rows: the place bits of every hash, uint16,
    shape (rows of all workers, hashes); set for each question."""

    def __init__(self, geos: Table, specs: Table, members: Table, exts: Table) -> None:
        self.geos = geos
        self.specs = specs
        self.members = members
        self.exts = exts
        self.rows = np.zeros((0, 0), np.uint16)
        # Room for the fixpoint: how far each full attention group reaches.
        self.full_lengths = np.zeros(max(1, specs.shape[0]), np.int64)
