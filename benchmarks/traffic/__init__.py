# SPDX-License-Identifier: Apache-2.0
"""Shapes of traffic drawn from seeds, and measures that compare policies on them."""
