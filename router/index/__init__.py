# SPDX-License-Identifier: Apache-2.0
"""The index: from events to the blocks that each worker holds, in Redis and in memory, and the hits in it."""
