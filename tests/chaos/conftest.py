# SPDX-License-Identifier: Apache-2.0
"""Makes the harness importable, as `run.py` does for itself."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
