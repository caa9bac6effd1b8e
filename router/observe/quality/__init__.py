# SPDX-License-Identifier: Apache-2.0
"""Predicted and delivered reuse."""
