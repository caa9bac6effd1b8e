# SPDX-License-Identifier: Apache-2.0
"""Predicted reuse compared with delivered reuse, and the latency of requests."""
