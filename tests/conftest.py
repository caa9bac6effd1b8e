# SPDX-License-Identifier: Apache-2.0
"""Settings of all tests.

In CI, hypothesis draws the same examples each time: what chance finds is found at a desk, not in somebody else's landing.
"""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True, database=None, print_blob=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
