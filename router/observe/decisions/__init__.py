# SPDX-License-Identifier: Apache-2.0
"""Why each request went where it went: the decisions that are kept."""
