# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a fleet, by what this shows, and what mends it."""
