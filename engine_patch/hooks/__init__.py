# SPDX-License-Identifier: Apache-2.0
"""Where vLLM's code is hooked."""
