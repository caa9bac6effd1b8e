# SPDX-License-Identifier: Apache-2.0
"""Connections to Redis, to a cluster, and the private server."""
