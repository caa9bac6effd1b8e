# SPDX-License-Identifier: Apache-2.0
"""Connections to Redis, to a cluster, through Sentinel, and the private server."""
