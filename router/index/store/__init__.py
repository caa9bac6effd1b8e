# SPDX-License-Identifier: Apache-2.0
"""What Redis holds of each worker, and how it is written and followed."""
