# SPDX-License-Identifier: Apache-2.0
"""What each tier holds, and what it evicts."""
