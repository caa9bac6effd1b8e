# SPDX-License-Identifier: Apache-2.0
"""The rules that turn one worker's events into net changes of its residency. Pure."""
