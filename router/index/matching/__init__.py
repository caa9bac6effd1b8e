# SPDX-License-Identifier: Apache-2.0
"""From a question to every worker's hit, in memory."""
