# SPDX-License-Identifier: Apache-2.0
"""The settings of a router process, from a file, the environment and flags."""
