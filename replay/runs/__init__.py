# SPDX-License-Identifier: Apache-2.0
"""A trace under one policy, and what came of it."""
