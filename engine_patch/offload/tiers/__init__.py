# SPDX-License-Identifier: Apache-2.0
"""The chunks that each tier holds, and the policies that evict them."""
