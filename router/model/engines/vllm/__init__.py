# SPDX-License-Identifier: Apache-2.0
"""The description of vLLM and the readers of its answers."""
