# SPDX-License-Identifier: Apache-2.0
"""A request trace, in any of several formats."""
