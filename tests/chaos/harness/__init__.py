# SPDX-License-Identifier: Apache-2.0
"""Simulated engines under load, faults on all sides of them, and an oracle that knows their blocks at each seq."""
