# SPDX-License-Identifier: Apache-2.0
"""The KV cache of a simulated replica."""
