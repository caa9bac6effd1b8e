# SPDX-License-Identifier: Apache-2.0
"""Running a trace under one policy, and the results."""
