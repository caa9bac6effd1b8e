# SPDX-License-Identifier: Apache-2.0
"""Predictions, decisions and findings, compared with their outcomes."""
