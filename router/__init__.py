# SPDX-License-Identifier: Apache-2.0
"""Follows engines' caches, and routes requests to where their prefix is."""
