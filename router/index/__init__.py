# SPDX-License-Identifier: Apache-2.0
"""The index: how events become the blocks that each worker holds, in Redis and in memory, and the hits in them."""
