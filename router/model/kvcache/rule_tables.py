# SPDX-License-Identifier: Apache-2.0
"""The input of the hit rule: the catalogs of many workers as integers, and which blocks are resident.

This module is compiled, see `setup.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.int64]


class RuleTables:
    """The tables that the hit rule reads.

    `geos`, `specs`, `members` and `exts` are int64, and their columns are constants of `hit_tables.py`.
    """

    def __init__(self, geos: Table, specs: Table, members: Table, exts: Table) -> None:
        # One row for each worker.
        self.geos = geos
        # One row for each spec group on each medium.
        self.specs = specs
        # One row for each group of a spec group.
        self.members = members
        # One row for each group of a worker with an OffloadingConnector.
        self.exts = exts
        # The place bits of every hash, uint16, shape (rows of all workers, hashes); set for each question.
        self.rows = np.zeros((0, 0), np.uint16)
        # The first row of the worker that lends chunks to the judged one, -1 if none does; and the difference
        # between the indices of one group of both workers in `exts`, the lender's less that of the judged worker.
        self.lender_row = -1
        self.lender_shift = 0
        # Scratch space of the fixpoint: how far each spec group of full attention reaches, -1 if not computed yet.
        self.full_lengths = np.zeros(max(1, specs.shape[0]), np.int64)
