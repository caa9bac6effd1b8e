# SPDX-License-Identifier: Apache-2.0
"""Sources of workers besides registration."""
