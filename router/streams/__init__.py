# SPDX-License-Identifier: Apache-2.0
"""Follows the fleet: one stream a worker, leases, and the mirror's updates."""
