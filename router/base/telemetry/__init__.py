# SPDX-License-Identifier: Apache-2.0
"""Metrics and log format of a process."""
