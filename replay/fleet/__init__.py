# SPDX-License-Identifier: Apache-2.0
"""Simulated replicas in virtual time, and this router's index over them."""
