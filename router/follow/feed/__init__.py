# SPDX-License-Identifier: Apache-2.0
"""The fleet's events as one stream."""
