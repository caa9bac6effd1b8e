# SPDX-License-Identifier: Apache-2.0
"""The path from a question to every worker's hit, in memory."""
