# SPDX-License-Identifier: Apache-2.0
"""The caches of engines, rederived: KV cache groups, block hashes and the hit rule. Pure."""
