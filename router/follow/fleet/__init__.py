# SPDX-License-Identifier: Apache-2.0
"""Which workers there are, which router follows each, and the mirror of all."""
