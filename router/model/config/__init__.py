# SPDX-License-Identifier: Apache-2.0
"""Settings from file, environment and flags."""
