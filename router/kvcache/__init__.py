# SPDX-License-Identifier: Apache-2.0
"""vLLM's cache rederived: groups, block hashes and the hit rule. Pure."""
