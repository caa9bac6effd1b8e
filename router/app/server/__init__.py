# SPDX-License-Identifier: Apache-2.0
"""Wiring, start, signals and processes."""
