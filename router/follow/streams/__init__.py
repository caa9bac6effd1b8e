# SPDX-License-Identifier: Apache-2.0
"""Follows one worker: its events, its lease, and whether its engine lives."""
