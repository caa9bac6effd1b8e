# SPDX-License-Identifier: Apache-2.0
"""The page for people: what a browser gets at `/`."""
