# SPDX-License-Identifier: Apache-2.0
"""What is in flight where, and how fast each worker is."""
