# SPDX-License-Identifier: Apache-2.0
"""An offload connector for vLLM with a CPU tier and a disk tier."""
