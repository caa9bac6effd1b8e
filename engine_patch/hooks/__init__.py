# SPDX-License-Identifier: Apache-2.0
"""The places in vLLM's code where the patch is hooked."""
