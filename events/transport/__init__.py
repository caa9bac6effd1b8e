# SPDX-License-Identifier: Apache-2.0
"""The parts that both streams share: connections, the receive loop, requests, bounds and permits."""
