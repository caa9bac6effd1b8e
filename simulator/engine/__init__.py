# SPDX-License-Identifier: Apache-2.0
"""Scheduler and clock of a simulated replica."""
