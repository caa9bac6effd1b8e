# SPDX-License-Identifier: Apache-2.0
"""From one worker's events to net changes of its residency. Pure."""
