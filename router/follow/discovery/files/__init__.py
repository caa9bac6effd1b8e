# SPDX-License-Identifier: Apache-2.0
"""Workers and settings from watched files."""
