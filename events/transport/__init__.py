# SPDX-License-Identifier: Apache-2.0
"""What both streams share: connections, the receive loop, requests, bounds and permits."""
