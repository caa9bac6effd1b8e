# SPDX-License-Identifier: Apache-2.0
"""vLLM's own event stream."""
