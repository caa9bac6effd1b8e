# SPDX-License-Identifier: Apache-2.0
"""Settings of all tests.

Nothing that hypothesis does is timed: a busy machine is no fault of the code.
In CI it draws the same examples each time: what chance finds is found at a desk, not in somebody else's landing.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("here"), derandomize=True, database=None, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")
