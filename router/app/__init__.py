# SPDX-License-Identifier: Apache-2.0
"""The router as a program: its parts joined, started, stopped, diagnosed and commanded."""
