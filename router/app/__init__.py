# SPDX-License-Identifier: Apache-2.0
"""The router as a program: its parts are joined, started, stopped, diagnosed and commanded here."""
