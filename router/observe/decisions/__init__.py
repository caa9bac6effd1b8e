# SPDX-License-Identifier: Apache-2.0
"""The decisions that are kept: which worker got each request, and why."""
