# SPDX-License-Identifier: Apache-2.0
"""The following of one worker: its events, its lease, and the life of its engine."""
