# SPDX-License-Identifier: Apache-2.0
"""ZMQ sockets with bounds, permits and reconnection."""
