# SPDX-License-Identifier: Apache-2.0
"""A request trace, whatever it was written by."""
