# SPDX-License-Identifier: Apache-2.0
"""Engines' caches rederived: groups, block hashes and the hit rule. Pure."""
