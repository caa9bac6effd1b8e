# SPDX-License-Identifier: Apache-2.0
"""vLLM's cache derived anew: groups, block hashes and the hit rule. Pure."""
