# SPDX-License-Identifier: Apache-2.0
"""Simulated engines under load, faults on every side of them, and a judge who knows what each engine held at each
seq."""
