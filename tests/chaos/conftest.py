# SPDX-License-Identifier: Apache-2.0
"""Configuration that makes the harness importable, as `run.py` does for itself."""

from __future__ import annotations
